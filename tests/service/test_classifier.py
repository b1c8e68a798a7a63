"""One batch on a real engine: texts with the same tokens share a row, and each has its own answer."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from service.classifier import Classifier
from service.core import Encoding, Prediction
from service.engines import EngineOptions, open_engine
from service.errors import EngineFailed
from service.metrics import Metrics
from service.store import open_version
from tests.models import POISON, make_version
from tests.service.stand_ins import GatedEngine
from tests.service.test_predictor import reference, sample, tokens_of

Make = Callable[..., tuple[Classifier, GatedEngine, Metrics]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes a classifier, its engine and its metrics."""
    engines: list[GatedEngine] = []

    def made(*, poisoned: bool = False) -> tuple[Classifier, GatedEngine, Metrics]:
        make_version(tmp_path, poisoned=poisoned)
        options = EngineOptions(device="cpu")
        engines.append(GatedEngine(open_engine(open_version(tmp_path, "sentiment", None), options)))
        metrics = Metrics()
        classifier = Classifier(engines[0], metrics, activation="softmax", temperature=1.0)
        return classifier, engines[0], metrics

    yield made
    for engine in engines:
        engine.close()


def read(*texts: str) -> list[Encoding]:
    return [Encoding(tokens_of(text)) for text in texts]


def kept(results: Sequence[object]) -> list[Prediction]:
    return [one for one in results if isinstance(one, Prediction)]


def test_twins_share_a_row_and_each_text_gets_its_own_answer(make: Make) -> None:
    classify, engine, metrics = make()
    asked = ["good", "a bad film", "good", "awful", "a bad film", "good"]
    results = kept(classify(read(*asked)))
    assert engine.calls == [([3, 5, 3], tokens_of("good") + tokens_of("a bad film") + tokens_of("awful"))]
    for text, one in zip(asked, results, strict=True):
        np.testing.assert_allclose(one.logits, reference(text), atol=1e-5)
        assert one.tokens == len(tokens_of(text))
    assert results[0] == results[2] == results[5] == kept(classify(read("good")))[0]
    assert sample(metrics, "valence_batch_twins_total") == 3
    assert sample(metrics, "valence_batch_items_sum") == 3 + 1
    assert sample(metrics, "valence_tokens_total", kind="real") == 3 + 5 + 3 + 3


def test_a_beginning_is_no_twin(make: Make) -> None:
    classify, engine, _ = make()
    classify([Encoding([2, 7, 9]), Encoding([2, 7]), Encoding([2, 9, 7])])
    assert engine.calls == [([3, 2, 3], [2, 7, 9, 2, 7, 2, 9, 7])]


def test_twins_keep_what_was_cut_of_each(make: Make) -> None:
    classify, engine, _ = make()
    ids = tokens_of("a good film")
    results = kept(
        classify([Encoding(ids, truncated=True), Encoding(tuple(ids)), Encoding(ids, truncated=True)])
    )
    assert len(engine.calls[0][0]) == 1
    assert [one.truncated for one in results] == [True, False, True]
    assert len({one.scores for one in results}) == 1


def test_twins_without_a_finite_answer_fail_one_by_one(make: Make) -> None:
    classify, _, _ = make(poisoned=True)
    results = classify(read("good", POISON, "bad", POISON))
    assert [type(one) for one in results] == [Prediction, EngineFailed, Prediction, EngineFailed]
    assert results[1] is not results[3]


def test_a_row_too_few_is_noticed_beside_twins(make: Make) -> None:
    classify, engine, metrics = make()
    engine.change = lambda logits: logits[1:]
    with pytest.raises(EngineFailed, match="for 2 texts"):
        classify(read("good", "bad", "good"))
    assert sample(metrics, "valence_batch_items_sum") == 2
