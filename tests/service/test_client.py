"""The client on the line: his body in pieces, and his going away while he is worked for."""

import asyncio
from collections.abc import Sequence

import pytest
from starlette.types import Message

from service.client import ClientWatch, read_body
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


async def test_quick_work_is_not_watched() -> None:
    line = Line([GONE])
    with ClientWatch(line.receive):
        await asyncio.sleep(0)
    with ClientWatch(line.receive, after_s=0):
        pass
    for _ in range(3):
        await asyncio.sleep(0)
    assert line.asked == 0


async def test_work_for_a_client_that_goes_is_cancelled() -> None:
    line = Line([part(b"", more=False)])
    cancelled = False

    async def work() -> None:
        nonlocal cancelled
        with ClientWatch(line.receive, after_s=0):
            asyncio.get_running_loop().call_later(0, line.put, GONE)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled = True
                raise

    with pytest.raises(ClientGone):
        await work()
    assert cancelled
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # the task goes on as if nothing had been


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    line = Line()
    entered = asyncio.Event()

    async def work() -> None:
        with ClientWatch(line.receive, after_s=0):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_both_at_once_is_a_cancellation() -> None:
    line = Line([GONE])
    entered = asyncio.Event()

    async def work() -> None:
        with ClientWatch(line.receive, after_s=0):
            entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                task.cancel()
                raise

    task = asyncio.create_task(work())
    await entered.wait()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_work_passes_and_the_watch_ends() -> None:
    line = Line()
    started = asyncio.Event()

    async def receive() -> Message:
        started.set()
        return await line.receive()

    async def work() -> None:
        with ClientWatch(receive, after_s=0):
            await started.wait()
            raise ValueError("it failed")

    before = asyncio.all_tasks()
    with pytest.raises(ValueError, match="it failed"):
        await work()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
