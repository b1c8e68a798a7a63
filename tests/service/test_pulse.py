"""Readiness follows what the engine can do, and not what callers send it."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from service.core import FloatArray, TokenBatch
from service.metrics import Metrics
from service.predictor import Predictor
from service.pulse import SUSPECT_AFTER
from service.settings import Settings
from tests.models import make_version
from tests.server import SAFETY_S, LocalServer, eventually, local_server
from tests.service.stand_ins import GatedEngine, Opener

POISON = "bad " * 20


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_version(tmp_path)
    return tmp_path


@pytest.fixture
def opener() -> Opener:
    return Opener()


@pytest.fixture
def server(store: Path, opener: Opener) -> Iterator[LocalServer]:
    with local_server(open_engine=opener, model_store=store, lanes=1) as running:
        yield running


@pytest.fixture
def client(server: LocalServer) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def break_down(batch: TokenBatch) -> None:
    raise RuntimeError("an illegal memory access was encountered")


def nothing_finite(logits: FloatArray) -> FloatArray:
    return np.full_like(logits, np.nan)


@pytest.mark.parametrize("kind", ["raises", "not finite"])
def test_r52_an_engine_that_fails_on_everything_is_unready_until_it_answers(
    client: httpx.Client, opener: Opener, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    engine: GatedEngine = opener.engine
    if kind == "raises":
        engine.fault = break_down
    else:
        engine.change = nothing_finite
    for _ in range(SUSPECT_AFTER):
        assert client.get("/health/ready").status_code == 200
        assert client.post("/predict", json={"inputs": "good"}).status_code == 500
    eventually(lambda: client.get("/health/ready").status_code == 503, "unready")
    assert client.get("/health/ready").json()["reason"] == "the engine fails"
    assert client.get("/health/live").status_code == 200
    listed = client.post("/predict", json={"inputs": ["good", "bad"]})
    assert {one["error"]["code"] for one in listed.json()["predictions"]} == {"engine_failed"}
    assert client.get("/health/ready").status_code == 503
    engine.fault, engine.change = (lambda _: None), (lambda logits: logits)
    eventually(lambda: client.get("/health/ready").status_code == 200, "ready, though nobody has asked")
    assert client.post("/predict", json={"inputs": "good"}).status_code == 200
    said = [(one.levelno, one.getMessage()) for one in caplog.records if one.name == "service.pulse"]
    assert said == [(logging.ERROR, "the engine fails"), (logging.WARNING, "the engine answers again")]


def test_texts_that_the_engine_cannot_take_leave_it_ready(client: httpx.Client, opener: Opener) -> None:
    own = 0

    def fail_on_long(batch: TokenBatch) -> None:
        nonlocal own
        if len(batch.ids) > len(POISON.split()):
            raise MemoryError
        own += 1  # nobody else sends a short one

    opener.engine.fault = fail_on_long
    for _ in range(SUSPECT_AFTER):
        assert client.post("/predict", json={"inputs": POISON}).status_code == 500
    eventually(lambda: own == 1, "the engine was asked")
    for _ in range(2 * SUSPECT_AFTER):
        assert client.post("/predict", json={"inputs": POISON}).status_code == 500
        assert client.get("/health/ready").status_code == 200


def test_a_prediction_ends_the_count(client: httpx.Client, opener: Opener) -> None:
    calls = len(opener.engine.calls)
    for _ in range(3):
        opener.engine.fault = break_down
        for _ in range(SUSPECT_AFTER - 1):
            assert client.post("/predict", json={"inputs": "good"}).status_code == 500
        opener.engine.fault = lambda _: None
        assert client.post("/predict", json={"inputs": "good"}).status_code == 200
    assert len(opener.engine.calls) == calls + 3 * SUSPECT_AFTER, "the engine was asked by callers alone"


def test_the_end_leaves_nobody_asking(store: Path, opener: Opener) -> None:
    async def test() -> None:
        settings = Settings(model_store=store, device="cpu", lanes=1)
        predictor = Predictor(settings, Metrics(), open_engine=opener)
        await predictor.start()
        opener.engine.fault = break_down
        for _ in range(SUSPECT_AFTER):
            await predictor.predict(["good"])
        async with asyncio.timeout(SAFETY_S):
            while predictor.unready_reason() is None:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0)
        await predictor.stop(SAFETY_S)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(test())
