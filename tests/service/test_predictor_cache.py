"""The predictor with its cache, on a real engine: what it skips, what it refuses, and what is counted."""

import asyncio
from pathlib import Path

import httpx
import numpy as np
import pytest

from service.core import Timings, TokenBatch
from service.errors import DeadlineExceeded, EngineFailed, QueueFull, Stopping, TextEmpty, TextTooLong
from service.metrics import Metrics
from service.predictor import Answer, Predictor
from service.settings import Settings
from tests.models import make_version
from tests.server import local_server
from tests.service.by_hand import turns
from tests.service.stand_ins import GatedEngine, Opener
from tests.service.test_predictor import predicted, reference, sample, serving, tokens_of


class Held:
    """A gated engine whose only lane is held by a text of its own, until the gate is opened."""

    def __init__(self, predictor: Predictor, engine: GatedEngine) -> None:
        self._predictor = predictor
        self._engine = engine

    async def __aenter__(self) -> "Held":
        self._engine.gate.clear()
        before = len(self._engine.calls)
        self._holding = asyncio.create_task(self._predictor.predict(["not a movie"]))
        await self._engine.entered(before + 1)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._engine.gate.set()
        predicted((await self._holding).outcomes)


def ask(predictor: Predictor, *texts: str, timeout_s: float | None = None) -> asyncio.Task[Answer]:
    return asyncio.create_task(predictor.predict(texts, timeout_s=timeout_s))


def times_run(engine: GatedEngine, text: str) -> int:
    """In how many calls the text was, alone in them or not."""
    wanted = tokens_of(text)
    found = 0
    for lengths, ids in engine.calls:
        ends = np.cumsum(lengths)
        rows = [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        found += rows.count(wanted)
    return found


async def test_a_known_text_skips_tokenizer_queue_and_engine(tmp_path: Path) -> None:
    make_version(tmp_path)
    opener = Opener()
    async with serving(tmp_path, opener, lanes=1, cache_items=10) as predictor:
        first = await predictor.predict(["great product"])
        async with Held(predictor, opener.engine):
            again = await predictor.predict(["great product"])
        longer = await predictor.predict(["bad", "great product", "awful"])
    assert again.outcomes == first.outcomes
    assert again.timings == Timings()
    assert times_run(opener.engine, "great product") == 1
    for text, one in zip(["bad", "great product", "awful"], predicted(longer.outcomes), strict=True):
        np.testing.assert_allclose(one.logits, reference(text), atol=1e-5)


async def test_a_full_queue_refuses_what_must_be_run_and_nothing_else(tmp_path: Path) -> None:
    make_version(tmp_path)
    opener = Opener()
    bounds = {"max_texts": 2, "max_queue_items": 2}
    async with serving(tmp_path, opener, lanes=1, cache_items=10, **bounds) as predictor:
        await predictor.predict(["good"])
        async with Held(predictor, opener.engine):
            waiting = ask(predictor, "great", "bad")
            await turns()
            known = await predictor.predict(["good", "good"])
            with pytest.raises(QueueFull):
                await predictor.predict(["good", "awful"])
        predicted(known.outcomes + (await waiting).outcomes)
    assert not opener.engine.has_seen(tokens_of("awful"))


async def test_a_text_that_waits_in_the_queue_is_run_once_for_all_who_ask(tmp_path: Path) -> None:
    make_version(tmp_path)
    opener = Opener()
    async with serving(tmp_path, opener, lanes=1, cache_items=10) as predictor:
        async with Held(predictor, opener.engine):
            asking = [ask(predictor, "awful product") for _ in range(5)]
            await turns()
        answers = [predicted((await one).outcomes) for one in asking]
    assert answers == [answers[0]] * 5
    assert times_run(opener.engine, "awful product") == 1


@pytest.mark.parametrize("gone", [True, False], ids=["client gone", "deadline"])
async def test_who_waits_is_answered_when_the_leader_leaves_the_queue(tmp_path: Path, gone: bool) -> None:
    make_version(tmp_path)
    opener = Opener()
    async with serving(tmp_path, opener, lanes=1, cache_items=10) as predictor:
        async with Held(predictor, opener.engine):
            leader = ask(predictor, "awful product", timeout_s=60 if gone else 0.02)
            await turns()
            waiting = [ask(predictor, "awful product") for _ in range(3)]
            await turns()
            if gone:
                leader.cancel()
            with pytest.raises(asyncio.CancelledError if gone else DeadlineExceeded):
                await leader
            await turns()
        answers = [predicted((await one).outcomes)[0] for one in waiting]
    assert answers == [answers[0]] * 3
    np.testing.assert_allclose(answers[0].logits, reference("awful product"), atol=1e-5)
    assert times_run(opener.engine, "awful product") == 1


async def test_who_waits_is_answered_when_the_leader_leaves_the_engine(tmp_path: Path) -> None:
    make_version(tmp_path)
    opener = Opener()
    async with serving(tmp_path, opener, lanes=1, cache_items=10) as predictor:
        opener.engine.gate.clear()
        before = len(opener.engine.calls)
        leader = ask(predictor, "awful product", timeout_s=0.02)
        await turns()
        waiting, hasty = ask(predictor, "awful product"), ask(predictor, "awful product", timeout_s=0.02)
        await turns()
        await opener.engine.entered(before + 1)
        for late in (leader, hasty):
            with pytest.raises(DeadlineExceeded):
                await late
        assert not waiting.done()
        opener.engine.gate.set()
        predicted((await waiting).outcomes)
        again = await predictor.predict(["awful product"])
    assert again.timings == Timings()


async def test_a_transient_fault_is_not_remembered(tmp_path: Path) -> None:
    make_version(tmp_path)
    opener = Opener()

    def fail(_: TokenBatch) -> None:
        raise RuntimeError("a fault put in by the test")

    async with serving(tmp_path, opener, lanes=1, cache_items=10) as predictor:
        opener.engine.fault = fail
        first = await predictor.predict(["good"])
        opener.engine.fault = lambda _: None
        second = await predictor.predict(["good"])
    assert [type(one) for one in first.outcomes] == [EngineFailed]
    predicted(second.outcomes)


async def test_texts_are_refused_as_without_it(tmp_path: Path) -> None:
    make_version(tmp_path, max_tokens=8)
    asked = ["good " * 9, "", "\ud800", "good", "good " * 10]
    codes = []
    for items in (0, 10):
        opener = Opener()
        async with serving(tmp_path, opener, cache_items=items) as predictor:
            before = len(opener.engine.calls)
            await predictor.predict(["good " * 11], truncate=False)
            assert len(opener.engine.calls) == before
            await predictor.predict(asked)
            cut = await predictor.predict(asked)
            whole = await predictor.predict(asked, truncate=False)
        codes.append([getattr(one, "code", one) for one in (*cut.outcomes, *whole.outcomes)])
        assert [type(one) for one in whole.outcomes[:2]] == [TextTooLong, TextEmpty]
        assert [one.truncated for one in cut.outcomes if isinstance(one, tuple)] == [True, False, True]
    assert codes[0] == codes[1]


async def test_who_stops_answers_no_more(tmp_path: Path) -> None:
    make_version(tmp_path)
    opener = Opener()
    async with serving(tmp_path, opener, lanes=1, cache_items=10) as predictor:
        await predictor.predict(["good"])
        async with Held(predictor, opener.engine):
            leader, waiting = ask(predictor, "great"), ask(predictor, "great")
            await turns()
            stopping = asyncio.create_task(predictor.stop(60))
            await turns()
            with pytest.raises(Stopping):
                await predictor.predict(["good"])
        predicted((await leader).outcomes + (await waiting).outcomes)
        await stopping


async def test_it_is_off_unless_asked_for(tmp_path: Path) -> None:
    make_version(tmp_path)
    assert Settings().cache_items == 0
    metrics, opener = Metrics(), Opener()
    predictor = Predictor(Settings(model_store=tmp_path, device="cpu"), metrics, open_engine=opener)
    await predictor.start()
    for _ in range(2):
        await predictor.predict(["great product"])
    metrics.render()
    await predictor.stop(60)
    assert times_run(opener.engine, "great product") == 2
    for name in ("hits_total", "misses_total", "shared_total", "items"):
        assert sample(metrics, f"valence_cache_{name}") == 0


async def test_what_it_does_is_counted(tmp_path: Path) -> None:
    make_version(tmp_path, max_tokens=8)
    metrics, opener = Metrics(), Opener()
    settings = Settings(model_store=tmp_path, device="cpu", lanes=1, threads_per_lane=1, cache_items=2)
    predictor = Predictor(settings, metrics, open_engine=opener)
    await predictor.start()
    await predictor.predict(["good", "", "good", "bad"])
    await predictor.predict(["good"])
    await predictor.predict(["awful"])
    metrics.render()
    await predictor.stop(60)
    assert sample(metrics, "valence_cache_hits_total") == 1
    assert sample(metrics, "valence_cache_misses_total") == 4
    assert sample(metrics, "valence_cache_shared_total") == 1
    assert sample(metrics, "valence_cache_items") == 2
    assert sample(metrics, "valence_predictions_total", label="positive") == 3
    assert sample(metrics, "valence_predictions_total", label="negative") == 2
    assert sample(metrics, "valence_prediction_confidence_count") == 5
    assert sample(metrics, "valence_text_errors_total", reason="text_empty") == 1
    assert sample(metrics, "valence_text_tokens_count") == 3
    assert sample(metrics, "valence_stage_duration_seconds_count", stage="tokenize") == 2


def test_the_wire_shows_it_only_in_the_timings(tmp_path: Path) -> None:
    make_version(tmp_path)
    body = {"inputs": ["good film", "bad"], "top_k": 1}
    with local_server(model_store=tmp_path, cache_items=10) as server, server.client() as client:

        def post(**changes: object) -> httpx.Response:
            return client.post("/predict", json=body | changes)

        first, again, raw = post(), post(), post(raw_scores=True, top_k=None)
    assert (first.status_code, again.status_code, raw.status_code) == (200, 200, 200)
    assert again.json() == first.json()
    assert first.headers["server-timing"] != again.headers["server-timing"]
    assert again.headers["server-timing"] == "tokenize;dur=0.000, queue;dur=0.000, infer;dur=0.000"
    np.testing.assert_allclose(
        sorted(raw.json()["predictions"][0]["scores"].values()), sorted(reference("good film")), atol=1e-5
    )
