"""A graph that computes in float16 gives nearly the same logits, as float32, for any shape and neighbours."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from service.core import Encoding, TokenBatch
from service.engines import EngineOptions, ModelShape
from service.engines.onnx import OnnxEngine
from service.store import form, open_version
from tests.training.exported import MAX_TOKENS, traced
from tests.training.tiny import Kind
from training.half import LARGEST, compute_half
from training.parity import LOGIT_BOUNDS, eager_logits, join

ROOT = Path(__file__).parents[2]
TEXTS: Sequence[Sequence[int]] = ([101, 2307, 3185, 102], [101, 2919, 102], [101, *range(2000, 2060), 102])


@pytest.fixture(scope="module")
def float32_file() -> bytes:
    version = open_version(ROOT / "model_store", "sentiment")
    return version.read(next(one for one in version.manifest.models if form(one) == "onnx/float32"))


@pytest.fixture(scope="module")
def float16_file(float32_file: bytes) -> bytes:
    graph = ir.from_proto(onnx.load_from_string(float32_file))
    compute_half(graph)
    content: bytes = ir.to_proto(graph).SerializeToString()
    return content


def engine(content: bytes, precision: str) -> OnnxEngine:
    return OnnxEngine(
        content, shape=ModelShape(2, 512, 0), precision=precision, options=EngineOptions(device="cpu")
    )


def test_no_float32_is_left_but_the_logits(float16_file: bytes) -> None:
    model = onnx.shape_inference.infer_shapes(onnx.load_from_string(float16_file), strict_mode=True)
    onnx.checker.check_model(model, full_check=True)
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    assert [name for name, kind in kinds.items() if kind == onnx.TensorProto.FLOAT] == []
    assert onnx.TensorProto.FLOAT not in {one.data_type for one in model.graph.initializer}
    assert [(one.name, one.type.tensor_type.elem_type) for one in model.graph.output] == [
        ("logits", onnx.TensorProto.FLOAT)
    ]


def test_logits_are_those_of_float32_alone_and_in_company(float32_file: bytes, float16_file: bytes) -> None:
    exact, half = engine(float32_file, "float32"), engine(float16_file, "float16")
    together = TokenBatch.of([Encoding(ids) for ids in TEXTS])
    expected = exact.run(together)
    np.testing.assert_allclose(half.run(together), expected, atol=LOGIT_BOUNDS["float16"])
    for ids, logits in zip(TEXTS, expected, strict=True):
        alone = half.run(TokenBatch.of([Encoding(ids)]))
        np.testing.assert_allclose(alone, [logits], atol=LOGIT_BOUNDS["float16"])


@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta"])
def test_every_family_of_our_encoder_can(kind: Kind) -> None:
    one = traced(kind)
    graph = one.graph.clone()
    compute_half(graph)
    half = OnnxEngine(
        ir.to_proto(graph).SerializeToString(),
        shape=ModelShape(2, MAX_TOKENS, one.pad_id),
        precision="float16",
        options=EngineOptions(device="cpu"),
    )
    batch = join([[5, 6, 7, 8], [9, 5], [7] * 20])
    expected = eager_logits(one.model, batch, one.pad_id)
    np.testing.assert_allclose(half.run(batch), expected, atol=LOGIT_BOUNDS["float16"])


def test_the_graph_that_was_cloned_is_left_as_it_was() -> None:
    graph = traced("bert").graph
    before = ir.to_proto(graph).SerializeToString(deterministic=True)
    compute_half(graph.clone())
    assert ir.to_proto(graph).SerializeToString(deterministic=True) == before


def test_the_bias_of_a_masked_position_is_a_number_that_float16_has(float16_file: bytes) -> None:
    scalars = [
        float(onnx.numpy_helper.to_array(one).min())
        for one in onnx.load_from_string(float16_file).graph.initializer
        if one.data_type == onnx.TensorProto.FLOAT16
    ]
    assert min(scalars) == pytest.approx(-LARGEST, rel=1e-3)
