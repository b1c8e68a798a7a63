"""A client connection that is hung up on when its client takes nothing of an answer that waits for it.

Knows bytes and time; nothing of requests or routes.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.closing import LingeringTransport


class ReadConnection(HttpToolsProtocol):
    """Of a long answer, who is slow and steady gets all. Who takes nothing for so long is hung up on.

    Attributes:
        patience_s: how long; set when the connection is made.
    """

    transport: LingeringTransport
    patience_s: float
    _unread_bytes = 0
    _write_timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_write_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client leaves unread what was written, and the buffer is full."""
        super().pause_writing()
        self._bound_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()
        self._bound_closing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._bound_closing()  # the last answer may be unread still

    def _bound_closing(self) -> None:
        """A connection that is being closed is gone only when all is read."""
        if self.transport.is_closing() and self in self.connections:
            self._bound_reading()

    def _bound_reading(self) -> None:
        if self._write_timer is None:
            self._unread_bytes = self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(self.patience_s, self._go_on_if_read)

    def _go_on_if_read(self) -> None:
        """Nothing is added meanwhile: the application waits, or the connection is being closed."""
        self._write_timer = None
        if self.transport.get_write_buffer_size() < self._unread_bytes:
            self._bound_reading()
        else:
            self.transport.abort()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
