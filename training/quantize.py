"""Turns a float graph into an int8 graph with a scale for each row, so that no text changes another's answer.

A product of activations and weights is made in 8 bits: activations with a scale for each row (a row is a
token), weights with a scale for each column. Outside attention all rows stand in one matrix [tokens, width].
Attention itself stays in float. Knows nothing of transformers, files, tokenizers or bounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from training.attention import fuse_attention
from training.rewrite import (
    ELEMENTWISE,
    add_constant,
    clean,
    constant_of,
    describe,
    name_of_constant,
    rank_of,
    shape_of,
)

MICROSOFT = "com.microsoft"
OPSET = 23
WEIGHT_STEPS = 127
# The code that stands for 0.0. onnxruntime's fast kernels want unsigned activations beside signed weights.
ZERO = 128
# Gelu is never below -0.17: few codes are needed under 0, and the others make the steps finer.
GELU_LEAST = 0.17
GELU_ZERO = 48
# The largest value of a row is taken to be at least this, so that a row of zeros divides by something.
SMALLEST = 1e-6

Floats = NDArray[np.float32]


def quantize(model: ir.Model) -> int:
    """Rewrites a float graph (see `training.graph.trace`) in place. Returns how many products became int8."""
    model.graph.opset_imports[""] = OPSET
    model.graph.opset_imports[MICROSOFT] = 1
    fuse_attention(model)
    products = _Rows(model).rewrite()
    _quantize_words(model)
    clean(model)
    return products


def quantize_columns(weight: Floats) -> tuple[NDArray[np.int8], Floats]:
    """float32[inputs, outputs] -> int8 of the same shape and the scale float32[outputs] of each column.

    Symmetric, -127 to 127; a column of zeros gets the scale 1.
    """
    scale = np.abs(weight).max(axis=0) / np.float32(WEIGHT_STEPS)
    scale[scale == 0] = 1
    return np.rint(weight / scale).astype(np.int8), scale.astype(np.float32)


def _quantize_words(model: ir.Model) -> None:
    """The word table, half of a small model, is kept in int8 with a scale for each of its rows."""
    for node in list(model.graph):
        table = constant_of(node.inputs[0]) if node.op_type == "Gather" else None
        ids = node.inputs[1] if table is not None else None
        if table is None or table.ndim != 2 or ids is None or ids.name != "input_ids":
            continue
        name = name_of_constant(node.inputs[0])
        codes, scale = quantize_columns(table.astype(np.float32).T)
        parts = [
            ir.node("Gather", [add_constant(model, f"{name}.{kind}", array), ids])
            for kind, array in (("int8", codes.T), ("scale", scale[:, None]))
        ]
        widen = ir.node("Cast", parts[0].outputs, {"to": ir.DataType.FLOAT})
        product = ir.node("Mul", [widen.outputs[0], parts[1].outputs[0]])
        model.graph.extend([*parts, widen, product])
        node.outputs[0].replace_all_uses_with(product.outputs[0])


@dataclass(frozen=True, slots=True)
class _Quantized:
    """Codes uint8[rows, width], the scale float32[rows, 1] of each row, and the code that stands for 0.0."""

    codes: ir.Value
    scale: ir.Value
    zero: int


@dataclass
class _Rows:
    """Rewrites values [n, length, width] as matrices [n * length, width], and their products in 8 bits.

    `flat` holds the matrix of a value, `quantized` its codes; each is made once, whoever reads it.
    """

    model: ir.Model
    flat: dict[ir.Value, ir.Value] = field(default_factory=dict)
    whole: dict[ir.Value, ir.Value] = field(default_factory=dict)
    quantized: dict[ir.Value, _Quantized] = field(default_factory=dict)
    shapes: dict[tuple[int, ...], ir.Value] = field(default_factory=dict)
    zeros: dict[tuple[bool, int], ir.Value] = field(default_factory=dict)

    def rewrite(self) -> int:
        """Walks down the graph once. Returns how many products are in 8 bits now."""
        products = 0
        for node in list(self.model.graph):
            source = node.inputs[0] if node.inputs else None
            weight = constant_of(node.inputs[1]) if node.op_type == "MatMul" else None
            if source is None:
                continue
            if weight is not None and weight.ndim == 2 and _is_rows(source):
                name = name_of_constant(node.inputs[1])
                self.flat[node.outputs[0]] = self._product(source, weight.astype(np.float32), name)
                products += 1
            elif self._goes_row_by_row(node):
                operands = [self._matrix(v) if v is not None and _is_rows(v) else v for v in node.inputs]
                self.flat[node.outputs[0]] = self._add(node.op_type, operands, dict(node.attributes))
            elif source not in self.flat or not self._reads_matrix(node, source):
                for at, value in enumerate(node.inputs):
                    if value is not None and value in self.flat:
                        node.replace_input_with(at, self._cube(value))
        return products

    def _reads_matrix(self, node: ir.Node, source: ir.Value) -> bool:
        """Whether the node could be replaced by one that reads the matrix of its source."""
        result = node.outputs[0]
        if node.op_type == "Reshape" and rank_of(result) == 4:
            heads = [dim for dim in shape_of(result)[2:] if isinstance(dim, int)]
            result.replace_all_uses_with(
                self._add("Reshape", [self.flat[source], self._target(source, heads)])
            )
            return True
        if node.op_type == "Gather" and _is_one_position(source) and rank_of(result) == 2:
            # The pooling: position 0 of the only position there is.
            result.replace_all_uses_with(self.flat[source])
            return True
        return False

    def _goes_row_by_row(self, node: ir.Node) -> bool:
        """Whether the node may work on matrices: no operand crosses from one row to another."""
        if node.op_type not in ELEMENTWISE and node.op_type != "LayerNormalization":
            return False
        constants = [constant_of(value) for value in node.inputs]
        fits = [
            value in self.flat or (value is not None and _is_rows(value)) or (c is not None and c.ndim <= 1)
            for value, c in zip(node.inputs, constants, strict=True)
        ]
        alike = {
            str(v.shape[:2]) for v in node.inputs if v is not None and _is_rows(v) and v.shape is not None
        }
        return all(fits) and len(alike) == 1 and any(value in self.flat for value in node.inputs)

    def _product(self, source: ir.Value, weight: Floats, name: str) -> ir.Value:
        rows = self._quantize(source)
        codes, scale = quantize_columns(weight)
        product = self._add(
            "MatMulIntegerToFloat",
            [
                rows.codes,
                self._constant(f"{name}.int8", codes),
                self._constant("one", np.float32(1)),
                self._constant(f"{name}.scale", scale),
                self._constant(f"zero.{rows.zero}", np.uint8(rows.zero)),
            ],
            domain=MICROSOFT,
        )
        return self._add("Mul", [product, rows.scale])

    def _quantize(self, source: ir.Value) -> _Quantized:
        """q = round(x / scale) + zero, with scale = max |x| of the row / (255 - zero)."""
        if source in self.quantized:
            return self.quantized[source]
        rows, axis = self._matrix(source), self._constant("axis.1", np.array([1]))
        producer = source.producer()
        gelu = producer is not None and producer.op_type == "Gelu"
        zero = GELU_ZERO if gelu else ZERO
        steps = 255 - zero
        size = rows if gelu else self._add("Abs", [rows])
        least = GELU_LEAST * steps / zero if gelu else SMALLEST
        largest = self._add("ReduceMax", [size, axis], {"keepdims": 0})
        largest = self._add("Max", [largest, self._constant(f"least.{zero}", np.float32(least))])
        scale = self._add("Mul", [largest, self._constant(f"step.{zero}", np.float32(1 / steps))])
        codes = self._add("QuantizeLinear", [rows, scale, self._zeros(source, scale, zero)], {"axis": 0})
        self.quantized[source] = _Quantized(codes, self._add("Unsqueeze", [scale, axis]), zero)
        return self.quantized[source]

    def _zeros(self, source: ir.Value, scale: ir.Value, zero: int) -> ir.Value:
        """The zero code, once a row: uint8[rows]. The same for all values of as many rows."""
        key = (_is_one_position(source), zero)
        if key not in self.zeros:
            code = self._constant(f"zeros.{zero}", np.array([zero], dtype=np.uint8))
            self.zeros[key] = self._add("Expand", [code, self._add("Shape", [scale])])
        return self.zeros[key]

    def _matrix(self, value: ir.Value) -> ir.Value:
        """[n, length, width] -> [n * length, width]"""
        if value not in self.flat:
            width = _width(value)
            shape = self._constant(f"rows.{width}", np.array([-1, width], dtype=np.int64))
            self.flat[value] = self._add("Reshape", [value, shape])
        return self.flat[value]

    def _cube(self, value: ir.Value) -> ir.Value:
        """[n * length, width] -> [n, length, width]"""
        if value not in self.whole:
            cube = self._add("Reshape", [self.flat[value], self._target(value, [_width(value)])])
            describe(cube, value.shape, value.dtype)
            self.whole[value] = cube
        return self.whole[value]

    def _target(self, value: ir.Value, last: Sequence[int]) -> ir.Value:
        """The shape [n, length, *last] as a tensor; length is 1 where only one position is left."""
        if _is_one_position(value):
            name = "one." + "x".join(map(str, last))
            return self._constant(name, np.array([-1, 1, *last], dtype=np.int64))
        key = tuple(last)
        if key not in self.shapes:
            size = self._add("Shape", [self.model.graph.inputs[0]])
            tail = self._constant("tail." + "x".join(map(str, last)), np.array(last, dtype=np.int64))
            self.shapes[key] = self._add("Concat", [size, tail], {"axis": 0})
        return self.shapes[key]

    def _constant(self, name: str, array: NDArray[np.generic] | np.generic) -> ir.Value:
        return add_constant(self.model, name, np.asarray(array))

    def _add(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: dict[str, ir.Attr] | dict[str, int] | None = None,
        *,
        domain: str = "",
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes, domain=domain)
        self.model.graph.append(node)
        return node.outputs[0]


def _is_rows(value: ir.Value) -> bool:
    """Whether the value is [n, length, width] with a known width, and no constant."""
    return rank_of(value) == 3 and isinstance(shape_of(value)[2], int) and constant_of(value) is None


def _is_one_position(value: ir.Value) -> bool:
    return shape_of(value)[1] == 1


def _width(value: ir.Value) -> int:
    width = shape_of(value)[2]
    if not isinstance(width, int):
        raise TypeError("the width of a value depends on the input")
    return width
