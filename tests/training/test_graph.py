"""The float graph gives the eager model's logits and can be turned back into it; its last layer is narrow."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from transformers import PreTrainedModel

from tests.training.exported import KINDS, MAX_TOKENS, Traced, graph_of, open_graph, traced, write_graph
from training.graph import (
    GraphError,
    architecture_of,
    export_graph,
    graph_weights,
    rebuild,
    round_to_half,
    store_half,
)
from training.parity import PlainSession, Vocabulary, eager_logits, grid
from training.rewrite import keep_first_position


@dataclass(frozen=True)
class Exported:
    """A traced classifier and the file of its float graph."""

    traced: Traced
    path: Path

    @property
    def model(self) -> PreTrainedModel:
        return self.traced.model


@pytest.fixture(scope="module", params=KINDS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    source = traced(request.param)
    path = tmp_path_factory.mktemp(request.param) / "model.onnx"
    return Exported(source, write_graph(source.kind, source.model, path))


def test_logits_are_those_of_the_eager_model(exported: Exported) -> None:
    engine = open_graph(exported.path, precision="float32", pad_id=exported.traced.pad_id)
    plain = PlainSession(exported.path.read_bytes(), exported.traced.pad_id)
    for batch in grid(Vocabulary((0, 2), tuple(range(5, 60)), exported.traced.pad_id), MAX_TOKENS):
        expected = eager_logits(exported.model, batch, exported.traced.pad_id)
        np.testing.assert_allclose(engine.run(batch), expected, atol=1e-4)
        np.testing.assert_allclose(plain.run(batch), expected, atol=1e-4)


def test_our_encoder_takes_type_0_for_all_tokens_by_itself(exported: Exported) -> None:
    names = [value.name for value in onnx.load(exported.path).graph.input]
    assert names == ["input_ids", "attention_mask"]


def test_a_model_of_the_library_with_several_token_types_is_fed_them() -> None:
    graph = export_graph(traced("bert").model, MAX_TOKENS).graph
    assert [value.name for value in graph.inputs] == ["input_ids", "attention_mask", "token_type_ids"]


def test_the_file_gives_the_same_weights_back(exported: Exported) -> None:
    rebuilt = rebuild(graph_weights(exported.path), architecture_of(exported.model))
    ours, theirs = exported.model.state_dict(), rebuilt.state_dict()
    assert list(ours) == list(theirs)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_weights_are_kept_in_half(exported: Exported) -> None:
    kinds = {tensor.name: tensor.data_type for tensor in onnx.load(exported.path).graph.initializer}
    parameters = dict(exported.model.named_parameters())
    assert {kinds[name] for name in parameters if name in kinds} == {TensorProto.FLOAT16}
    assert [name for name, kind in kinds.items() if kind == TensorProto.FLOAT and name in parameters] == []


def test_the_last_layer_works_on_the_first_token_alone(exported: Exported) -> None:
    gelu = [node.outputs[0].shape for node in exported.traced.graph.graph if node.op_type == "Gelu"]
    lengths = [shape[1] for shape in gelu if shape is not None]
    assert len(lengths) == 2
    assert lengths[0] != 1
    assert lengths[1] == 1


def test_the_graph_computes_no_shapes_in_its_layers(exported: Exported) -> None:
    shapes = [node for node in exported.traced.graph.graph if node.op_type == "Shape"]
    assert len(shapes) <= 3


def test_what_half_cannot_hold_is_refused(exported: Exported) -> None:
    model = exported.traced.copy_of_model()
    with torch.no_grad():
        next(model.parameters())[0, 0] = 70_000.0
    with pytest.raises(GraphError, match="float16"):
        round_to_half(model)


def test_weights_that_were_not_rounded_are_refused(exported: Exported) -> None:
    model = exported.traced.copy_of_model()
    with torch.no_grad():
        next(model.parameters())[0, 0] = 1.00001
    with pytest.raises(GraphError, match="not rounded"):
        store_half(graph_of(exported.traced.kind, model), [name for name, _ in model.named_parameters()])


def test_a_file_of_another_architecture_is_refused(exported: Exported) -> None:
    smaller = {**architecture_of(exported.model), "vocab_size": 50}
    with pytest.raises(GraphError, match="word_embeddings"):
        rebuild(graph_weights(exported.path), smaller)
    width = "n_layers" if exported.traced.kind == "distilbert" else "num_hidden_layers"
    shallower = {**architecture_of(exported.model), width: 1}
    with pytest.raises(GraphError, match=r"layer\.1"):
        rebuild(graph_weights(exported.path), shallower)


def pooled(index: int) -> tuple[bytes, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """x [n, 3, 4] + a constant of the same size, then the position of that index; and the constant."""
    table = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["x", "table"], ["sum"]),
            helper.make_node("Tanh", ["sum"], ["state"]),
            helper.make_node("Gather", ["state", "index"], ["y"], axis=1),
        ],
        "pooled",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.array(index), "index")],
        value_info=[
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3, 4]) for name in ("sum", "state")
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return model.SerializeToString(), table


@pytest.mark.parametrize(("index", "narrowed"), [(0, 2), (1, 0)])
def test_only_a_pooling_of_position_0_narrows(index: int, narrowed: int) -> None:
    content, table = pooled(index)
    model = ir.from_proto(onnx.load_from_string(content))
    assert keep_first_position(model) == narrowed
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], np.tanh(x + table)[:, index], atol=1e-6)
