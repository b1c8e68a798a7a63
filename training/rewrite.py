"""Rewrites an ONNX graph without changing what it computes: tidies it, drops work that nobody reads.

Knows nothing of transformers, files or precision; a graph here is an `onnx_ir.Model`.
"""

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common

_Readers = dict[tuple[ir.Node, int], int]
"""Who wants a value at position 0: the node, its input, and the axis."""

ELEMENTWISE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Gelu", "Erf", "Tanh", "Relu", "Sigmoid", "Identity", "Where"}
)


def constant_of(value: ir.Value | None) -> NDArray[np.generic] | None:
    """The array of an initializer, also through Cast and Transpose; None for what depends on the input."""
    if value is None:
        return None
    if value.const_value is not None:
        return np.asarray(value.const_value.numpy())
    node = value.producer()
    if node is None or node.op_type not in {"Cast", "Transpose", "Identity"}:
        return None
    array = constant_of(node.inputs[0])
    if array is None or node.op_type == "Identity":
        return array
    if node.op_type == "Transpose":
        perm = node.attributes.get("perm")
        return array.transpose(perm.as_ints() if perm else None)
    return array.astype(ir.DataType(node.attributes["to"].as_int()).numpy())


def name_of_constant(value: ir.Value | None) -> str:
    """The name of the initializer that `constant_of` reads."""
    while value is not None and value.const_value is None:
        node = value.producer()
        value = node.inputs[0] if node is not None else None
    return value.name or "" if value is not None else ""


def add_constant(model: ir.Model, name: str, array: NDArray[np.generic]) -> ir.Value:
    """An initializer of that name, made once: a second call with an equal array gives the first one."""
    known = model.graph.initializers.get(name)
    if known is not None:
        if known.const_value is None or not np.array_equal(known.const_value.numpy(), array):
            raise ValueError(f"the name {name} is taken by another initializer")
        return known
    tensor = ir.Tensor(np.asarray(array, order="C"), name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def tidy(model: ir.Model) -> None:
    """Lifts constants, drops identities and shape arithmetic, shares equal subexpressions; in place."""
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.IdentityEliminationPass()(model)
    _fold_small_constants(model)
    common.ShapeInferencePass()(model)
    _fix_reshapes(model)
    common.CommonSubexpressionEliminationPass()(model)
    _join_transposes(model)
    clean(model)


def clean(model: ir.Model) -> None:
    """Drops unused nodes and initializers and what the exporter notes for debugging; sorts; in place."""
    common.RemoveUnusedNodesPass()(model)
    common.ClearMetadataAndDocStringPass()(model)
    common.TopologicalSortPass()(model)


def keep_first_position(model: ir.Model) -> int:
    """Narrows the last layer to the one position that a `[:, 0]` pooling reads; in place.

    Walks up from `Gather(x, 0, axis=1)` through operations that treat positions one by one (linear layers,
    LayerNorm, the query side of attention). A value is narrowed when all its readers want position 0 of the
    same axis; where some reader wants all of it (keys and values), the walk ends in a Gather of position 0.
    Exact: nothing that is left out was ever read.

    Returns: how many nodes now work on one position; 0 when the graph pools in another way.
    """
    wanted: dict[ir.Value, _Readers] = {}
    for node in _nodes(model, "Gather"):
        source, index = node.inputs[0], constant_of(node.inputs[1])
        first = index is not None and index.shape == () and index == 0
        if first and source is not None and rank_of(source) == 3 and _int(node, "axis", 0) == 1:
            wanted.setdefault(source, {})[(node, 0)] = 1
    narrowed = 0
    for node in reversed(list(model.graph)):
        value = node.outputs[0]
        readers = wanted.pop(value, {})
        axis = _common_axis(value, readers)
        operands = _operand_axes(node, axis) if axis is not None else None
        if operands is None or axis is None:
            _cut_for(model, value, readers)
            continue
        value.shape = _narrow(shape_of(value), axis)
        narrowed += 1
        for position, operand_axis in operands:
            operand = node.inputs[position]
            if operand is not None:
                wanted.setdefault(operand, {})[(node, position)] = operand_axis
    for value, readers in wanted.items():
        # Inputs and constants, which no node makes.
        _cut_for(model, value, readers)
    clean(model)
    return narrowed


def shape_of(value: ir.Value | None) -> ir.Shape:
    """The shape of a value. Raises ValueError when the graph does not tell it."""
    if value is None or value.shape is None:
        raise ValueError("the graph does not tell the shape of a value")
    return value.shape


def rank_of(value: ir.Value) -> int | None:
    """The number of dimensions, or None when the graph does not tell."""
    return value.shape.rank() if value.shape is not None else None


def _common_axis(value: ir.Value, readers: _Readers) -> int | None:
    """The axis at which every reader of the value wants position 0 alone."""
    axes = set(readers.values())
    if len(axes) != 1 or value.is_graph_output() or set(readers) != {tuple(use) for use in value.uses()}:
        return None
    return axes.pop()


def _cut_for(model: ir.Model, value: ir.Value, readers: _Readers) -> None:
    """Gives the readers `value` at position 0 of their axis; the pooling Gather does that by itself."""
    for axis in sorted(set(readers.values())):
        users = [(n, i) for (n, i), a in readers.items() if a == axis and n.op_type != "Gather"]
        if not users:
            continue
        position_0 = add_constant(model, "first_position", np.array([0], dtype=np.int64))
        cut = ir.node("Gather", [value, position_0], {"axis": axis})
        cut.outputs[0].name = f"{value.name}.first.{axis}"
        describe(cut.outputs[0], _narrow(shape_of(value), axis), value.dtype)
        model.graph.append(cut)
        for user, position in users:
            user.replace_input_with(position, cut.outputs[0])


def describe(value: ir.Value, shape: ir.Shape | None, dtype: ir.DataType | None) -> None:
    """Notes the shape and the type of a value that was just made."""
    value.shape = shape
    if dtype is not None:
        value.dtype = dtype


def _narrow(shape: ir.Shape, axis: int) -> ir.Shape:
    return ir.Shape([1 if at == axis else dim for at, dim in enumerate(shape)])


def _operand_axes(node: ir.Node, axis: int) -> list[tuple[int, int]] | None:
    """Which operands are wanted at which axis when the output is at position 0 of `axis`; None: unknown."""
    ranks = [rank_of(value) if value is not None else None for value in node.inputs]
    rank = rank_of(node.outputs[0])
    if rank is None or ranks[0] is None:
        return None
    found: list[tuple[int, int]] | None = None
    if node.op_type in ELEMENTWISE:
        found = _broadcast_axes(node, axis - rank)
    elif node.op_type in {"LayerNormalization", "Softmax"} and axis < _int(node, "axis", -1) % rank:
        found = [(0, axis)]
    elif node.op_type == "MatMul" and axis == rank - 2 and ranks[0] >= 2:
        found = [(0, ranks[0] - 2)]
    elif node.op_type == "Transpose":
        found = [(0, node.attributes["perm"].as_ints()[axis])]
    elif node.op_type == "Reshape":
        target = constant_of(node.inputs[1])
        # A 0 copies the dimension, so the target still holds when that dimension becomes 1.
        if target is not None and len(target) > axis and not np.any(target[: axis + 1]):
            found = [(0, axis)]
    return found


def _broadcast_axes(node: ir.Node, from_end: int) -> list[tuple[int, int]] | None:
    """The operands that have the axis, counted from the last one (-1), in more than one position."""
    found = []
    for position, value in enumerate(node.inputs):
        shape = value.shape if value is not None else None
        if shape is None:
            return None
        axis = from_end + shape.rank()
        if axis >= 0 and shape[axis] != 1:
            found.append((position, axis))
    return found


def _fix_reshapes(model: ir.Model) -> None:
    """Makes the target of each Reshape a constant: 0 copies a dimension, -1 is the one that is left."""
    for node in _nodes(model, "Reshape"):
        source, result = node.inputs[0], node.outputs[0]
        if (
            source is None
            or source.shape is None
            or result.shape is None
            or constant_of(node.inputs[1]) is not None
        ):
            continue
        target = [
            dim if isinstance(dim, int) else 0 if at < source.shape.rank() and source.shape[at] == dim else -1
            for at, dim in enumerate(result.shape)
        ]
        if target.count(-1) <= 1:
            name = "shape." + "x".join(str(dim) for dim in target)
            node.replace_input_with(1, add_constant(model, name, np.array(target, dtype=np.int64)))
            node.attributes.pop("allowzero", None)


def _fold_small_constants(model: ir.Model) -> None:
    """Casts and reshapes of a constant scalar or shape become constants; parameters are left as they are."""
    for node in _nodes(model, "Cast", "Reshape"):
        source = node.inputs[0]
        if source is None or source.const_value is None or source.const_value.size > 8 or not source.uses():
            continue
        array = np.asarray(source.const_value.numpy())
        if source.dtype is not None and source.dtype.is_floating_point() and array.ndim > 0:
            continue
        if node.op_type == "Cast":
            array = array.astype(ir.DataType(node.attributes["to"].as_int()).numpy())
        else:
            target = constant_of(node.inputs[1])
            if target is None:
                continue
            array = array.reshape([int(dim) for dim in target])
        folded = add_constant(model, f"{node.outputs[0].name}.folded", array)
        node.outputs[0].replace_all_uses_with(folded)


def _join_transposes(model: ir.Model) -> None:
    """Transpose of a Transpose becomes one."""
    for node in _nodes(model, "Transpose"):
        source = node.inputs[0]
        inner = source.producer() if source is not None else None
        if inner is not None and inner.op_type == "Transpose":
            first, second = inner.attributes["perm"].as_ints(), node.attributes["perm"].as_ints()
            node.replace_input_with(0, inner.inputs[0])
            node.attributes["perm"] = ir.AttrInt64s("perm", [first[at] for at in second])


def _nodes(model: ir.Model, *op_types: str) -> Iterator[ir.Node]:
    return (node for node in list(model.graph) if node.op_type in op_types)


def _int(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return attribute.as_int() if attribute is not None else default
