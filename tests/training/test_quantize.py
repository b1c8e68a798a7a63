"""int8 is near the eager model, and no text changes another's answer, whatever stands in the batch."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from service.core import TokenBatch
from tests.training.exported import KINDS, MAX_TOKENS, Traced, open_graph, traced, write_graph
from training.parity import COMPANY_BOUND, Vocabulary, check_company, eager_logits, grid, join
from training.quantize import quantize_columns

VOCABULARY = Vocabulary((0, 2), tuple(range(5, 60)), 1)


@dataclass(frozen=True)
class Quantized:
    """A traced classifier and the file of its int8 graph."""

    traced: Traced
    path: Path


@pytest.fixture(scope="module", params=KINDS)
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    source = traced(request.param)
    path = tmp_path_factory.mktemp(request.param) / "model.int8.onnx"
    return Quantized(source, write_graph(source.kind, source.model, path, int8=True))


def test_int8_is_near_the_eager_model(quantized: Quantized) -> None:
    engine = open_graph(quantized.path, precision="int8", pad_id=quantized.traced.pad_id)
    changes, sizes = [], []
    for batch in grid(VOCABULARY, MAX_TOKENS):
        expected = eager_logits(quantized.traced.model, batch, quantized.traced.pad_id)
        changes.append(np.abs(engine.run(batch) - expected).max())
        sizes.append(np.abs(expected).max())
    assert np.mean(changes) <= 0.05 * max(sizes)


def test_every_layer_multiplies_in_8_bits_and_attention_is_one_operation(quantized: Quantized) -> None:
    graph = onnx.load(quantized.path).graph
    operations = Counter(node.op_type for node in graph.node)
    assert operations["MatMulIntegerToFloat"] == 2 * 6
    assert operations["Attention"] == 2
    assert operations["MatMul"] == operations["DynamicQuantizeLinear"] == 0


def test_the_word_table_and_the_weights_are_kept_in_8_bits(quantized: Quantized) -> None:
    tensors = onnx.load(quantized.path).graph.initializer
    in_bytes = [tensor.name for tensor in tensors if tensor.data_type == TensorProto.INT8]
    assert len(in_bytes) == 2 * 6 + 1
    assert [tensor.name for tensor in tensors if tensor.name.endswith("word_embeddings.weight")] == []


def test_no_text_changes_the_answer_of_another(quantized: Quantized) -> None:
    engine = open_graph(quantized.path, precision="int8", pad_id=quantized.traced.pad_id)
    batches = list(grid(VOCABULARY, MAX_TOKENS, seed=5))
    texts = [ids for batch in batches for ids in np.split(batch.ids, np.cumsum(batch.lengths)[:-1])]
    worst, count = check_company(engine, [ids.tolist() for ids in texts], "softmax")
    assert count > 100
    assert worst <= COMPANY_BOUND


def test_outliers_of_a_neighbour_change_nothing(tmp_path: Path) -> None:
    model = traced("bert").copy_of_model()
    with torch.no_grad():
        # One channel is a thousand times the others, and by how much is another matter for each token.
        dict(model.named_parameters())["bert.embeddings.LayerNorm.weight"][3] = 1000.0
    path = write_graph("bert", model, tmp_path / "model.int8.onnx", int8=True)
    engine = open_graph(path, precision="int8", pad_id=0)
    text, neighbour = [2, 9, 10, 11, 3], [2, *range(20, 50), 3]
    alone = engine.run(join([text]))
    np.testing.assert_allclose(engine.run(join([text, neighbour]))[:1], alone, atol=1e-4)
    np.testing.assert_allclose(engine.run(join([neighbour, text]))[1:], alone, atol=1e-4)


def test_a_row_of_zeros_divides_by_nothing(tmp_path: Path) -> None:
    model = traced("bert").copy_of_model()
    with torch.no_grad():
        # Every row after the embeddings is zero.
        for kind in ("weight", "bias"):
            dict(model.named_parameters())[f"bert.embeddings.LayerNorm.{kind}"].zero_()
    path = write_graph("bert", model, tmp_path / "model.int8.onnx", int8=True)
    batch = TokenBatch(np.array([2, 9, 3, 2, 3]), np.array([3, 2]))
    logits = open_graph(path, precision="int8", pad_id=0).run(batch)
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits, eager_logits(model, batch, 0), atol=0.3)


def test_columns_are_off_by_half_a_step_at_most() -> None:
    weight = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
    weight[:, 2] = 0
    weight[0, 3] = 50
    codes, scale = quantize_columns(weight)
    assert codes.dtype == np.int8
    assert codes.min() >= -127
    assert scale[2] == 1
    assert np.all(np.abs(codes * scale - weight) <= scale * 0.501)
