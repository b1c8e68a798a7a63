"""A. The batcher gets stuck, or spreads one failure: what it does to callers over HTTP."""

import asyncio
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from service.core import FloatArray
from service.errors import QueueFull
from service.tokenizer import MAX_READING_CHARS, Tokenizer
from tests.models import BAD, GOOD, PLAIN, bert_tokenizer
from tests.reliability.gates import hold, in_flight, predict
from tests.reliability.wire import GOOD as GOOD_BODY
from tests.reliability.wire import connect, reply, request
from tests.server import SAFETY_S, LocalServer, eventually, local_server
from tests.service.stand_ins import Opener

Running = tuple[LocalServer, Opener, httpx.Client]


@pytest.fixture(scope="module")
def running(store: Path) -> Iterator[Running]:
    opener = Opener()
    with local_server(open_engine=opener, model_store=store) as server, server.client() as client:
        yield server, opener, client


class FatalError(BaseException):
    """Not an Exception: an ordinary `except` lets it through."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(),
        FatalError(),
        MemoryError(),
        KeyboardInterrupt(),
        SystemExit(3),
        GeneratorExit(),
        StopIteration(),
        asyncio.CancelledError(),
        QueueFull(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_r03_whatever_the_engine_raises_the_next_request_is_answered(
    running: Running, error: BaseException
) -> None:
    """Also an error of our own that has another status: it is the engine's failure, and no refusal."""
    server, opener, client = running
    faults = [error]

    def fail_once(_: object) -> None:
        if faults:
            raise faults.pop()

    refused = server.metric("valence_refusals_total", reason="queue_full")
    opener.engine.fault = fail_once
    failed = predict(client)
    assert (failed.status_code, failed.json()["code"]) == (500, "engine_failed")
    assert predict(client).status_code == 200
    assert client.get("/health/ready").status_code == 200
    assert server.metric("valence_refusals_total", reason="queue_full") == refused


WRONG_ANSWERS: dict[str, Callable[[FloatArray], Any]] = {
    "no row": lambda logits: logits[:0],
    "twice the rows": lambda logits: np.concatenate([logits, logits]),
    "a column too many": lambda logits: np.concatenate([logits, logits[:, :1]], axis=1),
    "a column too few": lambda logits: logits[:, :1],
    "one dimension": lambda logits: logits[:, 0],
    "a number": lambda logits: logits[0, 0],
    "nothing": lambda _: None,
    "a list": lambda logits: logits.tolist(),
}


@pytest.mark.parametrize("case", WRONG_ANSWERS)
def test_an_answer_of_another_shape_is_nobodys(running: Running, case: str) -> None:
    """A column too many would be served as a label, and one too few would fail the neighbours as well."""
    server, opener, client = running
    defects = server.metric("valence_refusals_total", reason="internal_error")
    opener.engine.change = WRONG_ANSWERS[case]
    answer = predict(client, ["good", "bad"])
    opener.engine.change = lambda logits: logits
    assert answer.status_code == 200
    assert [one["error"]["code"] for one in answer.json()["predictions"]] == ["engine_failed"] * 2
    assert predict(client).status_code == 200
    assert server.metric("valence_refusals_total", reason="internal_error") == defects


def test_r04_each_of_64_clients_gets_its_own_answers(running: Running, pool: ThreadPoolExecutor) -> None:
    """Texts of one and of three, each with an answer of its own, known beforehand."""
    server, opener, client = running
    dice = random.Random(4)
    words = (*GOOD, *BAD, *PLAIN)
    asked: list[str | list[str]] = []
    for number in range(64):
        texts = [" ".join(dice.choices(words, k=1 + number % 20)) for _ in range(3)]
        asked.append(texts if number % 4 == 0 else texts[0])
    references = [predict(client, inputs, raw_scores=True).json()["predictions"] for inputs in asked]
    opener.engine.gate.clear()
    waiting = [pool.submit(predict, client, inputs, raw_scores=True) for inputs in asked]
    eventually(lambda: in_flight(server) == 64, "all are in flight")
    opener.engine.gate.set()
    for future, reference in zip(waiting, references, strict=True):
        answer = future.result(SAFETY_S).json()["predictions"]
        assert len(answer) == len(reference)
        for one, known in zip(answer, reference, strict=True):
            assert one["label"] == known["label"]
            assert one["scores"] == pytest.approx(known["scores"], abs=1e-4)


def test_r06_no_batch_holds_more_texts_than_the_limit(store: Path, pool: ThreadPoolExecutor) -> None:
    opener = Opener()
    settings: dict[str, Any] = {"max_batch_items": 8, "max_batch_tokens": 10_000, "max_texts": 20, "lanes": 1}
    with (
        local_server(open_engine=opener, model_store=store, **settings) as server,
        server.client() as client,
    ):
        warm_up = len(opener.engine.calls)
        different = [f"good {number:03}" for number in range(97)]  # and equally long; twins would share a row
        held = hold(opener, client, pool, different[:8])
        waiting = [pool.submit(predict, client, different[start : start + 8]) for start in range(8, 88, 8)]
        waiting.append(pool.submit(predict, client, different[88:]))
        eventually(lambda: b"valence_queue_items 89.0" in client.get("/metrics").content, "all wait")
        opener.engine.gate.set()
        answers = [one.result(SAFETY_S).json()["predictions"] for one in (held, *waiting)]
        assert [len(answer) for answer in answers] == [8] * 11 + [9]
        assert max(len(lengths) for lengths, _ in opener.engine.calls[warm_up:]) == 8
        assert predict(client, ["good"] * 21).json()["code"] == "too_many_texts"


def test_r07_every_connection_of_an_overflow_is_answered(store: Path, pool: ThreadPoolExecutor) -> None:
    """Refused at once, while the engine holds the rest; nothing is left when the queue has drained."""
    opener = Opener()
    settings: dict[str, Any] = {"lanes": 1, "max_queue_items": 16, "max_texts": 16}
    with (
        local_server(open_engine=opener, model_store=store, **settings) as server,
        server.client() as client,
    ):
        held = hold(opener, client, pool)
        connections = [connect(server.address) for _ in range(200)]
        for connection in connections:
            connection.sendall(request(GOOD_BODY))
        eventually(
            lambda: server.metric("valence_refusals_total", reason="queue_full") == 184, "all but 16 refused"
        )
        assert not held.done()
        opener.engine.gate.set()
        replies = [reply(connection) for connection in connections]
        for connection in connections:
            connection.close()
        assert sorted(one.status for one in replies) == [200] * 16 + [503] * 184
        assert all(int(one.headers["retry-after"]) >= 1 for one in replies if one.status == 503)
        assert held.result(SAFETY_S).status_code == 200
        eventually(lambda: in_flight(server) == 0, "nothing is in flight")
        assert b"valence_queue_items 0.0" in client.get("/metrics").content


def test_every_lane_stuck_is_told_and_over_when_they_come_back(store: Path, pool: ThreadPoolExecutor) -> None:
    """Deadlines are kept, health and metrics answer, readiness says why, and nothing late is run."""
    opener = Opener()
    settings: dict[str, Any] = {"lanes": 2, "threads_per_lane": 1, "request_timeout_s": 0.2}
    with (
        local_server(open_engine=opener, model_store=store, **settings) as server,
        server.client() as client,
    ):
        stuck = [hold(opener, client, pool), hold(opener, client, pool, "bad")]
        late = [pool.submit(predict, client, "outstanding") for _ in range(20)]
        assert {one.result(SAFETY_S).status_code for one in (*stuck, *late)} == {504}
        assert client.get("/health/live").status_code == 200
        assert b"valence_lanes_busy 2.0" in client.get("/metrics").content
        eventually(lambda: client.get("/health/ready").status_code == 503, "overdue")
        calls = len(opener.engine.calls)
        opener.engine.gate.set()
        eventually(lambda: client.get("/health/ready").status_code == 200, "ready again")
        assert predict(client).status_code == 200
        assert len(opener.engine.calls) == calls + 1


async def test_more_text_than_can_be_read_in_time_is_refused_at_once() -> None:
    """Reading takes turns: without a bound, many large requests would all end at their deadline."""
    content = bert_tokenizer().to_str().encode()
    tokenizer = Tokenizer.load(content, max_tokens=64, max_text_chars=32_768)
    large = ["good film " * 3_200] * (MAX_READING_CHARS // 64_000 + 1)
    first = asyncio.create_task(tokenizer.encode_all(large))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull) as refused:
        await tokenizer.encode_all(large)
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s >= 1
    assert len(await tokenizer.encode_all(["good"])) == 1, "a short text is read meanwhile"
    assert not first.done()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert len(await tokenizer.encode_all(large)) == len(large), "what was given up holds no room"
    tokenizer.close()


def test_r07_many_of_the_largest_bodies_are_answered_or_refused(
    store: Path, pool: ThreadPoolExecutor
) -> None:
    """None is left to its deadline: some are answered, the rest is told to come again."""
    with local_server(model_store=store) as server, server.client() as client:
        largest = ["good film " * 780] * 250
        asked = [pool.submit(predict, client, largest) for _ in range(12)]
        answers = [one.result(SAFETY_S) for one in asked]
        assert {one.status_code for one in answers} == {200, 503}
        refused = [one for one in answers if one.status_code == 503]
        assert all(int(one.headers["retry-after"]) >= 1 for one in refused)
        assert predict(client, largest).status_code == 200
