"""The predictor gives every text its own answer, keeps faults in their place, and says when it is ready."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.core import Prediction, TokenBatch
from service.engines import open_engine
from service.errors import (
    DeadlineExceeded,
    EngineFailed,
    NotReady,
    QueueFull,
    ServiceError,
    StartupError,
    Stopping,
    TextEmpty,
    TextInvalid,
    TextTooLong,
)
from service.metrics import Metrics
from service.predictor import Predictor
from service.settings import Settings
from service.store import Manifest
from tests.models import BAD, GOOD, PLAIN, POISON, bert_tokenizer, make_version, make_weights
from tests.service.stand_ins import GatedEngine, Opener


def settings_for(store: Path, **changes: Any) -> Settings:
    return Settings(model_store=store, device="cpu", **changes)


@asynccontextmanager
async def serving(store: Path, opener: Any = open_engine, **changes: Any) -> AsyncIterator[Predictor]:
    """A ready predictor of the version in the store; stopped at the end."""
    predictor = Predictor(settings_for(store, **changes), Metrics(), open_engine=opener)
    try:
        await predictor.start()
        yield predictor
    finally:
        await predictor.stop(60)


def tokens_of(text: str) -> list[int]:
    return bert_tokenizer().encode(text).ids


def reference(text: str, labels: int = 2) -> list[float]:
    """The logits of a text by numpy."""
    return make_weights(bert_tokenizer(), labels).logits(tokens_of(text))


def sigmoid(values: Sequence[float]) -> list[float]:
    return [float(1 / (1 + np.exp(-value))) for value in values]


def softmax(values: Sequence[float]) -> list[float]:
    powers = np.exp(np.array(values))
    return [float(x) for x in powers / powers.sum()]


def predicted(outcomes: Sequence[Prediction | ServiceError]) -> list[Prediction]:
    """The outcomes, all of which must be predictions."""
    assert [one for one in outcomes if not isinstance(one, Prediction)] == []
    return [one for one in outcomes if isinstance(one, Prediction)]


def texts(count: int, seed: int = 5) -> list[str]:
    """Different texts of different lengths."""
    random = np.random.default_rng(seed)
    words = (*GOOD, *BAD, *PLAIN)
    return [" ".join(random.choice(words, random.integers(1, 50))) + f" {i}" for i in range(count)]


def sample(predictor_metrics: Metrics, name: str, **labels: str) -> float:
    value = predictor_metrics.registry.get_sample_value(name, labels)
    assert value is not None, f"there is no series {name}{labels}"
    return value


# One request.


async def test_good_and_bad_texts_get_their_scores_in_order(tmp_path: Path) -> None:
    make_version(tmp_path)
    asked = ["a great film, i loved it!", "terrible", "the product was not bad"]
    async with serving(tmp_path) as predictor:
        answer = await predictor.predict(asked)
    predictions = predicted(answer.outcomes)
    assert [one.scores[1] > 0.5 for one in predictions] == [
        True,
        False,
        reference(asked[2])[1] > reference(asked[2])[0],
    ]
    for text, one in zip(asked, predictions, strict=True):
        np.testing.assert_allclose(one.logits, reference(text), atol=1e-5)
        np.testing.assert_allclose(one.scores, softmax(reference(text)), atol=1e-5)
        assert (one.tokens, one.truncated) == (len(tokens_of(text)), False)


async def test_texts_that_cannot_be_predicted_have_their_error_in_their_place(tmp_path: Path) -> None:
    make_version(tmp_path, max_tokens=8)
    async with serving(tmp_path) as predictor:
        answer = await predictor.predict(["good", "\u200b", "good " * 9, "\ud800", "bad"], truncate=False)
        refused = await predictor.predict([""])
        nothing = await predictor.predict([])
    kinds = [type(one) for one in answer.outcomes]
    assert kinds == [Prediction, TextEmpty, TextTooLong, TextInvalid, Prediction]
    assert [type(one) for one in refused.outcomes] == [TextEmpty]
    assert nothing.outcomes == []


async def test_r21_r22_a_long_text_is_cut_alike_alone_and_in_a_list(tmp_path: Path) -> None:
    make_version(tmp_path, max_tokens=8)
    async with serving(tmp_path) as predictor:
        alone = predicted((await predictor.predict(["good " * 1_000])).outcomes)
        listed = predicted((await predictor.predict(["bad", "good " * 1_000, "good"])).outcomes)
    assert (alone[0].tokens, alone[0].truncated) == (8, True)
    assert (listed[1].tokens, listed[1].truncated) == (8, True)
    np.testing.assert_allclose(listed[1].scores, alone[0].scores, atol=1e-6)


async def test_r04_many_callers_each_get_their_own_answers(tmp_path: Path) -> None:
    make_version(tmp_path)
    asked = texts(400)
    requests: list[list[str]] = []
    start = 0
    while start < len(asked):
        size = (1, 3, 1, 17)[len(requests) % 4]
        requests.append(asked[start : start + size])
        start += size
    async with serving(tmp_path, lanes=2, threads_per_lane=1, max_batch_tokens=256) as predictor:
        answers = await asyncio.gather(*(predictor.predict(request) for request in requests))
    for request, answer in zip(requests, answers, strict=True):
        for text, one in zip(request, predicted(answer.outcomes), strict=True):
            np.testing.assert_allclose(one.logits, reference(text), atol=1e-5)


@pytest.mark.parametrize("labels", [("yes",), ("toxic", "rude", "kind")])
async def test_r36_sigmoid_judges_each_label_by_itself(tmp_path: Path, labels: tuple[str, ...]) -> None:
    make_version(tmp_path, labels=labels, activation="sigmoid")
    async with serving(tmp_path) as predictor:
        (good, bad) = predicted((await predictor.predict(["good", "bad"])).outcomes)
    np.testing.assert_allclose(good.scores, sigmoid(reference("good", len(labels))), atol=1e-5)
    assert good.scores[-1] > 0.5 > bad.scores[-1]
    assert sum(good.scores) != pytest.approx(1, abs=1e-3)


async def test_r36_softmax_shares_one_among_three_labels(tmp_path: Path) -> None:
    make_version(tmp_path, labels=("bad", "so-so", "good"))
    async with serving(tmp_path) as predictor:
        (one,) = predicted((await predictor.predict(["good"])).outcomes)
    np.testing.assert_allclose(one.scores, softmax(reference("good", 3)), atol=1e-5)
    assert sum(one.scores) == pytest.approx(1)


async def test_the_temperature_divides_the_logits(tmp_path: Path) -> None:
    make_version(tmp_path, temperature=4.0)
    async with serving(tmp_path) as predictor:
        (one,) = predicted((await predictor.predict(["good"])).outcomes)
    np.testing.assert_allclose(one.logits, reference("good"), atol=1e-5)
    np.testing.assert_allclose(one.scores, softmax([x / 4 for x in reference("good")]), atol=1e-5)


async def test_timings_tell_the_stages(tmp_path: Path) -> None:
    make_version(tmp_path)
    opener = Opener()
    async with serving(tmp_path, opener, lanes=1) as predictor:
        opener.engine.gate.clear()
        engine_calls = len(opener.engine.calls)
        held = asyncio.create_task(predictor.predict(["good"]))
        await opener.engine.entered(engine_calls + 1)
        waiting = asyncio.create_task(predictor.predict(["bad"]))
        await asyncio.sleep(0)
        accepted_s = time.perf_counter()
        await asyncio.sleep(0)
        kept_s = time.perf_counter() - accepted_s
        opener.engine.gate.set()
        first, second = (await held).timings, (await waiting).timings
    assert min(first.tokenize_s, first.queue_s, second.tokenize_s, second.infer_s) > 0
    assert min(first.infer_s, second.queue_s) >= kept_s


# Faults stay where they belong.


async def test_r33_a_text_without_a_finite_answer_harms_no_neighbour(tmp_path: Path) -> None:
    make_version(tmp_path, poisoned=True)
    metrics = Metrics()
    predictor = Predictor(settings_for(tmp_path), metrics)
    await predictor.start()
    asked = ["good", f"a {POISON} film", "bad", POISON]
    answer, other = await asyncio.gather(predictor.predict(asked), predictor.predict(["great"]))
    await predictor.stop(60)
    assert [type(one) for one in answer.outcomes] == [Prediction, EngineFailed, Prediction, EngineFailed]
    assert "not a finite number" in str(answer.outcomes[1])
    assert POISON not in str(answer.outcomes[1])
    np.testing.assert_allclose(predicted(answer.outcomes[:1])[0].logits, reference("good"), atol=1e-5)
    predicted(other.outcomes)
    assert sample(metrics, "valence_text_errors_total", reason="engine_failed") == 2


@pytest.mark.parametrize("place", [0, 3, 7])
async def test_r02_only_the_text_that_fails_alone_fails(tmp_path: Path, place: int) -> None:
    make_version(tmp_path)
    opener = Opener()
    unlucky = tokens_of("awful")[1]

    def fail(batch: TokenBatch) -> None:
        if unlucky in batch.ids:
            raise RuntimeError("a fault put in by the test")

    asked = [f"good {i}" for i in range(8)]
    asked[place] = "awful"
    async with serving(tmp_path, opener, lanes=1) as predictor:
        opener.engine.fault = fail
        answers = await asyncio.gather(*(predictor.predict([text]) for text in asked))
        after = await predictor.predict(["good"])
    kinds = [type(answer.outcomes[0]) for answer in answers]
    assert kinds == [EngineFailed if i == place else Prediction for i in range(8)]
    failure = answers[place].outcomes[0]
    assert isinstance(failure, EngineFailed)
    assert isinstance(failure.__cause__, RuntimeError)
    predicted(after.outcomes)


@pytest.mark.parametrize(
    "error", [RuntimeError(), MemoryError(), SystemExit(), KeyboardInterrupt()], ids=repr
)
async def test_r03_r52_the_engine_may_raise_anything_once(tmp_path: Path, error: BaseException) -> None:
    make_version(tmp_path)
    opener = Opener()
    faults = [error]

    def fail_once(_: TokenBatch) -> None:
        if faults:
            raise faults.pop()

    async with serving(tmp_path, opener, lanes=1) as predictor:
        opener.engine.fault = fail_once
        first = await predictor.predict(["good"])
        second = await predictor.predict(["good"])
        assert predictor.unready_reason() is None
    assert [type(one) for one in first.outcomes] == [EngineFailed]
    predicted(second.outcomes)


async def test_an_engine_that_loses_a_row_gives_nobody_a_wrong_answer(tmp_path: Path) -> None:
    make_version(tmp_path)
    opener = Opener()
    async with serving(tmp_path, opener, lanes=1) as predictor:
        opener.engine.change = lambda logits: logits[1:] if len(logits) > 1 else logits
        answer = await predictor.predict(["good", "bad", "great"])
    for text, one in zip(["good", "bad", "great"], predicted(answer.outcomes), strict=True):
        np.testing.assert_allclose(one.logits, reference(text), atol=1e-5)


async def test_a_full_queue_refuses_the_whole_request(tmp_path: Path) -> None:
    make_version(tmp_path)
    opener = Opener()
    async with serving(
        tmp_path, opener, lanes=1, threads_per_lane=1, max_texts=2, max_queue_items=2
    ) as predictor:
        opener.engine.gate.clear()
        before = len(opener.engine.calls)
        held = asyncio.create_task(predictor.predict(["good"]))
        await opener.engine.entered(before + 1)
        waiting = asyncio.create_task(predictor.predict(["good", "bad"]))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as caught:
            await predictor.predict(["great"])
        with pytest.raises(QueueFull):  # before it is read, so that a refusal costs little
            await predictor.predict([""])
        opener.engine.gate.set()
        predicted((await held).outcomes + (await waiting).outcomes)
    assert caught.value.retry_after_s is not None
    assert not opener.engine.has_seen(tokens_of("great"))


@pytest.mark.parametrize(("bound", "batches"), [(4, [[4, 3, 5], [14, 13]]), (1_000, [[4, 3, 5, 13, 14]])])
async def test_r11_a_text_that_would_add_much_padding_waits(
    tmp_path: Path, bound: int, batches: list[list[int]]
) -> None:
    """Short texts do not pay for long ones; `max_padding_tokens` says how much is too much."""
    make_version(tmp_path)
    opener = Opener()
    async with serving(tmp_path, opener, lanes=1, threads_per_lane=1, max_padding_tokens=bound) as predictor:
        opener.engine.gate.clear()
        before = len(opener.engine.calls)
        held = asyncio.create_task(predictor.predict(["good"]))
        await opener.engine.entered(before + 1)
        words = (2, 1, 3, 11, 12)  # and two special tokens
        waiting = asyncio.create_task(predictor.predict([" ".join(["good"] * count) for count in words]))
        await asyncio.sleep(0)
        opener.engine.gate.set()
        predicted((await held).outcomes + (await waiting).outcomes)
    lengths = [sorted(lengths) for lengths, _ in opener.engine.calls[before + 1 :]]
    assert lengths == [sorted(batch) for batch in batches]


async def test_r10_after_the_deadline_the_text_is_not_run(tmp_path: Path) -> None:
    make_version(tmp_path)
    opener = Opener()
    async with serving(tmp_path, opener, lanes=1) as predictor:
        opener.engine.gate.clear()
        before = len(opener.engine.calls)
        held = asyncio.create_task(predictor.predict(["good"]))
        await opener.engine.entered(before + 1)
        with pytest.raises(DeadlineExceeded):
            await predictor.predict(["awful outstanding"], timeout_s=0.02)
        assert not held.done()
        opener.engine.gate.set()
        predicted((await held).outcomes)
    assert not opener.engine.has_seen(tokens_of("awful outstanding"))


async def test_the_deadline_holds_while_a_long_text_is_read(tmp_path: Path) -> None:
    make_version(tmp_path)
    async with serving(tmp_path) as predictor:
        with pytest.raises(DeadlineExceeded):
            await predictor.predict(["good film " * 3_000] * 50, timeout_s=1e-6)


# Its life.


async def test_it_is_described_when_it_is_ready(tmp_path: Path) -> None:
    make_version(tmp_path, version=2, precisions=("float32", "int8"), labels=("bad", "so-so", "good"))
    async with serving(tmp_path, lanes=3, threads_per_lane=2) as predictor:
        assert predictor.unready_reason() is None
        described = predictor.description
    assert described is not None
    assert (described.name, described.version) == ("sentiment", "2")
    assert described.labels == ("bad", "so-so", "good")
    assert (described.engine, described.precision, described.device) == ("onnx", "int8", "cpu")
    assert (described.max_tokens, described.lanes, described.threads_per_lane) == (64, 3, 2)
    assert described.cpu_quota_cores > 0


async def test_r57_the_loop_turns_while_the_model_loads(tmp_path: Path) -> None:
    make_version(tmp_path)
    opener = Opener()
    opener.may_open.clear()
    predictor = Predictor(settings_for(tmp_path), Metrics(), open_engine=opener)
    assert predictor.unready_reason() == "starting"
    starting = asyncio.create_task(predictor.start())
    assert await asyncio.to_thread(opener.opening.wait, 60)
    assert predictor.unready_reason() == "starting"
    assert predictor.description is None
    with pytest.raises(NotReady) as caught:
        await predictor.predict(["good"])
    assert caught.value.retry_after_s is not None
    opener.may_open.set()
    await starting
    assert predictor.unready_reason() is None
    await predictor.stop(60)


async def test_stopped_while_loading_it_gives_the_load_up(tmp_path: Path) -> None:
    make_version(tmp_path)
    opener = Opener()
    opener.may_open.clear()
    predictor = Predictor(settings_for(tmp_path), Metrics(), open_engine=opener)
    starting = asyncio.create_task(predictor.start())
    assert await asyncio.to_thread(opener.opening.wait, 60)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await predictor.stop(1)
    opener.may_open.set()
    assert await asyncio.to_thread(opener.opened.wait, 60)
    assert await asyncio.to_thread(opener.engine.closed.wait, 60)
    assert predictor.unready_reason() == "stopping"
    golden_texts_alone_and_together = 5
    assert len(opener.engine.calls) == golden_texts_alone_and_together


async def test_stopping_answers_what_was_accepted_and_takes_no_more(tmp_path: Path) -> None:
    make_version(tmp_path)
    opener = Opener()
    predictor = Predictor(settings_for(tmp_path, lanes=1), Metrics(), open_engine=opener)
    await predictor.start()
    opener.engine.gate.clear()
    before = len(opener.engine.calls)
    held = asyncio.create_task(predictor.predict(["good"]))
    await opener.engine.entered(before + 1)
    waiting = asyncio.create_task(predictor.predict(["bad"]))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(predictor.stop(60))
    await asyncio.sleep(0)
    assert predictor.unready_reason() == "stopping"
    with pytest.raises(Stopping):
        await predictor.predict(["great"])
    opener.engine.gate.set()
    predicted((await held).outcomes + (await waiting).outcomes)
    await stopping
    assert opener.engine.closed.is_set()
    await predictor.stop(60)


async def test_an_overdue_batch_makes_it_unready_until_it_ends(tmp_path: Path) -> None:
    make_version(tmp_path)
    opener = Opener()
    async with serving(tmp_path, opener, lanes=1, request_timeout_s=0.05) as predictor:
        opener.engine.gate.clear()
        before = len(opener.engine.calls)
        with pytest.raises(DeadlineExceeded):
            await predictor.predict(["good"])
        await opener.engine.entered(before + 1)
        with pytest.raises(DeadlineExceeded):
            await predictor.predict(["bad"], timeout_s=0.1)
        assert "a batch has been running for" in str(predictor.unready_reason())
        opener.engine.gate.set()
        predicted((await predictor.predict(["good"], timeout_s=60)).outcomes)
        assert predictor.unready_reason() is None


def lie(manifest: Manifest) -> Manifest:
    first, *rest = manifest.golden_texts
    return replace(manifest, golden_texts=[replace(first, logits={"onnx/float32": [5.0, 5.0]}), *rest])


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("no version", "no version of the model is there"),
        ("another version", "version 7 is not there"),
        ("truncated", r"model\.onnx: \d+ bytes"),
        ("no graph", "onnxruntime cannot load the model"),
        ("golden texts", "golden text 1: a logit is off by"),
        ("precision", "it has float32"),
        ("shape", "the engine failed on 8 × 64 tokens"),
    ],
)
async def test_r56_what_cannot_start_is_never_ready(tmp_path: Path, case: str, reason: str) -> None:
    def refuse_long(batch: TokenBatch) -> None:
        if max(batch.lengths) == 64:
            raise RuntimeError

    def prepare(engine: GatedEngine) -> None:
        if case == "shape":
            engine.fault = refuse_long

    if case != "no version":
        model = (lambda _: b"no graph") if case == "no graph" else None
        change = lie if case == "golden texts" else lambda manifest: manifest
        folder = make_version(tmp_path, model=model, change=change)
        if case == "truncated":
            (folder / "model.onnx").write_bytes(b"short")
    changes: dict[str, Any] = {"another version": {"version": 7}, "precision": {"precision": "int8"}}
    opener = Opener(prepare)
    predictor = Predictor(settings_for(tmp_path, **changes.get(case, {})), Metrics(), open_engine=opener)
    with pytest.raises(StartupError, match=reason):
        await predictor.start()
    assert str(predictor.unready_reason()).startswith("start failed: ")
    assert predictor.description is None
    with pytest.raises(NotReady):
        await predictor.predict(["good"])
    if case in {"golden texts", "shape"}:
        assert opener.engine.closed.is_set()
    await predictor.stop(1)


class Panic(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize(
    "error", [Panic, SystemExit, KeyboardInterrupt, StopIteration, asyncio.CancelledError]
)
async def test_whatever_ends_a_load_is_a_failed_start(tmp_path: Path, error: type[BaseException]) -> None:
    def fail(*_: Any) -> Any:
        raise error("of some kind")

    make_version(tmp_path)
    predictor = Predictor(settings_for(tmp_path), Metrics(), open_engine=fail)
    with pytest.raises(StartupError, match=f"{error.__name__}: of some kind"):
        await predictor.start()
    assert str(predictor.unready_reason()).startswith("start failed: ")
    await predictor.stop(1)


# What is counted.


async def test_what_happens_is_counted(tmp_path: Path) -> None:
    make_version(tmp_path, max_tokens=8)
    metrics = Metrics()
    predictor = Predictor(settings_for(tmp_path, lanes=1, threads_per_lane=1), metrics)
    await predictor.start()
    assert sample(metrics, "valence_predictions_total", label="negative") == 0
    await predictor.predict(["good", "", "bad \U0001f621", "good " * 99])
    await predictor.predict([""])
    metrics.render()
    await predictor.stop(60)
    assert sample(metrics, "valence_predictions_total", label="positive") == 2
    assert sample(metrics, "valence_predictions_total", label="negative") == 1
    assert sample(metrics, "valence_prediction_confidence_count") == 3
    assert sample(metrics, "valence_text_errors_total", reason="text_empty") == 2
    assert sample(metrics, "valence_texts_truncated_total") == 1
    assert sample(metrics, "valence_unknown_tokens_total") == 1
    assert sample(metrics, "valence_text_tokens_sum") == 3 + 4 + 8
    assert sample(metrics, "valence_tokens_total", kind="real") == 3 + 4 + 8
    assert sample(metrics, "valence_tokens_total", kind="padding") >= 0
    assert sample(metrics, "valence_batch_items_sum") == 3
    assert sample(metrics, "valence_lane_busy_seconds_total") > 0
    assert sample(metrics, "valence_stage_duration_seconds_count", stage="tokenize") == 2
    assert sample(metrics, "valence_stage_duration_seconds_count", stage="queue") == 1
    assert sample(metrics, "valence_stage_duration_seconds_count", stage="infer") == 1
    assert sample(metrics, "valence_lanes") == 1
    assert sample(metrics, "valence_queue_capacity_items") == 1024
    assert sample(metrics, "valence_queue_items") == 0


async def test_nothing_is_left_running_after_a_stop(tmp_path: Path) -> None:
    make_version(tmp_path)
    before = set(threading.enumerate())
    async with serving(tmp_path, lanes=2, threads_per_lane=2) as predictor:
        await predictor.predict(["good film " * 1_000, "bad"])
    left = {thread for thread in set(threading.enumerate()) - before if not thread.name.startswith("asyncio")}
    for thread in left:
        await asyncio.to_thread(thread.join, 60)
    assert not any(thread.is_alive() for thread in left)
