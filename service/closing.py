"""Closes a connection so that a client who is still sending gets to read his answer.

A connection that is closed before all is read is reset when more comes, and the reset takes the answer away,
or stops the client before he looks for it. So the sending side is closed first, and what comes is read and
dropped for a while (RFC 9112, 9.6). Knows nothing of HTTP.
"""

import asyncio
import contextlib

from uvicorn.protocols.http.flow_control import FlowControl

LINGER_S = 1.0
"""How long is read and dropped, at most; a client that closes in answer, as most do, ends it."""


class GivingWay:
    """The transports of one server that may be ended for a newcomer, in the order of being added."""

    def __init__(self) -> None:
        self._transports: dict[LingeringTransport, None] = {}

    def __len__(self) -> int:
        return len(self._transports)

    def add(self, transport: "LingeringTransport") -> None:
        """It may be ended from now on."""
        self._transports[transport] = None

    def discard(self, transport: "LingeringTransport") -> None:
        """It is over, or may no longer be ended."""
        self._transports.pop(transport, None)

    def end_first(self) -> bool:
        """End the one that was added first; whether there was any."""
        first = next(iter(self._transports), None)
        if first is None:
            return False
        self.discard(first)
        first.abort()
        return True


class LingeringTransport(asyncio.Transport):
    """A transport that lingers when it is closed in the middle of a request, unless it has to give way.

    Attributes:
        mid_request: whether a request has begun to arrive and is not whole; its protocol sees to it.
        lingers: it is being closed, and what comes is to be dropped.
    """

    def __init__(self, transport: asyncio.Transport, flow: FlowControl, giving_way: GivingWay) -> None:
        super().__init__()
        self.mid_request = False
        self.lingers = False
        self._transport = transport
        self._flow = flow
        self._giving_way = giving_way
        self._timer: asyncio.TimerHandle | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, as soon as can be."""
        self._transport.write(data)

    def get_write_buffer_size(self) -> int:
        """What is written and not yet sent, in bytes."""
        return self._transport.get_write_buffer_size()

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""
        return self.lingers or self._transport.is_closing()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def close(self) -> None:
        """Close when all is sent; in the middle of a request, when its client closes or the time is over."""
        if not self.mid_request or self._transport.is_closing():
            self._transport.close()
        elif not self.lingers:
            self.lingers = True
            self._giving_way.add(self)
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)
            self._flow.resume_reading()
            with contextlib.suppress(OSError):  # reset meanwhile: that is told by the loop
                self._transport.write_eof()

    def lost(self) -> None:
        """The connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
        self._giving_way.discard(self)
