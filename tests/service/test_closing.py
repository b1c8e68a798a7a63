"""A client that is still sending gets to read the answer before which his connection ends, and no more."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from service import closing
from service.closing import LINGER_S
from service.connections import RESERVED_CONNECTIONS, BoundedConnection
from tests.models import make_version
from tests.reliability.wire import connect, request, to_the_end
from tests.server import SAFETY_S, LocalServer, eventually, local_server
from tests.service.talks import HEAD_LIMIT, Talk, run, start, talking

PIECE = b"x" * 20_000
BEGUN = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n" + PIECE


async def refuses(scope: Any, receive: Any, send: Any) -> None:
    """Without a look at the body."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


async def refuses_and_closes(scope: Any, receive: Any, send: Any) -> None:
    head = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 503, "headers": head})
    await send({"type": "http.response.body"})


async def reads(scope: Any, receive: Any, send: Any) -> None:
    while (await receive())["type"] == "http.request":
        pass


async def sends_on(talk: Talk) -> None:
    """Until now all that came from the server was its answer and its end: was it meant?"""
    for _ in range(8):
        await talk.send(PIECE)
        await talk.loop.settle()


@pytest.mark.parametrize(
    ("app", "begun", "status"),
    [
        (refuses_and_closes, BEGUN, b"503"),
        (refuses, BEGUN.replace(b"content", b"connection: close\r\ncontent"), b"401"),
        (refuses, BEGUN.replace(b"HTTP/1.1", b"HTTP/1.0"), b"401"),
        (refuses_and_closes, BEGUN.replace(b"POST / ", b"POST /" + b"x" * HEAD_LIMIT + b" "), b"431"),
        (refuses_and_closes, b"GET /" + b"x" * 2 * HEAD_LIMIT, b"431"),
        (refuses_and_closes, b"GARBAGE\r\n\r\n", b"400"),
        (reads, BEGUN.replace(b"content-length: 200000", b"transfer-encoding: chunked"), b"400"),
        (refuses_and_closes, b"\x16\x03\x01", b"400"),
        (reads, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-le", b"408"),
        (reads, BEGUN, b"408"),
    ],
    ids=["refusal", "close", "1.0", "head", "long head", "garbage", "chunk", "TLS", "slow head", "slow body"],
)
def test_who_is_still_sending_reads_the_answer_and_its_end(app: Any, begun: bytes, status: bytes) -> None:
    """The end of the answer at once; the connection is gone as soon as he hangs up, too."""

    async def test() -> None:
        async with talking(app) as talk:
            await talk.send(begun)
            await talk.loop.settle()
            if status == b"408":
                await talk.loop.put_forward()
            assert (await talk.read_to_the_end()).startswith(b"HTTP/1.1 " + status)
            await sends_on(talk)
            assert talk.state.connections
            talk.client.shutdown(socket.SHUT_WR)
            await gone(talk)
            assert talk.got.count(b"HTTP/1.1 ") == 1

    run(test)


async def gone(talk: Talk) -> None:
    async with asyncio.timeout(SAFETY_S):
        while talk.state.connections:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)


def test_who_never_ends_holds_the_connection_for_a_short_time() -> None:
    async def test() -> None:
        async with talking(refuses_and_closes) as talk:
            await talk.send(BEGUN)
            await talk.read_to_the_end()
            for _ in range(4):
                await talk.loop.put_forward(LINGER_S / 5)
                await sends_on(talk)
                assert talk.state.connections
            await talk.loop.put_forward(LINGER_S / 5)
            assert not talk.state.connections

    run(test)


def test_what_was_read_ahead_is_let_go_and_the_rest_is_read_on() -> None:
    async def test() -> None:
        may_answer = asyncio.Event()

        async def answers(scope: Any, receive: Any, send: Any) -> None:
            await may_answer.wait()
            await refuses_and_closes(scope, receive, send)

        def held() -> int:
            [served] = talk.state.connections
            assert isinstance(served, BoundedConnection)
            return len(served.cycle.body)

        async with talking(answers) as talk, asyncio.timeout(SAFETY_S):
            await talk.send(BEGUN.replace(b"200000", b"20000000"))
            await talk.loop.settle()
            while held() <= HIGH_WATER_LIMIT:
                await talk.send(PIECE)
                await talk.loop.settle()
            may_answer.set()
            await talk.read_to_the_end()
            assert held() == 0
            for _ in range(400):  # more than the buffers on the way hold
                await talk.send(PIECE)
            assert held() == 0

    run(test)


@pytest.mark.parametrize("pieces", [1, 2])
def test_when_the_request_is_whole_nobody_is_waited_for(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is gone with the answer, though its client does not hang up and no time passes."""
    monkeypatch.setattr(closing, "LINGER_S", 10.0 * SAFETY_S)
    whole = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx"

    async def test() -> None:
        may_answer = asyncio.Event()

        async def answers(scope: Any, receive: Any, send: Any) -> None:
            await may_answer.wait()
            await refuses_and_closes(scope, receive, send)

        async with talking(answers) as talk:
            await talk.send(whole[:-1] if pieces == 2 else whole)
            await talk.loop.settle()
            if pieces == 2:
                await talk.send(whole[-1:])
                await talk.loop.settle()
            may_answer.set()
            await talk.read_to_the_end()
            await gone(talk)

    run(test)


def test_a_connection_that_is_kept_is_kept() -> None:
    """The rest of the refused body is no more than that, and the next request is answered."""

    async def test() -> None:
        async with talking(refuses) as talk:
            await talk.send(BEGUN)
            await talk.read(lambda: talk.got.endswith(b"\r\n\r\n"))
            await talk.loop.put_forward(LINGER_S + 1)
            await talk.send(PIECE * 9 + b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await talk.read(lambda: talk.got.count(b"HTTP/1.1 401 ") == 2)

    run(test)


def test_nothing_is_begun_on_a_connection_that_ends() -> None:
    async def test() -> None:
        begun: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            begun.append(scope["path"])
            await refuses_and_closes(scope, receive, send)

        async with talking(app) as talk:
            await talk.send(BEGUN)
            await talk.read_to_the_end()
            await talk.send(PIECE * 9 + b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n")
            talk.client.shutdown(socket.SHUT_WR)
            await gone(talk)
            assert begun == ["/"]

    run(test)


@pytest.mark.parametrize("how", ["slow", "broken"])
def test_who_waits_for_a_body_that_is_refused_is_told_at_once(how: str) -> None:
    """And what he says then goes nowhere."""

    async def test() -> None:
        asked, told = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            asked.set()
            assert (await receive())["type"] == "http.disconnect"
            await send(start(5))
            await send({"type": "http.response.body", "body": b"never"})
            told.set()

        async with talking(app) as talk:
            await talk.send(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
            await asyncio.wait_for(asked.wait(), SAFETY_S)
            if how == "slow":
                await talk.loop.put_forward()
            else:
                await talk.send(b"no chunk\r\n")
            await asyncio.wait_for(told.wait(), SAFETY_S)
            assert talk.state.connections, "it lingers still"
            status = b"408" if how == "slow" else b"400"
            assert (await talk.read_to_the_end()).startswith(b"HTTP/1.1 " + status)
            assert b"never" not in talk.got

    run(test)


# --- many that linger


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store")
    make_version(store)
    return store


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """Sockets of a test, closed at its end; no connection stops to linger by itself."""
    monkeypatch.setattr(closing, "LINGER_S", 10.0 * SAFETY_S)
    with ExitStack() as opened:
        yield opened


def lingering(server: LocalServer, clients: ExitStack, *lines: bytes) -> socket.socket:
    """A client that was refused in the middle of its body and does not hang up."""
    client = clients.enter_context(connect(server.address))
    client.sendall(request(b"x", b"content-length: 100000", *lines, kind=b"text/plain", length=False))
    refusal = to_the_end(client)
    assert refusal.startswith((b"HTTP/1.1 503 ", b"HTTP/1.1 415 "))
    return client


def is_healthy(server: LocalServer) -> bool:
    with server.client() as client:
        return client.get("/health/live").status_code == 200


def test_they_leave_the_reserve_to_health(store: Path, clients: ExitStack) -> None:
    """In a crowd they give way to who comes, the oldest first, and those within the limit do not."""
    with local_server(model_store=store, max_connections=2) as server:
        served = server.server.server_state.connections
        with ExitStack() as idle:
            for _ in range(2):
                idle.enter_context(connect(server.address))
            eventually(lambda: len(served) == 2, "both are taken")
            refused = [lingering(server, clients) for _ in range(RESERVED_CONNECTIONS)]
            assert len(served) == 2 + RESERVED_CONNECTIONS
            assert all(is_healthy(server) for _ in range(3))
            eventually(lambda: len(served) < 2 + RESERVED_CONNECTIONS, "the last one is gone")
            refused[-1].sendall(PIECE)
            with pytest.raises(ConnectionError):
                eventually(lambda: not refused[0].send(PIECE), "it is reset")
        clients.close()
        eventually(lambda: not served, "all are gone")


def test_they_crowd_nobody_out(store: Path, clients: ExitStack) -> None:
    with local_server(model_store=store, max_connections=2) as server:
        for _ in range(4):
            lingering(server, clients, b"connection: close")
        with server.client() as client:
            assert client.post("/predict", json={"inputs": "good"}).status_code == 200
        clients.close()


def test_they_hold_up_a_stop_no_longer_than_all_else(store: Path, clients: ExitStack) -> None:
    with local_server(model_store=store, stop_timeout_s=0.01) as server:
        lingering(server, clients, b"connection: close")
        server.ask_to_stop()
        assert server.wait() == 0
        assert not server.server.server_state.connections
