"""A client connection with bounds that uvicorn lacks: on a request's head, on slow senders, on their number.

Knows bytes and time; nothing of routes.
"""

import asyncio
from typing import Any

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.middleware import CROWDED_KEY

MAX_HEAD_BYTES = 65_536
"""Longest request line and headers together."""

RESERVED_CONNECTIONS = 64
"""How many connections above the limit are still taken, for health and metrics; those beyond are closed."""


class BoundedConfig(Config):
    """uvicorn's configuration, with what a `BoundedConnection` has to know.

    Args:
        read_timeout_s: how long one request may take to arrive, head and body.
        max_connections: how many connections are served in full.
        options: uvicorn's own.
    """

    def __init__(self, app: Any, *, read_timeout_s: float, max_connections: int, **options: Any) -> None:
        super().__init__(app, http=BoundedConnection, **options)
        self.read_timeout_s = read_timeout_s
        self.max_connections = max_connections


class BoundedConnection(HttpToolsProtocol):
    """Answers 431 to a head that is too long, and 408 to a request that arrives too slowly, and hangs up.

    A request that arrives in one piece, as most do, costs two assignments; timers are for the others.
    """

    config: BoundedConfig
    _unfinished = False
    _in_head = False
    _head_bytes = 0
    _read_timer: asyncio.TimerHandle | None = None
    _answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        over = len(self.connections) - self.config.max_connections
        if over > RESERVED_CONNECTIONS:
            transport.abort()
        self._crowded = over > 0
        # uvicorn waits for ever for the first byte.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        self._stop_read_timer()
        # uvicorn tells the newest request alone: the one that is being answered would write to nobody, and
        # those that wait behind it would still be begun.
        self.pipeline.clear()
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # The keep-alive timer goes on until a request begins: empty lines alone are no sign of life.
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self.logger.warning("invalid HTTP request")
            self.send_400_response("Invalid HTTP request received.")
            return
        self._bound_arrival(data)

    def _bound_arrival(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(b"431 Request Header Fields Too Large")
                return
        if not self._unfinished:
            self._stop_read_timer()
        elif self._read_timer is None:
            self._read_timer = self.loop.call_later(self.config.read_timeout_s, self._read_too_slow)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._unfinished = self._in_head = True
        self._head_bytes = 0
        if self._crowded:
            self.scope["state"][CROWDED_KEY] = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)
            return
        # A trailer, behind the chunks of a body. Nobody reads it, so it is not kept, but it is counted.
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unfinished:
            self._unset_keepalive_if_required()  # the next request has begun, and has a timer of its own

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if not self._asks_to_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._unfinished = False
        if not self._asks_to_upgrade():
            super().on_message_complete()

    def _asks_to_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Read the request again without its wish to change to another protocol, which a server may ignore.

        The parser takes what follows such a head for the other protocol, and would lose the body. The HTTP
        client of Java asks for HTTP/2 in this way by default.
        """
        if not self._asks_to_upgrade():
            return
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.data_received(b"".join([*head, b"\r\n", rest]))

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _read_too_slow(self) -> None:
        self._read_timer = None
        if self._unfinished:
            self._refuse(b"408 Request Timeout")

    def _refuse(self, status: bytes) -> None:
        if self.transport.is_closing():
            return
        # Written past the application, so only where it has written nothing of this request itself.
        if self._in_head or not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
        self.transport.close()
