"""What a route has to do with its client on the line: reading his body, and noticing that he went away.

Knows the two ends of ASGI and nothing of what is sent over them.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from starlette.types import Receive, Scope

from service.errors import ClientGone, DeadlineExceeded

LINE_KEY = "line"
"""In the `state` of the scope: the connection, as `Line`."""


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


class Line(Protocol):
    """A connection that tells when its client is gone: `on_gone` is called then, once, if it is set."""

    on_gone: Callable[[], None] | None


class ClientWatch:
    """`with ClientWatch(scope): await work` cancels the work when the client closes the connection.

    An endpoint is told by ASGI only through a pending `receive`, which takes a task of its own for each
    request. The server's connections tell it themselves; under another server nobody is watched.

    Raises:
        ClientGone: in place of the cancellation.
    """

    def __init__(self, scope: Scope) -> None:
        self._line: Line | None = scope["state"].get(LINE_KEY)
        self._gone = False

    def __enter__(self) -> Self:
        if self._line is not None:
            self._work = asyncio.current_task()
            self._line.on_gone = self._leave
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._line is not None:
            self._line.on_gone = None
        if self._gone and self._work is not None and self._work.uncancel() == 0 and error is not None:
            raise ClientGone from None

    def _leave(self) -> None:
        self._gone = True
        if self._work is not None:
            self._work.cancel()
