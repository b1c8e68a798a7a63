"""The client on the line: his body in pieces, and his going away while he is worked for."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from starlette.types import Message, Scope

from service.client import LINE_KEY, ClientWatch, read_body
from service.errors import ClientGone

GONE: Message = {"type": "http.disconnect"}


class Line:
    """Gives what the test puts on it."""

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self.asked = 0
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        for message in messages:
            self.put(message)

    def put(self, message: Message) -> None:
        self._messages.put_nowait(message)

    async def receive(self) -> Message:
        self.asked += 1
        return await self._messages.get()


def part(body: bytes, *, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_in_pieces_is_put_together() -> None:
    assert await read_body(Line([part(b"all", more=False)]).receive) == b"all"
    pieces = [part(b"a", more=True), part(b"", more=True), part(b"b", more=False)]
    assert await read_body(Line(pieces).receive) == b"ab"
    assert await read_body(Line([{"type": "http.request"}]).receive) == b""


async def test_a_body_that_breaks_off() -> None:
    with pytest.raises(ClientGone):
        await read_body(Line([part(b"a", more=True), GONE]).receive)


@dataclass
class Connection:
    """A connection whose client the test takes away."""

    on_gone: Callable[[], None] | None = None

    @property
    def scope(self) -> Scope:
        return {"type": "http", "state": {LINE_KEY: self}}

    def lose(self) -> None:
        assert self.on_gone is not None
        self.on_gone()


async def test_work_for_a_client_that_goes_is_cancelled() -> None:
    connection = Connection()
    cancelled = False

    async def work() -> None:
        nonlocal cancelled
        with ClientWatch(connection.scope):
            asyncio.get_running_loop().call_soon(connection.lose)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled = True
                raise

    with pytest.raises(ClientGone):
        await work()
    assert cancelled
    assert connection.on_gone is None
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # the task goes on as if nothing had been


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    connection = Connection()

    async def work() -> None:
        with ClientWatch(connection.scope):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    assert connection.on_gone is not None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert connection.on_gone is None


async def test_both_at_once_is_a_cancellation() -> None:
    connection = Connection()

    async def work() -> None:
        with ClientWatch(connection.scope):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                task.cancel()
                raise

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    connection.lose()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_work_passes_and_the_watch_ends() -> None:
    connection = Connection()

    def work() -> None:
        with ClientWatch(connection.scope):
            raise ValueError("it failed")

    with pytest.raises(ValueError, match="it failed"):
        work()
    assert connection.on_gone is None


async def test_under_a_server_that_does_not_tell_nobody_is_watched() -> None:
    with ClientWatch({"type": "http", "state": {}}):
        await asyncio.sleep(0)
