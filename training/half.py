"""Makes a float graph compute in float16 throughout, for a GPU; its logits stay float32.

Knows nothing of weights' origin, quantisation, versions or bounds.
"""

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

LARGEST = 30_000.0
"""What a larger constant becomes, such as the bias of a masked position: exp(-30000) is 0, and with a score
added it is still no infinity."""


def compute_half(model: ir.Model) -> None:
    """Turns every float32 value of the graph into float16, in place, but the logits, which are widened last.

    Weights that are stored as float16 with a Cast behind them (`store_half`) lose the Cast. What
    LayerNormalization adds up it adds up in float32: its `stash_type` stays.
    """
    graph = model.graph
    for value in list(graph.initializers.values()):
        if value.dtype == ir.DataType.FLOAT:
            _narrow(graph, value)
    for node in list(graph):
        if node.op_type == "Cast" and ir.DataType(node.attributes["to"].as_int()) == ir.DataType.FLOAT:
            if node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT16:
                _replace(node.outputs[0], node.inputs[0])
                graph.remove(node, safe=True)
                continue
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT16)
        for output in node.outputs:
            if output.dtype == ir.DataType.FLOAT:
                # A new type: the old one is shared with the graph that this one was cloned from.
                output.type = ir.TensorType(ir.DataType.FLOAT16)
    _widen_output(graph)


def _narrow(graph: ir.Graph, value: ir.Value) -> None:
    """Put a float16 initializer of the same name in the place of one."""
    tensor = value.const_value
    if tensor is None or value.name is None:
        raise ValueError("an initializer has no value or no name")
    full: NDArray[np.float32] = tensor.numpy()
    half = ir.Tensor(np.clip(full, -LARGEST, LARGEST).astype(np.float16), name=value.name)
    narrowed = ir.Value(
        name=value.name, shape=half.shape, type=ir.TensorType(ir.DataType.FLOAT16), const_value=half
    )
    del graph.initializers[value.name]
    graph.register_initializer(narrowed)
    _replace(value, narrowed)


def _replace(old: ir.Value, new: ir.Value) -> None:
    for user, position in list(old.uses()):
        user.replace_input_with(position, new)


def _widen_output(graph: ir.Graph) -> None:
    """The graph's output keeps its name and type."""
    output = graph.outputs[0]
    name, output.name = output.name, f"{output.name}.float16"
    widen = ir.node("Cast", [output], {"to": ir.DataType.FLOAT})
    widen.outputs[0].name, widen.outputs[0].shape = name, output.shape
    widen.outputs[0].dtype = ir.DataType.FLOAT
    graph.append(widen)
    graph.outputs[0] = widen.outputs[0]
