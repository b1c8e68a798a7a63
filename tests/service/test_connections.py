"""The bounds of one connection, on a loop whose clock the test sets."""

import asyncio
import contextlib
import socket
from typing import Any

import pytest

from service.connections import RESERVED_CONNECTIONS
from tests.server import SAFETY_S
from tests.service.talks import HEAD_LIMIT, MAX_CONNECTIONS, TIMEOUT_S, Talk, run, start, talking

LONG = b"x" * 2_000_000  # more than the buffers on the way hold


async def long_answer(scope: Any, receive: Any, send: Any) -> None:
    await send(start(len(LONG)))
    await send({"type": "http.response.body", "body": LONG})


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers when the body is whole, with its length."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    said = b"<%d>" % size
    await send(start(len(said)))
    await send({"type": "http.response.body", "body": said})


@pytest.mark.parametrize("keep_alive_s", [10**9, int(TIMEOUT_S)], ids=["kept", "closing"])
def test_a_steady_reader_gets_all_and_one_who_stops_is_hung_up_on(keep_alive_s: int) -> None:
    """Some of the answer in each stretch is enough, also when the connection is idle for the application."""

    async def reads_for(talk: Talk, stretches: int) -> None:
        await talk.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await talk.read(lambda: bool(talk.got))
        for _ in range(stretches):
            before = talk.unsent_bytes
            await talk.read(lambda: talk.unsent_bytes < before)  # noqa: B023 - called at once
            await talk.loop.put_forward()
            assert talk.state.connections

    async def test() -> None:
        async with talking(long_answer, keep_alive_s=keep_alive_s) as talk:
            await reads_for(talk, 5)
            await talk.read(lambda: talk.got.endswith(b"\r\n\r\n" + LONG))
        async with talking(long_answer, keep_alive_s=keep_alive_s) as talk:
            await reads_for(talk, 5)
            await talk.loop.put_forward()  # what came into the buffers since counts as read
            await talk.loop.put_forward()
            assert not talk.state.connections

    run(test)


def test_a_reader_who_caught_up_may_wait_for_the_rest() -> None:
    """The answer is under way still, and that it does not come is no fault of the reader."""

    async def test() -> None:
        rest = asyncio.Event()

        async def in_two_parts(scope: Any, receive: Any, send: Any) -> None:
            await send(start(len(LONG) + 1))
            await send({"type": "http.response.body", "body": LONG, "more_body": True})
            await rest.wait()
            await send({"type": "http.response.body", "body": b"y"})

        async with talking(in_two_parts) as talk:
            await talk.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await talk.read(lambda: talk.got.endswith(b"\r\n\r\n" + LONG))
            for _ in range(3):
                await talk.loop.put_forward()
            rest.set()
            await talk.read(lambda: talk.got.endswith(b"y"))

    run(test)


FIRST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n" + b"x" * 2_000
REST = b"x" * 3_000  # alone longer than a head may be


@pytest.mark.parametrize("cut", [1, 20, 1_500])
def test_what_stands_before_a_head_is_none_of_it(cut: int) -> None:
    """A piece that ends one body and begins the next head."""
    second = b"POST / HTTP/1.1\r\nhost: x\r\nx-some: %b\r\ntransfer-encoding: chunked\r\n\r\n" % (
        b"x" * 1_600
    )
    body = b"3\r\nabc\r\n0\r\nx-trailer: x\r\n\r\n"

    async def test() -> None:
        async with talking(echo) as talk:
            await talk.send(FIRST)
            await talk.send(REST + second[:cut])
            await talk.read(lambda: talk.got.endswith(b"<5000>"))
            await talk.send(second[cut:] + body)
            await talk.read(lambda: talk.got.endswith(b"<3>"))

    run(test)


def test_what_stands_before_a_head_is_none_of_its_trailers() -> None:
    async def test() -> None:
        async with talking(echo) as talk:
            await talk.send(FIRST + REST[:1_500])
            await talk.loop.settle()
            await talk.send(REST[1_500:] + b"POST / HTT")
            await talk.read(lambda: talk.got.endswith(b"<5000>"))
            await talk.send(b"P/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n")
            await talk.loop.settle()
            await talk.send(b"x-trailer: %b\r\nx-last: x\r\n\r\n" % (b"x" * 1_000))
            await talk.read(lambda: talk.got.endswith(b"<3>"))

    run(test)


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["endless", "whole"])
def test_a_head_behind_another_request_has_the_same_limit(end: bytes) -> None:
    async def test() -> None:
        async with talking(echo) as talk:
            await talk.send(FIRST)
            await talk.send(REST + b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"x" * 1_500)
            await talk.read(lambda: talk.got.endswith(b"<5000>"))
            await talk.send(b"x" * (600 if end else HEAD_LIMIT + 1) + end)
            assert b"HTTP/1.1 431 " in await talk.read_to_the_end()

    run(test)


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"x" * HEAD_LIMIT + b"\r\n\r\n", b"431"),
        (b"GARBAGE\r\n\r\n", b"400"),
        (b"GET http:// HTTP/1.1\r\nhost: x\r\n\r\n", b"400"),
        (b"CONNECT host:80 HTTP/1.1\r\nhost: x\r\n\r\n", b"400"),
        (b"GET / HTT", b"408"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx", b"408"),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
            + b"x-trailer: x\r\n" * HEAD_LIMIT
            + b"\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n",
            b"431",
        ),
    ],
    ids=["head", "garbage", "no address", "no URL", "slow head", "slow body", "trailers"],
)
def test_a_refusal_comes_behind_the_answers_to_earlier_requests(bad: bytes, status: bytes) -> None:
    """And nothing comes behind it."""

    async def test() -> None:
        may_answer, asked = asyncio.Semaphore(0), asyncio.Semaphore(0)

        async def waits(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            asked.release()
            await may_answer.acquire()
            await send(start(3))
            await send({"type": "http.response.body", "body": scope["path"].encode()})

        async with talking(waits) as talk:
            await talk.send(b"GET /-1 HTTP/1.1\r\nhost: x\r\n\r\nGET /-2 HTTP/1.1\r\nhost: x\r\n\r\n" + bad)
            await asyncio.wait_for(asked.acquire(), SAFETY_S)
            await talk.loop.put_forward()
            may_answer.release()
            await asyncio.wait_for(asked.acquire(), SAFETY_S)
            await talk.send(b"12345678GET /-3 HTTP/1.1\r\nhost: x\r\n\r\n")  # too late
            await talk.loop.put_forward()
            for _ in range(4):
                may_answer.release()
            answers = (await talk.read_to_the_end()).split(b"HTTP/1.1 ")[1:]
            assert [one[:3] for one in answers] == [b"200", b"200", status]
            assert [one[-3:] for one in answers[:2]] == [b"/-1", b"/-2"]

    run(test)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nHost: y\r\n\r\n", b"400"),
        (b"GET / HTTP/1.0\r\nhost: x\r\nhost: x\r\n\r\n", b"400"),
        (b"GET http://host/ HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", b"400"),
        (b"GET / HTTP/1.0\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\nHost:\r\nconnection: close\r\n\r\n", b"200"),
    ],
    ids=["none", "two", "two in 1.0", "absolute", "upgrade", "none in 1.0", "empty"],
)
def test_a_request_says_to_which_host_it_goes(head: bytes, status: bytes) -> None:
    async def test() -> None:
        async with talking(echo) as talk:
            await talk.send(head)
            assert (await talk.read_to_the_end()).startswith(b"HTTP/1.1 " + status)

    run(test)


@pytest.mark.parametrize(
    ("codings", "status"),
    [
        (b"gzip, chunked", b"501 Not Implemented"),
        (b"gzip\r\ntransfer-encoding: Chunked", b"501 Not Implemented"),
        (b"gzip", b"400 Bad Request"),  # where it ends, nobody can tell
    ],
)
def test_a_body_that_is_packed_is_refused_before_it_is_taken_for_another(
    codings: bytes, status: bytes
) -> None:
    """And nothing behind it is read."""
    begun: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])
        await echo(scope, receive, send)

    async def test() -> None:
        async with talking(app) as talk:
            head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: %b\r\n\r\n" % codings
            await talk.send(head + b"3\r\nabc\r\n0\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n")
            got = await talk.read_to_the_end()
            assert got == b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status
            assert not begun

    run(test)


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"http://host", "/", b""),
        (b"http://host:80?x=http://y", "/", b"x=http://y"),
        (b"http://host/some?x", "/some", b"x"),
        (b"/some://path", "/some://path", b""),
    ],
)
@pytest.mark.parametrize(
    "upgrade", [b"", b"connection: upgrade\r\nupgrade: h2c\r\n"], ids=["plain", "upgrade"]
)
def test_an_absolute_url_is_one_of_ours(target: bytes, path: str, query: bytes, upgrade: bytes) -> None:
    asked: list[tuple[str, bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append((scope["path"], scope["query_string"]))
        await echo(scope, receive, send)

    async def test() -> None:
        async with talking(app) as talk:
            await talk.send(b"GET %b HTTP/1.1\r\nhost: x\r\n%b\r\n" % (target, upgrade))
            await talk.read(lambda: talk.got.endswith(b"<0>"))
            assert asked == [(path, query)]

    run(test)


def test_who_has_asked_gives_way_to_nobody() -> None:
    """Nor is a request within the limit ended: who comes when all wait for their answers is the one to go."""

    async def test() -> None:
        may_answer = asyncio.Event()

        async def waits(scope: Any, receive: Any, send: Any) -> None:
            await may_answer.wait()
            await echo(scope, receive, send)

        async with talking(waits) as talk, contextlib.AsyncExitStack() as opened:

            async def another() -> Talk:
                client = opened.enter_context(socket.socket())
                client.setblocking(False)
                await talk.loop.sock_connect(client, talk.client.getpeername())
                return Talk(talk.loop, client, talk.state)

            asking = [talk, *[await another() for _ in range(MAX_CONNECTIONS + RESERVED_CONNECTIONS - 1)]]
            for one in asking:
                await one.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            async with asyncio.timeout(SAFETY_S):
                while len(talk.state.tasks) < len(asking):  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0)
            assert await (await another()).read_to_the_end() == b""
            may_answer.set()
            for one in asking:
                await one.read(lambda: one.got.endswith(b"<0>"))  # noqa: B023 - called at once

    run(test)


@pytest.mark.parametrize(
    "pieces",
    [[b"12345"], [b"123", b"45"], [b"12345", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"]],
    ids=["whole", "in two", "and another"],
)
def test_who_was_answered_before_the_body_came_is_not_waited_for_any_longer(pieces: list[bytes]) -> None:
    async def refuses(scope: Any, receive: Any, send: Any) -> None:
        await send(start(2))
        await send({"type": "http.response.body", "body": b"no"})

    async def test() -> None:
        async with talking(refuses, keep_alive_s=400) as talk:
            await talk.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n")
            await talk.read(lambda: talk.got.endswith(b"no"))
            for piece in pieces:
                await talk.loop.put_forward(200)  # within the time
                await talk.send(piece)
                await talk.loop.settle()
            await talk.read(lambda: talk.got.count(b"no") == 1 + (len(pieces[-1]) > 5))
            await talk.loop.put_forward(200)
            assert talk.state.connections
            await talk.loop.put_forward(201)
            await talk.read_to_the_end()

    run(test)
