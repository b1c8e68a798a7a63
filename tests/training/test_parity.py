"""The gate lets the right file through and refuses wrong ones, whatever way they are wrong."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from service.core import FloatArray, TokenBatch
from tests.training.exported import MAX_TOKENS, StandInEngine, open_graph, traced, write_graph
from training.parity import (
    BATCHES,
    COMPANY_ITEMS,
    LENGTHS,
    ParityError,
    PlainSession,
    Vocabulary,
    check_company,
    check_grid,
    check_same_weights,
    eager_logits,
    grid,
    join,
)

VOCABULARY = Vocabulary((2, 3), tuple(range(5, 60)), 0)
TEXTS = [[2, *range(5, 5 + size), 3] for size in range(1, 40)]


@pytest.fixture(scope="module")
def batches() -> list[TokenBatch]:
    return list(grid(VOCABULARY, MAX_TOKENS))


@pytest.fixture(scope="module")
def expected(batches: list[TokenBatch]) -> list[FloatArray]:
    return [eager_logits(traced("bert").model, batch, 0) for batch in batches]


def check(path: Path, batches: list[TokenBatch], expected: list[FloatArray], precision: str) -> float:
    engine = open_graph(path, precision=precision, pad_id=0)
    return check_grid(engine, PlainSession(path.read_bytes(), 0), batches, expected)


def test_the_grid_has_every_batch_and_length_with_real_masks() -> None:
    batches = list(grid(VOCABULARY, 512))
    shapes = [(len(batch), int(batch.lengths.max())) for batch in batches]
    assert shapes == [(count, length) for length in (*LENGTHS, 512) for count in BATCHES]
    assert any(len(set(batch.lengths.tolist())) > 5 for batch in batches)
    for batch in batches:
        ends = np.cumsum(batch.lengths)
        assert set(batch.ids[ends - 1]) == {3}
        assert set(batch.ids[ends - batch.lengths]) == {2}
        assert 0 not in batch.ids


def test_the_grid_keeps_to_a_short_model() -> None:
    assert {int(batch.lengths.max()) for batch in grid(VOCABULARY, 20)} == {2, 3, 16, 20}


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_the_right_file_passes(
    precision: str, tmp_path: Path, batches: list[TokenBatch], expected: list[FloatArray]
) -> None:
    path = write_graph("bert", traced("bert").model, tmp_path / "model.onnx", int8=precision == "int8")
    assert check(path, batches, expected, precision) < (1e-4 if precision == "float32" else 1.0)


@pytest.mark.parametrize(
    "name", ["classifier.weight", "bert.encoder.layer.0.attention.self.key.weight", "bert.pooler.dense.bias"]
)
def test_one_wrong_weight_is_refused(
    name: str, tmp_path: Path, batches: list[TokenBatch], expected: list[FloatArray]
) -> None:
    model = traced("bert").copy_of_model()
    with torch.no_grad():
        weight = dict(model.named_parameters())[name].view(-1)
        weight[0] = (weight[0] + 1).half().float()
    path = write_graph("bert", model, tmp_path / "model.onnx")
    with pytest.raises(ParityError, match="off the eager model"):
        check(path, batches, expected, "float32")


def test_a_graph_that_reads_its_padding_is_refused(
    tmp_path: Path, batches: list[TokenBatch], expected: list[FloatArray]
) -> None:
    path = write_graph("bert", traced("bert").model, tmp_path / "model.onnx")
    engine = open_graph(path, precision="float32", pad_id=0)

    def without_mask(batch: TokenBatch) -> FloatArray:
        longest = int(batch.lengths.max())
        filled = [
            [*ids, *[0] * (longest - len(ids))] for ids in np.split(batch.ids, np.cumsum(batch.lengths)[:-1])
        ]
        return engine.run(join(filled))

    with pytest.raises(ParityError, match="texts of up to"):
        check_grid(StandInEngine(without_mask), PlainSession(path.read_bytes(), 0), batches, expected)


def test_an_optimisation_that_changes_answers_is_refused(
    tmp_path: Path, batches: list[TokenBatch], expected: list[FloatArray]
) -> None:
    path = write_graph("bert", traced("bert").model, tmp_path / "model.int8.onnx", int8=True)
    engine = open_graph(path, precision="int8", pad_id=0)
    # Well inside the bound against the eager model.
    optimised = StandInEngine(lambda batch: engine.run(batch) + np.float32(0.1), precision="int8")
    with pytest.raises(ParityError, match="optimising changes it"):
        check_grid(optimised, PlainSession(path.read_bytes(), 0), batches, expected)


def wrong_width(batch: TokenBatch) -> FloatArray:
    return np.zeros((len(batch), 3), dtype=np.float32)


def not_a_number(batch: TokenBatch) -> FloatArray:
    return np.full((len(batch), 2), np.nan, dtype=np.float32)


@pytest.mark.parametrize("answer", [wrong_width, not_a_number])
def test_what_is_no_answer_is_refused(
    answer: Callable[[TokenBatch], FloatArray],
    tmp_path: Path,
    batches: list[TokenBatch],
    expected: list[FloatArray],
) -> None:
    path = write_graph("bert", traced("bert").model, tmp_path / "model.onnx")
    with pytest.raises(ParityError):
        check_grid(StandInEngine(answer), PlainSession(path.read_bytes(), 0), batches, expected)


def leaning(batch: TokenBatch) -> FloatArray:
    """Logits that move by some thousandths with the mean length of the batch."""
    own = np.stack([batch.lengths, -batch.lengths], axis=1) / 100
    lean = np.array([1, -1]) * 0.001 * batch.lengths.mean()
    logits: FloatArray = (own + lean).astype(np.float32)
    return logits


def test_an_answer_that_leans_on_its_neighbours_is_refused() -> None:
    with pytest.raises(ParityError, match="other texts"):
        check_company(StandInEngine(leaning), TEXTS, "softmax")


def test_the_probability_that_is_served_is_what_is_held() -> None:
    """The higher the temperature, the less of a logit is left in it."""
    engine = StandInEngine(leaning)
    assert check_company(engine, TEXTS, "softmax", temperature=500.0)[0] < 1e-4
    slight = StandInEngine(lambda batch: leaning(batch) / np.float32(500))
    check_company(slight, TEXTS, "softmax")
    with pytest.raises(ParityError, match="other texts"):
        check_company(slight, TEXTS, "softmax", temperature=1 / 500)


def test_company_is_kept_to_a_sample() -> None:
    seen: list[int] = []

    def count(batch: TokenBatch) -> FloatArray:
        seen.append(len(batch))
        return np.zeros((len(batch), 2), dtype=np.float32)

    assert check_company(StandInEngine(count), TEXTS * 100, "sigmoid") == (0.0, 488)
    assert sum(seen) == 3 * 488
    assert COMPANY_ITEMS >= 488


def test_other_weights_are_refused() -> None:
    model = traced("bert").copy_of_model()
    check_same_weights(traced("bert").model, model)
    with torch.no_grad():
        dict(model.named_parameters())["classifier.bias"][1] += 2**-10
    with pytest.raises(ParityError, match=r"classifier\.bias"):
        check_same_weights(traced("bert").model, model)
