"""Sends the spans of requests to a collector over OTLP/HTTP, from a thread of its own.

The loop hands over plain records; what OpenTelemetry wants is made of them in that thread, where nobody waits
for it. The library's own batching would build its spans on the loop, wait up to 30 s at the end whatever the
stop timeout says, and log each attempt. Knows nothing of requests, texts or models.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import requests
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from service.logs import log_event
from service.span_maker import SpanMaker
from service.tracing import Spans

_PATH = "/v1/traces"
_PERIOD_S = 1.0  # how old what is sent may get
_MOST_WAITING = 2048  # requests; some MB at most
_AT_A_TIME = 32  # requests; a longer turn would hold the interpreter, and so the loop
_BREATH_S = 0.0001
_QUIET_S = 60.0
_REASON_CHARS = 200  # a collector may answer with a novel
_TOO_MUCH = "more than can be sent"

logger = logging.getLogger(__name__)


def open_sender(
    endpoint: str, version: str, *, most_waiting: int = _MOST_WAITING, quiet_s: float = _QUIET_S
) -> "OtlpSender":
    """A sender to the collector at this base URL; see `OtlpSender` for the rest.

    Timeout, headers, compression and certificates are those of the standard OTEL_EXPORTER_OTLP_* variables,
    which the library reads; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES add to what names the service.
    """
    # It would log a malformed OTEL_EXPORTER_OTLP_HEADERS whole, with the password in it.
    logging.getLogger("opentelemetry.util.re").setLevel(logging.CRITICAL)
    session = requests.Session()
    session.hooks["response"].append(_refuse_redirect)
    exporter = trace_exporter.OTLPSpanExporter(endpoint.rstrip("/") + _PATH, session=session)
    ours = Resource({"service.name": "valence", "service.version": version})
    resource = Resource.create().merge(ours).merge(OTELResourceDetector().detect())
    return OtlpSender(exporter, SpanMaker(resource, version), most_waiting=most_waiting, quiet_s=quiet_s)


def _refuse_redirect(response: requests.Response, **_: object) -> None:
    """The library follows no redirect and takes it for a success, which would lose every trace in silence."""
    if 300 <= response.status_code < 400:
        response.close()
        raise requests.RequestException(f"answered {response.status_code}")


class OtlpSender:
    """A thread that sends what is put, a second later at the latest.

    `put` belongs to one thread, that of the loop. A collector that is slow or dead costs nobody anything:
    what waits is bounded, and the rest is counted and lost. The log says once that it began and once that it
    is over, and no more often than `quiet_s`.
    """

    def __init__(
        self,
        exporter: trace_exporter.OTLPSpanExporter,
        maker: SpanMaker,
        *,
        most_waiting: int,
        quiet_s: float,
    ) -> None:
        self._exporter = exporter
        self._maker = maker
        self._most_waiting = most_waiting
        self._waiting: deque[Spans] = deque()
        self._refused = 0  # counted by the loop alone
        self._unsent = 0  # counted by the thread alone, and what it is sending
        self._sending = 0
        self._some = threading.Event()
        self._enough = threading.Event()
        self._closing = False
        self._reasons = _Reasons(self._heard)
        self._given_up = False
        self._trouble = _Trouble(quiet_s)
        # A daemon: a collector that does not answer must not keep the process alive.
        self._thread = threading.Thread(target=self._serve, name="otlp", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        library = logging.getLogger(trace_exporter.__name__)
        library.addFilter(self._reasons)
        library.setLevel(logging.WARNING)  # heard here, whatever is written
        self._thread.start()

    def put(self, spans: Spans) -> None:
        """Send these with others; lost when too many wait, or after `close`."""
        if self._closing or len(self._waiting) >= self._most_waiting:
            self._refused += 1
            if not self._closing:
                self._trouble.too_much(self._refused + self._unsent)
            return
        self._waiting.append(spans)
        waiting = len(self._waiting)  # counted only now: the thread takes them meanwhile, and then sleeps
        if waiting == 1:
            self._some.set()
        elif waiting == _AT_A_TIME + 1:
            self._enough.set()

    def close(self, timeout_s: float) -> None:
        """Send what waits, and wait for it so many seconds at most.

        At the end nothing is tried again: a collector that does not take it now holds up no stop.
        """
        self._closing = True
        self._some.set()
        self._enough.set()
        if self._trouble.failing or self._reasons.heard:
            self._give_up()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._give_up()
        if not self._thread.is_alive():
            library = logging.getLogger(trace_exporter.__name__)
            library.removeFilter(self._reasons)
            library.setLevel(logging.NOTSET)
        lost = self._refused + self._unsent + self._sending + len(self._waiting)
        if lost > self._trouble.told:
            log_event(logger, logging.WARNING, "traces lost", requests=lost)

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._some.wait()  # idle costs nothing
                self._enough.wait(_PERIOD_S)
                self._some.clear()
                self._enough.clear()
                self._send_all()
        except Exception as error:  # noqa: BLE001 - a death is announced
            self._closing = True
            log_event(logger, logging.ERROR, "traces are not sent any more", exc_info=error)

    def _heard(self) -> None:
        """The library has said that something failed, and is about to wait and to try again."""
        if self._closing:
            self._give_up()

    def _give_up(self) -> None:
        if not self._given_up:
            self._given_up = True
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _send_all(self) -> None:
        while self._waiting and not (self._closing and self._trouble.failing):
            self._sending = min(len(self._waiting), _AT_A_TIME)
            spans: list[ReadableSpan] = []
            for _ in range(self._sending):
                spans += self._maker.of(self._waiting.popleft())
                time.sleep(_BREATH_S)  # else the loop would wait for its turn 5 ms at a time
            refused = self._refused
            if self._exporter.export(spans) is SpanExportResult.SUCCESS:
                self._trouble.sent(refused + self._unsent)
            else:
                self._unsent += self._sending
                reason = next(iter(self._reasons.heard), "no reason given")
                self._trouble.failed(refused + self._unsent, reason[:_REASON_CHARS])
            self._sending = 0
            self._reasons.heard.clear()


class _Trouble:
    """Whether requests are lost, and what the log was told of it. `lost` counts them all, from the start.

    Attributes:
        failing: whether the last attempt failed.
        told: how many of the lost ones the log knows of.
    """

    def __init__(self, quiet_s: float) -> None:
        self.failing = False
        self.told = 0
        self._lost = 0
        self._told_trouble = False
        self._quiet_s = quiet_s
        self._quiet_until_s = 0.0
        self._deciding = threading.Lock()  # the loop tells, too

    def failed(self, lost: int, reason: str) -> None:
        """An attempt failed."""
        self.failing = True
        self._lost = lost
        self._tell(lost, reason)

    def sent(self, lost: int) -> None:
        """An attempt went well; more may have come meanwhile than could wait."""
        self.failing = False
        reason = _TOO_MUCH if lost > self._lost else None
        self._lost = lost
        self._tell(lost, reason)

    def too_much(self, lost: int) -> None:
        """One more than could wait, perhaps while an attempt takes for ever."""
        if not self._told_trouble:
            self._tell(lost, _TOO_MUCH)

    def _tell(self, lost: int, reason: str | None) -> None:
        with self._deciding:
            now = time.monotonic()
            if (reason is not None) == self._told_trouble or now < self._quiet_until_s:
                return
            self._told_trouble, self.told, self._quiet_until_s = reason is not None, lost, now + self._quiet_s
        if reason is not None:
            log_event(logger, logging.WARNING, "traces are not sent", reason=reason, lost_requests=lost)
        else:
            log_event(logger, logging.INFO, "traces are sent again", lost_requests=lost)


class _Reasons(logging.Filter):
    """Keeps to itself what the library says of each attempt, which is the only place where it says why."""

    def __init__(self, heard: Callable[[], None]) -> None:
        super().__init__()
        self.heard: list[str] = []
        self._tell = heard

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        invalid = any(isinstance(one, requests.exceptions.InvalidHeader) for one in arguments)
        # That error quotes the value, which may be a password.
        self.heard.append("OTEL_EXPORTER_OTLP_HEADERS is invalid" if invalid else record.getMessage())
        self._tell()
        return False
