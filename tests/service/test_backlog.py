"""Requests that come faster than they are answered: none is lost, and few are made before their turn."""

import asyncio
import re
from typing import Any

from service.connections import BoundedConnection
from tests.server import SAFETY_S
from tests.service.talks import Talk, run, start, talking

TINY = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
PIECE_BYTES = 262_144  # what a loop reads at once


def served(talk: Talk) -> BoundedConnection:
    [connection] = talk.state.connections
    assert isinstance(connection, BoundedConnection)
    return connection


class Gate:
    """An application that reads the body, and answers when it may: path and length of the body."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.asked = asyncio.Event()
        self.headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size, more = size + len(message["body"]), message["more_body"]
        self.asked.set()
        await self.may_answer.wait()
        said = b"<%b %d>" % (scope["path"].encode(), size)
        begin = start(len(said))
        begin["headers"] += self.headers
        await send(begin)
        await send({"type": "http.response.body", "body": said})


def test_thousands_in_one_piece_are_not_made_before_their_turn() -> None:
    """A request that waits takes a hundred times its bytes, and making them all at once holds the loop."""

    async def test() -> None:
        gate = Gate()
        async with talking(gate) as talk:
            flood = asyncio.create_task(talk.send(TINY * (4 * PIECE_BYTES // len(TINY))))
            await asyncio.wait_for(gate.asked.wait(), SAFETY_S)
            await talk.loop.settle()
            connection = served(talk)
            assert 0 < len(connection.pipeline) < 100
            assert 0 < len(connection.flow) <= 2 * PIECE_BYTES  # not more is read, whatever is sent
            flood.cancel()
            connection.transport.abort()
            gate.may_answer.set()

    run(test)


def test_all_that_come_at_once_are_answered_in_their_order() -> None:
    kinds = (
        (b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n", 0),
        (b"POST /%d HTTP/1.1\r\nhost: x\r\ncontent-length: 3000\r\n\r\n" + b"x" * 3_000, 3_000),
        (
            b"POST /%d HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            b"5\r\nabcde\r\n" + b"7d0\r\n" + b"y" * 2_000 + b"\r\n0\r\nx-trailer: x\r\n\r\n",
            2_005,
        ),
        (
            (
                b"POST /%d HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
                b"content-length: 2\r\n\r\nzz"
            ),
            2,
        ),
    )
    count = 600

    async def test() -> None:
        gate = Gate()
        gate.may_answer.set()
        sent = b"".join(kinds[number % 4][0] % number for number in range(count))
        async with talking(gate) as talk:
            sending = asyncio.create_task(talk.send(sent))
            last = b"<%b %d>" % (b"/%d" % (count - 1), kinds[(count - 1) % 4][1])
            await talk.read(lambda: talk.got.endswith(last))
            await sending
            said = re.findall(rb"<(\S+) (\d+)>", talk.got)
            assert said == [(b"/%d" % number, b"%d" % kinds[number % 4][1]) for number in range(count)]
            assert not served(talk).flow

    run(test)


def test_a_body_that_is_not_read_on_our_side_is_not_late() -> None:
    """It stands behind a request whose answer takes longer than a request may take to arrive."""

    async def test() -> None:
        gate = Gate()
        async with talking(gate) as talk:
            body = b"x" * (3 * PIECE_BYTES)
            post = b"POST /late HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
            sending = asyncio.create_task(talk.send(TINY + post + body))
            await asyncio.wait_for(gate.asked.wait(), SAFETY_S)
            await talk.loop.put_forward()
            gate.may_answer.set()
            await talk.read(lambda: talk.got.endswith(b"</late %d>" % len(body)))
            await sending

    run(test)


def test_what_waits_is_dropped_when_the_connection_ends() -> None:
    async def test() -> None:
        gate = Gate()
        gate.headers = [(b"connection", b"close")]
        gate.may_answer.set()
        async with talking(gate) as talk:
            post = b"POST /cut HTTP/1.1\r\nhost: x\r\ncontent-length: 90000\r\n\r\n" + b"x" * 89_000
            await talk.send(TINY + post)
            assert re.findall(rb"<(\S+) \d+>", await talk.read_to_the_end()) == [b"/"]
            await talk.loop.put_forward()
            assert not talk.state.connections

    run(test)
