"""A client connection with bounds that uvicorn lacks: on a request's head, on slow senders, on their number.

Knows bytes and time; nothing of routes.
"""

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from service.backlog import BODY_SLICE_BYTES, HEAD_SLICE_BYTES, Backlog
from service.client import LINE_KEY
from service.closing import GivingWay, LingeringTransport
from service.head import HEAD_TOO_LONG, fault_of, with_path
from service.middleware import CROWDED_KEY
from service.unread import ReadConnection

RESERVED_CONNECTIONS = 64
"""How many connections above the limit are still taken, for health and metrics.

For one more the oldest of them ends that has asked for nothing yet; if all have, the new one."""

_AROUND_HEADER = 4  # colon, space, end of line
_AROUND_URL = 14  # two spaces, the version and the ends of the first line and of the head


class BoundedConfig(Config):
    """uvicorn's configuration, with what a `BoundedConnection` has to know.

    Args:
        read_timeout_s: how long one request may take to arrive, head and body, and how long its client may
            take nothing of an answer that waits for it.
        max_head_bytes: longest request line and headers together.
        max_connections: how many connections are served in full.
        options: uvicorn's own.
    """

    def __init__(
        self, app: Any, *, read_timeout_s: float, max_head_bytes: int, max_connections: int, **options: Any
    ) -> None:
        super().__init__(app, http=BoundedConnection, **options)
        self.read_timeout_s = read_timeout_s
        self.max_head_bytes = max_head_bytes
        self.max_connections = max_connections
        self.giving_way = GivingWay()


class BoundedConnection(ReadConnection):
    """Answers 431 to a head that is too long, and 408 to a request that arrives too slowly, and hangs up.

    A request that arrives in one piece, as most do, costs a few assignments; timers are for the others.
    """

    config: BoundedConfig
    flow: Backlog
    _in_head = False
    _head_bytes = 0
    _shared_bytes = 0
    _piece_bytes = 0
    _piece_is_shared = False
    _fault: bytes | None = None
    _put_off: bytes | None = None
    _read_timer: asyncio.TimerHandle | None = None
    _answering: RequestResponseCycle | None = None
    on_gone: Callable[[], None] | None = None  # see `service.client.Line`

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.patience_s = self.config.read_timeout_s
        self.flow = Backlog(transport)
        giving_way = self.config.giving_way
        self.transport = LingeringTransport(transport, self.flow, giving_way)
        over = len(self.connections) - self.config.max_connections
        self._crowded = over > len(giving_way)  # these want nothing, or nothing yet
        if over > RESERVED_CONNECTIONS and not giving_way.end_first():
            transport.abort()
        elif self._crowded:
            giving_way.add(self.transport)
        self._bound_silence()  # uvicorn waits for ever for the first byte

    def _bound_silence(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        self._stop_read_timer()
        self.transport.lost()
        self.flow.drop()
        self._end_requests()
        if self.on_gone is not None:
            self.on_gone()
        super().connection_lost(exc)
        # Its requests name it: a ring that only a full collection would free.
        for scope in (self.scope, self._answering.scope if self._answering is not None else None):
            if scope is not None:
                scope["state"].pop(LINE_KEY, None)

    def _end_requests(self) -> None:
        """uvicorn tells the newest request alone that its client is gone.

        The one that is being answered would write to nobody, and those behind it would still be begun.
        """
        self.pipeline.clear()
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def data_received(self, data: bytes) -> None:
        if len(data) <= HEAD_SLICE_BYTES and not self.flow and not self.pipeline:
            self._read_slice(data)
            self._bound_arrival()
        else:
            self.flow.put(data)
            self._read_on()

    def _read_on(self) -> None:
        """Parse what has come, a slice at a time, until a request waits for its turn."""
        while self.flow and not self.pipeline and not self.transport.is_closing():
            in_body = self.transport.mid_request and not self._in_head
            self._read_slice(self.flow.take(BODY_SLICE_BYTES if in_body else HEAD_SLICE_BYTES))
        if self.transport.is_closing():
            self.flow.drop()
        else:
            self.flow.hold()
        self._bound_arrival()

    def _read_slice(self, data: bytes) -> None:
        again: bytes | None = data
        while again is not None:
            again = self._read(again)

    def _read(self, data: bytes) -> bytes | None:
        """Parse a slice; gives back what is to be read again, if a request asks for another protocol."""
        if self._put_off is not None or self.transport.lingers:
            return None  # what follows a request that is refused is not looked at
        self._piece_bytes = len(data)
        self._piece_is_shared = self.transport.mid_request
        # The keep-alive timer goes on until a request begins: empty lines alone are no sign of life.
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if self._fault is not None:
                self._refuse(self._fault)
                return None
            self.logger.warning("invalid HTTP request")
            if not self._waits_for_others(b"400 Bad Request"):
                self.send_400_response("Invalid HTTP request received.")
                self._end_requests()
            return None
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes - self._shared_bytes > self.config.max_head_bytes:
                self._refuse(HEAD_TOO_LONG)
        return None

    def _bound_arrival(self) -> None:
        if not self.transport.mid_request:
            self._stop_read_timer()
        elif self._read_timer is None and self._put_off is None and not self.transport.is_closing():
            self._read_timer = self.loop.call_later(self.config.read_timeout_s, self._read_too_slow)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self.transport.mid_request = self._in_head = True
        self._head_bytes = 0
        # How much of a piece is of a head that begins behind another request, the parser does not say.
        self._shared_bytes = self._piece_bytes if self._piece_is_shared else 0
        self._piece_is_shared = True  # for what begins behind this one
        self.scope["state"][LINE_KEY] = self
        if self._crowded:
            self.scope["state"][CROWDED_KEY] = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)
            return
        # A trailer, behind the chunks of a body. Nobody reads it, so it is not kept, but it is counted.
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self.config.max_head_bytes:
            self._end_parsing(HEAD_TOO_LONG)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._bound_closing()
        if self.transport.lingers:
            self.cycle.body.clear()  # what was read ahead
        if self._put_off is not None and self._answering is not None and self._answering.response_complete:
            self._write_refusal(self._put_off)
        if self.transport.mid_request:
            self._unset_keepalive_if_required()  # what is read now has a timer of its own
        if self.flow:
            self.loop.call_soon(self._read_on)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_headers_complete(self) -> None:
        # Counted exactly only when the pieces that it came in hold more, or are too long together and may.
        if self._shared_bytes or self._head_bytes + self._piece_bytes > self.config.max_head_bytes:
            self._bound_head()
        version = self.parser.get_http_version()
        fault = fault_of(self.headers, version)
        if fault is not None:
            self._end_parsing(fault)
        self.url = with_path(self.url)
        self.config.giving_way.discard(self.transport)
        if self.expect_100_continue and version == "1.0":
            self.expect_100_continue = False  # to be ignored there (RFC 9110, 10.1.1)
        if not self._asks_to_upgrade():
            super().on_headers_complete()
        self._in_head = False  # only now: a head with a URL that cannot be read makes no request

    def on_message_complete(self) -> None:
        self.transport.mid_request = False
        if not self._asks_to_upgrade():
            super().on_message_complete()
            # Answered before it was whole: nothing else will say that the next request is waited for.
            if self.cycle.response_complete and not self.transport.is_closing():
                self._bound_silence()

    def _bound_head(self) -> None:
        head_bytes = len(self.parser.get_method()) + len(self.url) + _AROUND_URL
        head_bytes += sum(len(name) + len(value) + _AROUND_HEADER for name, value in self.headers)
        if head_bytes > self.config.max_head_bytes:
            self._end_parsing(HEAD_TOO_LONG)
        self._head_bytes, self._shared_bytes = head_bytes, 0

    def _end_parsing(self, fault: bytes) -> NoReturn:
        self._fault = fault
        raise ValueError("the parser passes this on as an error of its own")

    def _asks_to_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _without_upgrade(self, rest: bytes) -> bytes | None:
        """The request again, without its wish to change to another protocol, which a server may ignore.

        The parser takes what follows such a head for the other protocol, and would lose the body. The HTTP
        client of Java asks for HTTP/2 in this way by default.
        """
        if not self._asks_to_upgrade():
            return None
        version = self.parser.get_http_version().encode()
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return b"".join([*head, b"\r\n", rest])

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _read_too_slow(self) -> None:
        self._read_timer = None
        if self.flow:
            self._bound_arrival()  # it is not parsed yet, which is no fault of the client
        elif self.transport.mid_request:
            self._refuse(b"408 Request Timeout")

    def _refuse(self, status: bytes) -> None:
        if not self._waits_for_others(status):
            self._write_refusal(status)

    def _waits_for_others(self, status: bytes) -> bool:
        """Put a refusal off until the requests before the refused one are answered, if there are any."""
        refused = self.cycle if self.transport.mid_request and not self._in_head else None
        if self._answering is None or self._answering.response_complete or self._answering is refused:
            return False
        self._put_off = status
        self._stop_read_timer()
        if refused is not None:
            self.pipeline.popleft()  # the newest, which would be begun in its turn
        return True

    def _write_refusal(self, status: bytes) -> None:
        if self.transport.is_closing():
            return
        # Written past the application, so only where it has written nothing of this request itself.
        if self._in_head or not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
        self.transport.close()
        self._end_requests()
        self._bound_closing()
