"""One request and its answer, as the layers and the routes know it together; and an error as its answer.

Lives in the `state` of the ASGI scope. Knows nothing of the model, and never holds what was sent.
"""

import re
import time
from dataclasses import dataclass, field

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.core import Timings
from service.errors import BadRequest, DeadlineExceeded, MethodNotAllowed, ServiceError, Unauthorized
from service.schemas import Problem
from service.tracing import Spans, TraceIds

_KEY = "exchange"
TIMEOUT_HEADER = b"x-request-timeout"
_SECONDS = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")


@dataclass(slots=True)
class Exchange:
    """What is known so far.

    Attributes:
        request_id: the caller's, when it is a sane one, else our own.
        route: the path of a route that exists, or `other`.
        started_s: when the headers were there, on the clock of `time.perf_counter`.
        crowded: the connection is one too many.
        status: of the answer; 0 until it is begun.
        code: of the error that was answered, if any.
        texts, tokens, timings, version: of a prediction.
        trace: where it stands in a trace: where its caller says so, or when tracing is on.
        spans: what is kept of it, when the trace is kept.
        headers: of the request, by lower-case name; the first of those that stand twice.
    """

    request_id: str
    method: str
    route: str
    crowded: bool = False
    started_s: float = field(default_factory=time.perf_counter)
    status: int = 0
    code: str | None = None
    texts: int | None = None
    tokens: int | None = None
    timings: Timings | None = None
    version: str | None = None
    trace: TraceIds | None = None
    spans: Spans | None = None
    headers: dict[bytes, bytes] = field(default_factory=dict)

    def duration_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started_s


def begin(scope: Scope, exchange: Exchange) -> None:
    """Keep the exchange in the scope of its request."""
    exchange.headers = dict(reversed(scope["headers"]))
    scope.setdefault("state", {})[_KEY] = exchange


def exchange_of(scope: Scope) -> Exchange:
    """The exchange of a request that has passed the outermost layer."""
    exchange: Exchange = scope["state"][_KEY]
    return exchange


def header_of(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this lower-case name, of a request that has passed the outermost layer."""
    found = exchange_of(scope).headers.get(name)
    return None if found is None else found.strip(b" \t")  # which are no part of it (RFC 9110, 5.5)


def time_left_s(scope: Scope, most_s: float) -> float:
    """Seconds until nobody waits for the answer any more, counted from the arrival of the request.

    `X-Request-Timeout` says how long the caller waits; `most_s` is the most, and holds when he says nothing.

    Raises:
        BadRequest: it is not a positive number, or stands twice.
        DeadlineExceeded: the time is over already.
    """
    exchange = exchange_of(scope)
    if TIMEOUT_HEADER in exchange.headers:
        values = [value.strip(b" \t") for key, value in scope["headers"] if key == TIMEOUT_HEADER]
        if len(values) > 1 or not _SECONDS.fullmatch(values[0]) or float(values[0]) == 0:
            raise BadRequest("X-Request-Timeout must be one positive number of seconds, such as 2.5.")
        most_s = min(float(values[0]), most_s)
    left_s = most_s - exchange.duration_s()
    if left_s <= 0:
        raise DeadlineExceeded
    return left_s


class Reply:
    """An answer that is ready to be sent, without the work that Starlette's `Response` does for each header.

    Args:
        body: all of it.
        headers: by lower-case name; the length is added.
    """

    __slots__ = ("body", "headers")

    def __init__(self, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.body = body
        self.headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        headers = [(b"content-length", b"%d" % len(self.body)), *self.headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def problem(error: ServiceError, exchange: Exchange, *, close: bool = False) -> Response:
    """The error as an answer, noted in the exchange; with `close`, the connection ends with it."""
    exchange.code = error.code
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = ", ".join(error.allow)
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    if close:
        headers["connection"] = "close"
    return Response(
        orjson.dumps(
            {
                "type": f"/docs#{error.code}",
                "title": error.title,
                "status": error.status,
                "detail": error.detail,
                "code": error.code,
                "request_id": exchange.request_id,
            }
        ),
        error.status,
        headers,
        Problem.media_type,
    )
