"""Asking a server whose engine the test holds."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx

from tests.server import LocalServer, eventually
from tests.service.stand_ins import Opener


def predict(client: httpx.Client, inputs: str | Sequence[str] = "good", **options: Any) -> httpx.Response:
    return client.post("/predict", json={"inputs": inputs, **options})


def in_flight(server: LocalServer) -> float:
    """Predictions that are being answered."""
    return server.metric("valence_http_requests_in_flight", route="/predict")


def hold(
    opener: Opener, client: httpx.Client, pool: ThreadPoolExecutor, inputs: str | Sequence[str] = "good"
) -> "Future[httpx.Response]":
    """A prediction that has entered the engine, and stays there until the gate is opened."""
    opener.engine.gate.clear()
    calls = len(opener.engine.calls)
    asked = pool.submit(predict, client, inputs)
    eventually(lambda: len(opener.engine.calls) > calls, "the engine was entered")
    return asked
