"""The layers round the routes: exchanges, connections, errors (and `body_limit`, `access`).

Each does one thing and wraps no more than it needs; their order stands in `app`. They are plain ASGI:
Starlette's `BaseHTTPMiddleware` hides from the routes that a client went away. Knows nothing of texts or of
the model.
"""

import logging
import random
import re
import time
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.catalogue import OTHER_ROUTE, ROUTE_STATUSES
from service.errors import Crowded, InternalError, ServiceError
from service.exchange import Exchange, begin, exchange_of, header_of, problem
from service.logs import log_event
from service.metrics import Metrics
from service.tracing import TRACEPARENT, Spans, Tracer, caller_of

CROWDED_KEY = "crowded"
"""In the `state` of the scope when the server has more connections than it should."""

_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_NOSNIFF = (b"x-content-type-options", b"nosniff")
_QUIET_ROUTES = ("/health", "/health/live", "/health/ready", "/metrics")

logger = logging.getLogger(__name__)


class Exchanges:
    """Opens the exchange; when it is over, counts it, writes its line in the access log and ends its spans.

    Every answer gets its `X-Request-ID` and `nosniff` here. One layer, since three would cost more than all
    that they do.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics, tracer: Tracer | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        exchange = Exchange(
            request_id="",
            method=scope["method"],
            route=path if path in ROUTE_STATUSES else OTHER_ROUTE,
            crowded=scope.get("state", {}).get(CROWDED_KEY, False),
        )
        begin(scope, exchange)
        given = header_of(scope, b"x-request-id")
        if given is not None and _SANE_ID.fullmatch(given):
            exchange.request_id = given.decode()
        else:
            exchange.request_id = f"{random.getrandbits(128):032x}"  # to be unique; it is no secret
        if self._tracer is not None or TRACEPARENT in exchange.headers:
            self._join_trace(exchange, scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] += [(b"x-request-id", exchange.request_id.encode()), _NOSNIFF]
            await send(message)

        self._metrics.request_started(exchange.route)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._count(exchange)
            _log(exchange)
            if self._tracer is not None and exchange.spans is not None:
                _end(exchange.spans, exchange)
                self._tracer.put(exchange.spans)

    def _join_trace(self, exchange: Exchange, scope: Scope) -> None:
        """Take the caller's trace, or begin one. Nothing is kept of probes and scrapes."""
        trace = caller_of([value for key, value in scope["headers"] if key == TRACEPARENT])
        if self._tracer is not None and exchange.route not in _QUIET_ROUTES:
            trace = self._tracer.begin(trace)
            if trace.sampled:
                exchange.spans = Spans(trace, exchange.started_s)
        exchange.trace = trace

    def _count(self, exchange: Exchange) -> None:
        # No status: the server stopped the request before it was answered.
        status = exchange.status or InternalError.status
        trace = exchange.trace
        self._metrics.request_finished(
            route=exchange.route,
            status=status,
            duration_s=exchange.duration_s(),
            trace_id=trace.trace_id if trace is not None and trace.sampled else None,
        )
        if exchange.code is not None:
            self._metrics.refused(exchange.code)


def _log(exchange: Exchange) -> None:
    """One line; probes and scrapes that went well are told at debug level."""
    level = logging.INFO
    if exchange.status in {0, 500}:
        level = logging.ERROR
    elif exchange.status == 200 and exchange.route in _QUIET_ROUTES:
        level = logging.DEBUG
    if not logger.isEnabledFor(level):
        return
    timings = exchange.timings
    stages: dict[str, Any] = {}
    if timings is not None:
        stages = {
            "tokenize_ms": _ms(timings.tokenize_s),
            "queue_ms": _ms(timings.queue_s),
            "infer_ms": _ms(timings.infer_s),
        }
    if exchange.trace is not None:
        stages["trace_id"] = exchange.trace.trace_id
        stages["span_id"] = exchange.trace.span_id
        stages["parent_span_id"] = exchange.trace.parent_id
    log_event(
        logger,
        level,
        "request",
        request_id=exchange.request_id,
        method=exchange.method,
        route=exchange.route,
        status=exchange.status,
        code=exchange.code,
        duration_ms=_ms(exchange.duration_s()),
        texts=exchange.texts,
        tokens=exchange.tokens,
        **stages,
        version=exchange.version,
    )


def _end(spans: Spans, exchange: Exchange) -> None:
    """Names and attributes are those of OpenTelemetry's conventions for HTTP servers, where it has one.

    An error is what is our fault: an answer of 500 or more, or none at all.
    """
    route = None if exchange.route == OTHER_ROUTE else exchange.route
    failed = exchange.status == 0 or exchange.status >= 500
    error = exchange.code or InternalError.code
    known = {
        "http.request.method": exchange.method,
        "http.route": route,
        "http.response.status_code": exchange.status or None,
        "error.type": error if failed else None,
        "valence.code": exchange.code,
        "valence.request_id": exchange.request_id,
        "valence.texts": exchange.texts,
        "valence.tokens": exchange.tokens,
        "valence.model.version": exchange.version,
    }
    spans.finish(
        time.perf_counter(),
        name=exchange.method if route is None else f"{exchange.method} {route}",
        attributes={name: value for name, value in known.items() if value is not None},
        error=error if failed else None,
        cut=error,
    )


class Errors:
    """The one place where an error becomes an answer.

    What is no `ServiceError` is a defect of ours: a 500, and a log line that tells where, not what.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer: Response | None = None
        try:
            await self._app(scope, receive, send)
        except ServiceError as error:
            answer = problem(error, exchange_of(scope))
            error.let_go()
        except Exception as error:
            exchange = exchange_of(scope)
            log_event(logger, logging.ERROR, "defect", request_id=exchange.request_id, exc_info=error)
            if exchange.status:
                raise  # the answer has begun; only the end of the connection can tell that it is not whole
            answer = problem(InternalError(), exchange)
        if answer is not None:
            await answer(scope, receive, send)


class Connections:
    """Ends connections after their answer while the service drains or has too many of them.

    While it drains, its clients come back by a new connection, which a load balancer leads elsewhere. On a
    connection too many only health and metrics are answered.
    """

    def __init__(self, app: ASGIApp, *, is_draining: Callable[[], bool]) -> None:
        self._app = app
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = exchange_of(scope)
        if exchange.crowded and exchange.route not in _QUIET_ROUTES:
            await problem(Crowded(), exchange, close=True)(scope, receive, send)
        elif exchange.crowded or self._is_draining():
            await self._app(scope, receive, _closing(send))
        else:
            await self._app(scope, receive, send)


def _closing(send: Send) -> Send:
    async def send_and_close(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"].append((b"connection", b"close"))
        await send(message)

    return send_and_close


def _ms(seconds: float) -> float:
    return int(seconds * 1e6) / 1000  # `round` takes five times as long
