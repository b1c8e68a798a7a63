"""What a route has to do with its client on the line: reading his body, and noticing that he went away.

Knows the two ends of ASGI and nothing of what is sent over them.
"""

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive

from service.errors import ClientGone, DeadlineExceeded

WATCH_AFTER_S = 0.05
"""A request that waits longer than this is watched; most are answered sooner than a watch would pay."""


async def read_body(receive: Receive, *, within_s: float | None = None) -> bytes:
    """The whole body; it must be there within so many seconds, if any are given.

    Raises:
        ClientGone: the connection ended first.
        DeadlineExceeded: the time was over first.
    """
    if within_s is None:
        return await _read_all(receive)
    try:
        async with asyncio.timeout(within_s):
            return await _read_all(receive)
    except TimeoutError:
        raise DeadlineExceeded from None


async def _read_all(receive: Receive) -> bytes:
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class ClientWatch:
    """`with ClientWatch(receive): await work` cancels the work when the client closes the connection.

    An endpoint is not told that its client is gone, only a pending `receive` is. The body must have been
    read before.

    Raises:
        ClientGone: in place of the cancellation.
    """

    def __init__(self, receive: Receive, *, after_s: float = WATCH_AFTER_S) -> None:
        self._receive = receive
        self._after_s = after_s
        self._gone = False
        self._watch: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._work = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(self._after_s, self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
        if self._gone and self._work is not None and self._work.uncancel() == 0 and error is not None:
            raise ClientGone from None

    def _start(self) -> None:
        self._watch = asyncio.create_task(self._wait_for_the_end())

    async def _wait_for_the_end(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        if self._work is not None:
            self._work.cancel()
