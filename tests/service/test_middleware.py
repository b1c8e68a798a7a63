"""The layers one by one, each round a small application that does what the test says."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.body_limit import BodyLimit
from service.core import Timings
from service.errors import ClientGone, QueueFull, TextEmpty, Unauthorized
from service.exchange import Exchange, begin, exchange_of
from service.metrics import Metrics
from service.middleware import (
    CROWDED_KEY,
    Connections,
    Errors,
    Exchanges,
)

MARKER = "xyzzy"
Headers = Sequence[tuple[bytes, bytes]]
Behaviour = Callable[[Scope, Receive, Send], Awaitable[None]]


class Call:
    """One call of an application, and everything that it sent.

    `receive` gives the messages in turn, then waits for ever, as a client does that stays.
    """

    def __init__(
        self,
        path: str = "/predict",
        headers: Headers = (),
        messages: Sequence[Message] = (),
        *,
        crowded: bool = False,
    ) -> None:
        self.scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": list(headers),
            "state": {CROWDED_KEY: True} if crowded else {},
        }
        self.waiting = list(messages)
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if not self.waiting:
            await asyncio.Event().wait()
        return self.waiting.pop(0)

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def of(self, app: ASGIApp) -> "Call":
        await app(self.scope, self.receive, self.send)
        return self

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])


async def fine(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"fine"})


def raising(error: BaseException) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    return app


async def reading(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the whole body and says how long it was."""
    size = 0
    more = True
    while more:
        message = await receive()
        size += len(message["body"])
        more = message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


def outermost(app: ASGIApp, metrics: Metrics | None = None) -> Exchanges:
    return Exchanges(app, metrics=metrics or Metrics())


def begun(call: Call) -> Exchange:
    """Do what the outermost layer does, for tests of an inner one."""
    exchange = Exchange(request_id="id", method="POST", route=call.scope["path"])
    begin(call.scope, exchange)
    return exchange


async def test_what_is_not_http_passes() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    layers = (
        outermost(app),
        Errors(app),
        Connections(app, is_draining=lambda: True),
        BodyLimit(app, max_body_bytes=1),
    )
    for one in layers:
        await one({"type": "lifespan"}, Call().receive, Call().send)
    assert seen == ["lifespan"] * len(layers)


# --- request id


@pytest.mark.parametrize("given", [b"a", b"Az09._-", b"x" * 64])
async def test_a_sane_request_id_is_kept(given: bytes) -> None:
    call = await Call(headers=[(b"x-request-id", given)]).of(outermost(fine))
    assert call.headers[b"x-request-id"] == given
    assert exchange_of(call.scope).request_id == given.decode()


@pytest.mark.parametrize("given", [b"", b"x" * 65, b"a b", b"a\x00", b'"', b"\xe9", b"a\nb", b"a\n", b"<b>"])
async def test_any_other_is_replaced(given: bytes) -> None:
    call = await Call(headers=[(b"x-request-id", given)]).of(outermost(fine))
    made = call.headers[b"x-request-id"]
    assert made != given
    assert len(made) == 32
    assert made.isalnum()


async def test_each_request_gets_an_id_of_its_own() -> None:
    ids = {(await Call().of(outermost(fine))).headers[b"x-request-id"] for _ in range(100)}
    assert len(ids) == 100


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/predict", "/predict"),
        ("/health/live", "/health/live"),
        ("/predict/", "other"),
        ("/" + MARKER, "other"),
    ],
)
async def test_a_path_that_is_no_route_is_other(path: str, route: str) -> None:
    call = await Call(path).of(outermost(fine))
    assert exchange_of(call.scope).route == route


# --- metrics


async def test_in_flight_goes_back_whatever_happens() -> None:
    metrics = Metrics()

    def in_flight() -> float | None:
        return metrics.registry.get_sample_value("valence_http_requests_in_flight", {"route": "/predict"})

    def counted(status: int) -> float | None:
        labels = {"route": "/predict", "status": str(status)}
        return metrics.registry.get_sample_value("valence_http_requests_total", labels)

    async def watching(scope: Scope, receive: Receive, send: Send) -> None:
        assert in_flight() == 1
        await fine(scope, receive, send)

    await Call().of(outermost(watching, metrics))
    assert (in_flight(), counted(200)) == (0, 1)

    await Call().of(outermost(Errors(raising(ClientGone())), metrics))
    assert (in_flight(), counted(499)) == (0, 1)

    entered = asyncio.Event()

    async def hanging(scope: Scope, receive: Receive, send: Send) -> None:
        entered.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(Call().of(outermost(hanging, metrics)))
    await entered.wait()
    assert in_flight() == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (in_flight(), counted(500)) == (0, 1)


async def test_an_error_is_counted_by_its_code() -> None:
    metrics = Metrics()
    await Call().of(outermost(Errors(raising(QueueFull())), metrics))
    await Call().of(outermost(Errors(fine), metrics))
    counted = {
        code: metrics.registry.get_sample_value("valence_refusals_total", {"reason": code})
        for code in ("queue_full", "internal_error", "not_found")
    }
    assert counted == {"queue_full": 1, "internal_error": 0, "not_found": 0}


# --- log


def access_lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, dict[str, Any]]]:
    return [(r.levelno, r.__dict__["fields"]) for r in caplog.records if r.getMessage() == "request"]


async def test_one_line_a_request(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        exchange.texts, exchange.tokens, exchange.version = 2, 9, "3"
        exchange.timings = Timings(0.001, 0.0025, 0.004)
        await fine(scope, receive, send)

    caplog.set_level(logging.INFO)
    await Call(headers=[(b"x-request-id", b"mine")]).of(outermost(app))
    [(level, fields)] = access_lines(caplog)
    assert level == logging.INFO
    assert fields.pop("duration_ms") > 0
    assert {name: value for name, value in fields.items() if value is not None} == {
        "request_id": "mine",
        "method": "POST",
        "route": "/predict",
        "status": 200,
        "texts": 2,
        "tokens": 9,
        "tokenize_ms": 1.0,
        "queue_ms": 2.5,
        "infer_ms": 4.0,
        "version": "3",
    }


async def test_probes_that_went_well_are_told_at_debug_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for path in ("/health/ready", "/metrics", "/models"):
        await Call(path).of(outermost(fine))
    await Call("/health/ready").of(outermost(Errors(raising(QueueFull()))))
    assert [(level, fields["route"]) for level, fields in access_lines(caplog)] == [
        (logging.DEBUG, "/health/ready"),
        (logging.DEBUG, "/metrics"),
        (logging.INFO, "/models"),
        (logging.INFO, "/health/ready"),
    ]


async def test_the_log_never_holds_the_path_of_no_route(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await Call("/" + MARKER).of(outermost(fine))
    assert MARKER not in str([record.__dict__ for record in caplog.records])


# --- errors


async def test_a_service_error_is_a_problem() -> None:
    call = await Call(headers=[(b"x-request-id", b"mine")]).of(
        outermost(Errors(raising(QueueFull(retry_after_s=7))))
    )
    assert call.status == 503
    assert call.headers[b"content-type"] == b"application/problem+json"
    assert call.headers[b"retry-after"] == b"7"
    assert json.loads(call.body) == {
        "type": "/docs#queue_full",
        "title": "Queue full",
        "status": 503,
        "detail": "More waits than can be answered in time.",
        "code": "queue_full",
        "request_id": "mine",
    }


async def test_no_retry_after_where_waiting_does_not_help() -> None:
    call = await Call().of(outermost(Errors(raising(TextEmpty()))))
    assert call.status == 422
    assert b"retry-after" not in call.headers


@pytest.mark.parametrize("error", [ValueError(MARKER), RecursionError(MARKER), MemoryError(MARKER)])
async def test_a_defect_is_a_500_that_tells_nothing(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    call = await Call().of(outermost(Errors(raising(error))))
    assert call.status == 500
    assert json.loads(call.body)["code"] == "internal_error"
    assert MARKER.encode() not in call.body
    defect, request = caplog.records
    assert defect.getMessage() == "defect"
    assert defect.exc_info is not None
    assert defect.exc_info[1] is error
    assert request.levelno == logging.ERROR
    assert defect.__dict__["fields"]["request_id"] == request.__dict__["fields"]["request_id"]


async def test_a_defect_after_the_answer_has_begun_ends_the_connection() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError(MARKER)

    call = Call()
    with pytest.raises(ValueError, match=MARKER):
        await call.of(outermost(Errors(app)))
    assert [message["type"] for message in call.sent] == ["http.response.start"]


# --- connections


async def test_answers_while_draining_end_their_connection() -> None:
    draining = False
    app = outermost(Connections(fine, is_draining=lambda: draining))
    assert b"connection" not in (await Call().of(app)).headers
    draining = True
    call = await Call().of(app)
    assert (call.status, call.headers[b"connection"]) == (200, b"close")


async def test_a_connection_too_many_gets_health_and_nothing_else() -> None:
    app = outermost(Connections(fine, is_draining=lambda: False))
    for path, status in (("/health/live", 200), ("/metrics", 200), ("/predict", 503), ("/nothing", 503)):
        call = await Call(path, crowded=True).of(app)
        assert (call.status, call.headers[b"connection"]) == (status, b"close")
    assert json.loads(call.body)["code"] == "crowded"
    assert call.headers[b"retry-after"] == b"1"


# --- body limit


def piece(size: int, *, more: bool) -> Message:
    return {"type": "http.request", "body": b"x" * size, "more_body": more}


def limited(app: ASGIApp) -> ASGIApp:
    return outermost(BodyLimit(Errors(app), max_body_bytes=10))


async def test_a_body_within_the_limit_passes() -> None:
    declared = await Call(headers=[(b"content-length", b"10")], messages=[piece(10, more=False)]).of(
        limited(reading)
    )
    assert (declared.status, declared.body) == (200, b"10")
    chunked = Call(
        headers=[(b"transfer-encoding", b"chunked")],
        messages=[piece(5, more=True), piece(5, more=True), piece(0, more=False)],
    )
    assert (await chunked.of(limited(reading))).body == b"10"
    assert b"connection" not in chunked.headers
    assert (await Call().of(limited(fine))).body == b"fine"


async def test_r19_a_declared_body_over_the_limit_is_refused_before_it_is_read() -> None:
    async def asking(_scope: Scope, receive: Receive, _send: Send) -> None:
        try:
            await receive()
        finally:
            left.extend(call.waiting)

    left: list[Message] = []
    call = Call(headers=[(b"content-length", b"11")], messages=[piece(11, more=False)])
    await call.of(limited(asking))
    assert left == [piece(11, more=False)], "it was not taken from the server"
    assert call.status == 413
    assert call.headers[b"connection"] == b"close"
    assert json.loads(call.body)["detail"] == "The body is over the limit of 10 bytes."


async def test_r19_a_chunked_body_is_refused_as_soon_as_it_is_over_the_limit() -> None:
    call = Call(
        headers=[(b"transfer-encoding", b"chunked")],
        messages=[piece(10, more=True), piece(1, more=True), piece(5, more=True), piece(0, more=False)],
    )
    await call.of(limited(reading))
    assert call.status == 413
    assert call.headers[b"connection"] == b"close"
    assert call.waiting == [piece(5, more=True), piece(0, more=False)]


async def test_who_has_another_answer_gets_it_and_his_connection_ends() -> None:
    call = Call(headers=[(b"content-length", b"11")], messages=[piece(11, more=False)])
    await call.of(limited(raising(Unauthorized())))
    assert (call.status, call.headers[b"connection"]) == (401, b"close")


async def test_an_answer_before_the_end_of_a_chunked_body_ends_the_connection() -> None:
    call = Call(
        headers=[(b"transfer-encoding", b"chunked")], messages=[piece(5, more=True), piece(0, more=False)]
    )
    await call.of(limited(fine))
    assert (call.status, call.body) == (200, b"fine")
    assert call.headers[b"connection"] == b"close"
