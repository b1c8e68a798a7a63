"""What a request leaves in memory when it is over: nothing, and without the help of the cyclic collector.

Things that name each other in a ring are freed by a full collection. Those are rare where the lasting heap is
large, and until then the ring holds all that it can reach: tokens, results, tasks, the body. Resident memory
follows the largest heap of such garbage so far, and so rises for hours.
"""

import asyncio
import gc
import json
import logging
import types
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import service
from service.core import TokenBatch
from tests.models import make_version
from tests.reliability.wire import Reply, connect, hang_up, reply, request
from tests.server import LocalServer, eventually, local_server
from tests.service.stand_ins import Opener

OURS = str(Path(service.__file__).parent)
REQUESTS = 4
MOST_ITEMS = 256


def name_of(thing: object) -> str | None:
    """What a thing of the service is: an object of its classes, or a frame of its code; None for others."""
    if isinstance(thing, types.FrameType):
        code = thing.f_code
        return f"frame of {code.co_qualname}" if code.co_filename.startswith(OURS) else None
    kind = type(thing)
    return kind.__qualname__ if kind.__module__.startswith("service.") else None


@contextmanager
def no_rings() -> Iterator[None]:
    """Fails when things of the service are left that only the collector can free."""
    gc.collect()
    gc.disable()
    logging.disable()  # pytest keeps every record, and with it the error that it tells of
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = Counter(name for thing in gc.garbage if (name := name_of(thing)) is not None)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        logging.disable(logging.NOTSET)
    assert not left


def inputs(value: str | list[str], **options: bool) -> bytes:
    return json.dumps({"inputs": value, **options}).encode()


def ask(server: LocalServer, asked: bytes) -> Reply:
    with connect(server.address) as connection:
        connection.sendall(asked)
        return reply(connection)


async def some_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def turn(server: LocalServer) -> None:
    """What was cancelled on the loop has ended."""
    asyncio.run_coroutine_threadsafe(some_turns(), server.loop).result()


def rest(server: LocalServer) -> None:
    """Everybody is answered, and the lanes have nothing to do."""
    eventually(lambda: server.metric("valence_http_requests_in_flight", route="/predict") == 0, "answered")
    eventually(lambda: looked_at(server, "valence_lanes_busy") == 0, "idle lanes")
    turn(server)


def looked_at(server: LocalServer, name: str) -> float:
    """A gauge that is set at each scrape."""
    server.life.metrics.render()
    return server.metric(name)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


@pytest.fixture(scope="module")
def opener() -> Opener:
    return Opener()


@pytest.fixture(scope="module")
def server(opener: Opener, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    store = tmp_path_factory.mktemp("store")
    make_version(store)
    with local_server(
        open_engine=opener,
        model_store=store,
        lanes=1,
        max_body_bytes=50_000,
        max_texts=MOST_ITEMS,
        max_queue_items=MOST_ITEMS,
    ) as running:
        yield running


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        pytest.param(request(), 200, id="a text"),
        pytest.param(request(inputs(["good", "a bad film", "good " * 90])), 200, id="a list"),
        pytest.param(request(inputs("x" * 9_000)), 200, id="a text for the threads"),
        pytest.param(request(inputs(["good", "", " "])), 200, id="a list with empty texts"),
        pytest.param(request(inputs("")), 422, id="an empty text"),
        pytest.param(request(inputs(" " * 9_000)), 422, id="an empty text for the threads"),
        pytest.param(request(inputs("good " * 900, truncate=False)), 422, id="a text not to be cut"),
        pytest.param(request(b'{"inputs": ["good", "\\ud800"]}'), 200, id="a lone surrogate"),
        pytest.param(request(b"good"), 400, id="no JSON"),
        pytest.param(request(b'{"texts": ["good"]}'), 422, id="another shape"),
        pytest.param(request(kind=b"text/plain"), 415, id="another type"),
        pytest.param(request(inputs(["good"] * (MOST_ITEMS + 1))), 413, id="too many texts"),
        pytest.param(request(inputs("x" * 60_000)), 413, id="too many bytes"),
        pytest.param(request(target=b"POST /nowhere"), 404, id="no such path"),
        pytest.param(request(target=b"PUT /predict"), 405, id="another method"),
        pytest.param(
            request(b"{", b"x-request-timeout: 0.1", b"content-length: 9", length=False),
            504,
            id="a body that does not come",
        ),
        pytest.param(request(b"", target=b"GET /health"), 200, id="health"),
        pytest.param(request(b"", target=b"GET /metrics"), 200, id="metrics"),
        pytest.param(request(b"", target=b"GET /models"), 200, id="models"),
    ],
)
def test_an_answered_request_leaves_nothing(server: LocalServer, asked: bytes, status: int) -> None:
    assert ask(server, asked).status == status  # what is made once is made now
    rest(server)
    with no_rings():
        for _ in range(REQUESTS):
            assert ask(server, asked).status == status
        rest(server)


def wait_in_engine(server: LocalServer, opener: Opener, asked: bytes, status: int | None) -> None:
    """One request, answered when the gate opens (200) or before that (504), or its client hangs up (None)."""
    opener.engine.gate.clear()
    tasks, calls = len(asyncio.all_tasks(server.loop)), len(opener.engine.calls)
    try:
        with connect(server.address) as connection:
            connection.sendall(asked)
            eventually(lambda: len(opener.engine.calls) > calls, "the engine was entered")
            if status is None:
                hang_up([connection])
                eventually(lambda: len(asyncio.all_tasks(server.loop)) == tasks, "noticed")
                return
            if status == 200:
                opener.engine.gate.set()
            assert reply(connection).status == status
    finally:
        opener.engine.gate.set()
    rest(server)


@pytest.mark.parametrize(
    ("timeout", "status"), [(b"50", 200), (b"0.5", 504), (b"50", None)], ids=["answered", "late", "gone"]
)
def test_a_request_that_waits_leaves_nothing(
    server: LocalServer, opener: Opener, timeout: bytes, status: int | None
) -> None:
    asked = request(inputs(["good", "bad"]), b"x-request-timeout: " + timeout)
    wait_in_engine(server, opener, asked, status)
    with no_rings():
        for _ in range(REQUESTS):
            wait_in_engine(server, opener, asked, status)
        rest(server)


def test_a_request_that_finds_the_queue_full_leaves_nothing(
    server: LocalServer, opener: Opener, pool: ThreadPoolExecutor
) -> None:
    opener.engine.gate.clear()
    calls = len(opener.engine.calls)
    answers: list[Future[Reply]] = [pool.submit(ask, server, request())]
    try:
        eventually(lambda: len(opener.engine.calls) > calls, "the engine was entered")
        answers.append(pool.submit(ask, server, request(inputs(["good"] * MOST_ITEMS))))
        eventually(lambda: looked_at(server, "valence_queue_items") == MOST_ITEMS, "a full queue")
        assert ask(server, request()).status == 503
        with no_rings():
            for _ in range(REQUESTS):
                assert ask(server, request()).status == 503
            turn(server)
    finally:
        opener.engine.gate.set()
    assert [answer.result().status for answer in answers] == [200, 200]


def test_a_request_that_the_engine_fails_leaves_nothing(server: LocalServer, opener: Opener) -> None:
    def fail(_: TokenBatch) -> None:
        raise RuntimeError("of the engine")

    opener.engine.fault = fail
    try:
        assert ask(server, request()).status == 500
        rest(server)
        with no_rings():
            for _ in range(REQUESTS):
                assert ask(server, request()).status == 500
                assert ask(server, request(inputs(["good", "bad"]))).status == 200
            rest(server)
    finally:
        opener.engine.fault = lambda _: None
