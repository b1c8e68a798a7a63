"""The bounds of one connection, on a loop whose clock the test sets."""

import asyncio
from typing import Any

import pytest

from tests.server import SAFETY_S
from tests.service.talks import HEAD_LIMIT, TIMEOUT_S, Talk, run, start, talking

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
        await talk.send(b"GET / HTTP/1.1\r\n\r\n")
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
            await talk.send(b"GET / HTTP/1.1\r\n\r\n")
            await talk.read(lambda: talk.got.endswith(b"\r\n\r\n" + LONG))
            for _ in range(3):
                await talk.loop.put_forward()
            rest.set()
            await talk.read(lambda: talk.got.endswith(b"y"))

    run(test)


FIRST = b"POST / HTTP/1.1\r\ncontent-length: 5000\r\n\r\n" + b"x" * 2_000
REST = b"x" * 3_000  # alone longer than a head may be


@pytest.mark.parametrize("cut", [1, 20, 1_500])
def test_what_stands_before_a_head_is_none_of_it(cut: int) -> None:
    """A piece that ends one body and begins the next head."""
    second = b"POST / HTTP/1.1\r\nx-some: %b\r\ntransfer-encoding: chunked\r\n\r\n" % (b"x" * 1_600)
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
            await talk.send(b"P/1.1\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n")
            await talk.loop.settle()
            await talk.send(b"x-trailer: %b\r\nx-last: x\r\n\r\n" % (b"x" * 1_000))
            await talk.read(lambda: talk.got.endswith(b"<3>"))

    run(test)


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["endless", "whole"])
def test_a_head_behind_another_request_has_the_same_limit(end: bytes) -> None:
    async def test() -> None:
        async with talking(echo) as talk:
            await talk.send(FIRST)
            await talk.send(REST + b"GET / HTTP/1.1\r\nx-long: " + b"x" * 1_500)
            await talk.read(lambda: talk.got.endswith(b"<5000>"))
            await talk.send(b"x" * (600 if end else HEAD_LIMIT + 1) + end)
            assert b"HTTP/1.1 431 " in await talk.read_to_the_end()

    run(test)


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (b"GET / HTTP/1.1\r\nx-long: " + b"x" * HEAD_LIMIT + b"\r\n\r\n", b"431"),
        (b"GARBAGE\r\n\r\n", b"400"),
        (b"GET / HTT", b"408"),
        (b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nx", b"408"),
        (
            b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
            + b"x-trailer: x\r\n" * HEAD_LIMIT
            + b"\r\nGET / HTTP/1.1\r\n\r\n",
            b"431",
        ),
    ],
    ids=["head", "garbage", "slow head", "slow body", "trailers"],
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
            await talk.send(b"GET /-1 HTTP/1.1\r\n\r\nGET /-2 HTTP/1.1\r\n\r\n" + bad)
            await asyncio.wait_for(asked.acquire(), SAFETY_S)
            await talk.loop.put_forward()
            may_answer.release()
            await asyncio.wait_for(asked.acquire(), SAFETY_S)
            await talk.send(b"12345678GET /-3 HTTP/1.1\r\n\r\n")  # too late
            await talk.loop.put_forward()
            for _ in range(4):
                may_answer.release()
            answers = (await talk.read_to_the_end()).split(b"HTTP/1.1 ")[1:]
            assert [one[:3] for one in answers] == [b"200", b"200", status]
            assert [one[-3:] for one in answers[:2]] == [b"/-1", b"/-2"]

    run(test)
