"""A collector of traces for tests: it takes OTLP over HTTP on a free port and keeps the spans."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.server import SAFETY_S

REDIRECT = 300


@dataclass
class Told:
    """One span, with its attributes as a dictionary and its ids in hexadecimal digits."""

    span: Span
    attributes: dict[str, str | int]
    links: list[tuple[str, str]]

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def trace_id(self) -> str:
        return self.span.trace_id.hex()

    @property
    def span_id(self) -> str:
        return self.span.span_id.hex()

    @property
    def parent_id(self) -> str:
        return self.span.parent_span_id.hex()

    @property
    def failed(self) -> bool:
        return self.span.status.code == Status.STATUS_CODE_ERROR

    @property
    def times_ns(self) -> tuple[int, int]:
        return self.span.start_time_unix_nano, self.span.end_time_unix_nano


@dataclass
class Collector:
    """What has come so far.

    Attributes:
        status, reason: what the next requests are answered with; None for the usual reason.
        asked: how many requests have come.
        gate: each request waits for it before it is answered; set at first.
        resource: what the sender says of itself.
        paths, headers: of the requests.
    """

    url: str
    status: int = 200
    reason: str | None = None
    asked: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    spans: list[Told] = field(default_factory=list)
    resource: dict[str, str | int] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)
    headers: list[dict[str, str]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        """One request; gives the status to answer."""
        with self._changed:
            self.asked += 1
            self.paths.add(path)
            self.headers.append(headers)
            self._changed.notify_all()
        assert self.gate.wait(SAFETY_S)
        with self._changed:
            if self.status < REDIRECT:
                self._read(ExportTraceServiceRequest.FromString(body))
            self._changed.notify_all()
            return self.status

    def _read(self, sent: ExportTraceServiceRequest) -> None:
        for of_resource in sent.resource_spans:
            self.resource = dict(map(_pair, of_resource.resource.attributes))
            for scope in of_resource.scope_spans:
                for span in scope.spans:
                    links = [(link.trace_id.hex(), link.span_id.hex()) for link in span.links]
                    self.spans.append(Told(span, dict(map(_pair, span.attributes)), links))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until what has come fulfils it."""
        with self._changed:
            assert self._changed.wait_for(condition, SAFETY_S), (self.asked, [one.name for one in self.spans])

    def named(self, name: str) -> list[Told]:
        """The spans of this name."""
        return [one for one in self.spans if one.name == name]


def _pair(one: KeyValue) -> tuple[str, str | int]:
    return one.key, one.value.string_value or one.value.int_value


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens."""
    made: list[Collector] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status = made[0].take(self.path, dict(self.headers.items()), body)
            self.send_response(status, made[0].reason)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the library's
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    collector.gate.set()
    made.append(collector)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield collector
    finally:
        collector.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()
