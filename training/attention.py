"""Replaces attention that is written out in a graph by one operation, which is faster.

What is not written in the known way stays as it is. Knows nothing of precision, transformers or files.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from training.rewrite import add_constant, clean, constant_of, describe

SPLIT_HEADS = [0, 2, 1, 3]
SPLIT_HEADS_TURNED = [0, 2, 3, 1]


@dataclass(frozen=True, slots=True)
class Attention:
    """softmax(scale · q kᵀ + biases) v, as it is written out.

    Attributes:
        query, key, value: [n, length, width] before the heads are split; the query may have length 1.
        biases: added to the scores, each broadcast to [n, heads, query length, length].
        result: [n, query length, width], the heads side by side again.
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value
    heads: int
    scale: float
    biases: tuple[ir.Value, ...]
    result: ir.Value


def fuse_attention(model: ir.Model) -> int:
    """Rewrites in place (opset 23 or later). Returns how many attentions were replaced."""
    found = [attention for node in model.graph if (attention := _recognise(node)) is not None]
    masks: dict[tuple[bool, tuple[ir.Value, ...]], ir.Value] = {}
    for attention in found:
        # The mask of a single query row is another one than that of all rows.
        key = (_has_one_row(attention), attention.biases)
        if key not in masks:
            masks[key] = _mask(model, attention)
        inputs = [attention.query, attention.key, attention.value, masks[key]]
        heads = {"q_num_heads": attention.heads, "kv_num_heads": attention.heads}
        fused = ir.node("Attention", inputs, {**heads, "scale": attention.scale})
        describe(fused.outputs[0], attention.result.shape, attention.result.dtype)
        model.graph.append(fused)
        attention.result.replace_all_uses_with(fused.outputs[0])
    clean(model)
    return len(found)


def _mask(model: ir.Model, attention: Attention) -> ir.Value:
    """The sum of the biases, with a row for each query, as the operation wants it."""
    total, *others = attention.biases
    for bias in others:
        added = ir.node("Add", [total, bias])
        model.graph.append(added)
        total = added.outputs[0]
    if others or _has_one_row(attention):
        return total

    def constant(name: str, values: list[int]) -> ir.Value:
        return add_constant(model, name, np.array(values, dtype=np.int64))

    # [n, 1, 1, length] -> [n, 1, length, length]
    size = ir.node("Shape", [model.graph.inputs[0]])
    count = ir.node("Gather", [size.outputs[0], constant("mask.n", [0])])
    square = ir.node("Gather", [size.outputs[0], constant("mask.square", [1, 1])])
    one = constant("mask.heads", [1])
    shape = ir.node("Concat", [count.outputs[0], one, square.outputs[0]], {"axis": 0})
    expanded = ir.node("Expand", [total, shape.outputs[0]])
    model.graph.extend([size, count, square, shape, expanded])
    return expanded.outputs[0]


def _has_one_row(attention: Attention) -> bool:
    return attention.query.shape is not None and attention.query.shape[1] == 1


def _recognise(softmax: ir.Node) -> Attention | None:
    """The attention that a Softmax is the heart of, or None."""
    if softmax.op_type != "Softmax" or softmax.inputs[0] is None:
        return None
    mixed = _only_reader(softmax.outputs[0], "MatMul")
    joined = _only_reader(mixed.outputs[0], "Transpose") if mixed is not None else None
    result = _only_reader(joined.outputs[0], "Reshape") if joined is not None else None
    if mixed is None or joined is None or result is None or _perm(joined) != SPLIT_HEADS:
        return None
    scores, scale, biases = _scores(softmax.inputs[0])
    if scores is None or not biases:
        return None
    query = _before_heads(scores.inputs[0], SPLIT_HEADS)
    key = _before_heads(scores.inputs[1], SPLIT_HEADS_TURNED)
    value = _before_heads(mixed.inputs[1], SPLIT_HEADS)
    if query is None or key is None or value is None:
        return None
    if not query[1] == key[1] == value[1]:
        return None
    return Attention(query[0], key[0], value[0], query[1], scale, tuple(biases), result.outputs[0])


def _scores(value: ir.Value) -> tuple[ir.Node | None, float, list[ir.Value]]:
    """Takes `scale * (q @ k) + bias + ...` apart: the product, the scale and the biases."""
    biases: list[ir.Value] = []
    node = value.producer()
    while node is not None and node.op_type == "Add":
        left, right = node.inputs
        if left is None or right is None:
            break
        biases.append(right)
        node = left.producer()
    scale = 1.0
    if node is not None and node.op_type in {"Mul", "Div"}:
        factor = constant_of(node.inputs[1])
        if factor is None or factor.size != 1 or node.inputs[0] is None:
            return None, scale, biases
        scale = float(factor) if node.op_type == "Mul" else 1 / float(factor)
        node = node.inputs[0].producer()
    return (node if node is not None and node.op_type == "MatMul" else None), scale, biases


def _before_heads(value: ir.Value | None, perm: list[int]) -> tuple[ir.Value, int] | None:
    """What was split into heads and transposed by `perm` to give the value, and the number of heads."""
    turned = value.producer() if value is not None else None
    if turned is None or turned.op_type != "Transpose" or _perm(turned) != perm or turned.inputs[0] is None:
        return None
    split = turned.inputs[0].producer()
    if split is None or split.op_type != "Reshape" or split.inputs[0] is None:
        return None
    shape = split.outputs[0].shape
    heads = shape[2] if shape is not None and shape.rank() == 4 else None
    return (split.inputs[0], heads) if isinstance(heads, int) else None


def _only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    readers = list(value.consumers())
    return readers[0] if len(readers) == 1 and readers[0].op_type == op_type else None


def _perm(node: ir.Node) -> list[int]:
    return list(node.attributes["perm"].as_ints())
