"""The TorchScript file of each family: its logits for any shape, the weights that come back, its size."""

import io
import warnings

import numpy as np
import pytest
import torch

from service.core import FloatArray, TokenBatch
from service.engines import EngineOptions, ModelShape
from service.engines.torchscript import TorchScriptEngine
from tests.training.exported import KINDS, MAX_TOKENS, traced
from tests.training.tiny import Kind
from training.graph import GraphError, architecture_of, rebuild
from training.own import through_encoder
from training.parity import (
    ParityError,
    Vocabulary,
    check_company,
    check_grid,
    check_same_weights,
    eager_logits,
    grid,
)
from training.torchscript import PlainScript, script_weights, trace_script


def batches_of(kind: Kind) -> list[TokenBatch]:
    pad_id = traced(kind).pad_id
    special = (0, 2) if kind in {"roberta", "mpnet"} else (2, 3)
    return list(grid(Vocabulary(special, tuple(range(5, 60)), pad_id), MAX_TOKENS))


def engine_of(content: bytes, kind: Kind) -> TorchScriptEngine:
    shape = ModelShape(labels=2, max_tokens=MAX_TOKENS, pad_id=traced(kind).pad_id)
    return TorchScriptEngine(content, shape=shape, precision="float32", options=EngineOptions(device="cpu"))


@pytest.mark.parametrize("through", ["library", "own"])
@pytest.mark.parametrize("kind", KINDS)
def test_holds_for_any_shape_and_neighbours(kind: Kind, through: str) -> None:
    one = traced(kind)
    model = through_encoder(one.model) if through == "own" else one.model
    content = trace_script(model)
    batches = batches_of(kind)
    expected: list[FloatArray] = [eager_logits(one.model, batch, one.pad_id) for batch in batches]
    engine = engine_of(content, kind)
    assert check_grid(engine, PlainScript(content, one.pad_id), batches, expected) < 1e-4
    texts = [[0, *range(5, 5 + size), 2] for size in range(1, 40)]
    assert check_company(engine, texts, "softmax")[0] < 1e-4
    rebuilt = rebuild(script_weights(content), architecture_of(one.model))
    again = [eager_logits(rebuilt, batch, one.pad_id) for batch in batches]
    for left, right in zip(again, expected, strict=True):
        np.testing.assert_array_equal(left, right)


def test_the_weights_come_back_bit_by_bit_and_the_model_is_left_alone() -> None:
    model = traced("bert").copy_of_model()
    content = trace_script(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    check_same_weights(traced("bert").model, model)
    check_same_weights(model, rebuild(script_weights(content), architecture_of(model)))


def test_parameters_are_stored_as_float16_and_the_two_inputs_are_named() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        script = torch.jit.load(io.BytesIO(trace_script(traced("bert").model)))  # type: ignore[no-untyped-call]
    assert {parameter.dtype for parameter in script.parameters()} == {torch.float16}
    names = [argument.name for argument in script.forward.schema.arguments]
    assert names == ["self", "input_ids", "attention_mask"]


@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta"])
def test_r43_a_trace_of_our_encoder_belongs_to_no_device(kind: Kind) -> None:
    """So a file that was made on a CPU runs on a GPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        content = io.BytesIO(trace_script(through_encoder(traced(kind).model)))
        script = torch.jit.load(content)  # type: ignore[no-untyped-call]
    graph = str(script.inlined_graph)
    assert "scaled_dot_product_attention" not in graph
    assert "softmax" in graph
    assert "Device" not in graph.replace("device=cpu", "")


def test_weights_that_are_not_rounded_are_refused() -> None:
    model = traced("bert").copy_of_model()
    with torch.no_grad():
        dict(model.named_parameters())["classifier.bias"][0] = 1 / 3
    with pytest.raises(GraphError, match=r"classifier\.bias is not rounded"):
        trace_script(model)


def test_one_wrong_weight_is_refused_by_the_gate() -> None:
    model = traced("bert").copy_of_model()
    with torch.no_grad():
        dict(model.named_parameters())["classifier.weight"][0, 0] += 1
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    content, batches = trace_script(model), batches_of("bert")
    expected = [eager_logits(traced("bert").model, batch, 0) for batch in batches]
    with pytest.raises(ParityError, match="off the eager model"):
        check_grid(engine_of(content, "bert"), PlainScript(content, 0), batches, expected)


@pytest.mark.parametrize("content", [b"", b"not a model"])
def test_what_is_no_file_of_ours_gives_no_weights(content: bytes) -> None:
    with pytest.raises(GraphError, match="not a TorchScript file of ours"):
        script_weights(content)
