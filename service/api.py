"""The routes: from the wire to the predictor and back.

Errors are raised where they are known and answered elsewhere: no route has a `try`. Knows nothing of
batching, engines or sockets.
"""

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from service.client import ClientWatch, read_body
from service.core import Prediction
from service.errors import MethodNotAllowed, NotReady, ServiceError, UnsupportedMediaType
from service.exchange import TIMEOUT_HEADER, Reply, exchange_of, header_of, time_left_s
from service.life import Life
from service.loading import ModelDescription
from service.manifest import form
from service.schemas import read_request, refuse_too_many
from service.store import Listing
from service.wire import outcome_entry, server_timing

JSON = "application/json"
_IS_JSON = (b"content-type", JSON.encode())


class PlainRoute(APIRoute):
    """A route that FastAPI documents and that is called directly: request in, response out.

    FastAPI's own way to an endpoint solves dependencies and opens exit stacks, of which none is needed here,
    and costs more than all the rest of the way in and out. HEAD is answered wherever GET is. It is found by
    its path alone, which has no parameters, and refuses a wrong method itself.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        allowed = self.methods or set()
        if "GET" in allowed:
            allowed = {*allowed, "HEAD"}
        if scope["method"] not in allowed:
            raise MethodNotAllowed(tuple(sorted(allowed)))
        answer: Response | Reply = await self.endpoint(Request(scope, receive, send))
        await answer(scope, receive, send)


class Api:
    """The endpoints of one service."""

    def __init__(self, life: Life) -> None:
        self._life = life

    async def predict(self, request: Request) -> Reply:
        """Classify one text, or a list of texts.

        One shape whatever was sent: a single text gives a list of one prediction. In a list, a text that
        cannot be predicted has an `error` in its place and the others are answered; sent alone it is refused
        with 422.
        """
        check_content(request.scope)
        most_s = self._life.settings.request_timeout_s
        # Nonsense is refused before the body is read. For who says nothing the connection has its own bound.
        left_s = time_left_s(request.scope, most_s)
        said = header_of(request.scope, TIMEOUT_HEADER) is not None
        most = self._life.settings.max_texts
        body = await read_body(request.receive, within_s=left_s if said else None)
        asked = read_request(body, max_texts=most)
        self._life.refuse_when_stopping()
        texts = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
        exchange = exchange_of(request.scope)
        exchange.texts = len(texts)
        refuse_too_many(len(texts), most)
        with ClientWatch(request.scope):
            answer = await self._life.predictor.predict(
                texts,
                truncate=asked.truncate,
                timeout_s=time_left_s(request.scope, most_s),
                spans=exchange.spans,
            )
        first = answer.outcomes[0]
        if isinstance(asked.inputs, str) and isinstance(first, ServiceError):
            raise first
        model = self._model()
        exchange.tokens = sum(one.tokens for one in answer.outcomes if isinstance(one, Prediction))
        exchange.timings = answer.timings
        exchange.version = model.version
        found = {
            "model": model.name,
            "version": model.version,
            "predictions": [outcome_entry(model.labels, one, asked) for one in answer.outcomes],
        }
        timing = (b"server-timing", server_timing(answer.timings).encode())
        return Reply(orjson.dumps(found), [_IS_JSON, timing])

    async def live(self, request: Request) -> Response:  # noqa: ARG002 - every endpoint takes the request
        """200 as long as the event loop turns; says nothing of the model or the queue."""
        return Response(b'{"status":"live"}', media_type=JSON)

    async def ready(self, request: Request) -> Response:  # noqa: ARG002
        """200 when the model is warm, no batch is overdue and nothing drains; else 503 with the reason."""
        return self._health({})

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        """Readiness, with what is served."""
        model = self._life.predictor.description
        if model is None:
            return self._health({})
        return self._health(
            {
                "model": model.name,
                "version": model.version,
                "engine": model.engine,
                "precision": model.precision,
                "device": model.device,
            }
        )

    def _health(self, facts: dict[str, str]) -> Response:
        reason = self._life.unready_reason()
        if reason is None:
            return Response(orjson.dumps({"status": "ready", **facts}), media_type=JSON)
        return Response(orjson.dumps({"status": "unready", "reason": reason, **facts}), 503, media_type=JSON)

    async def metrics(self, request: Request) -> Response:
        """The metrics for Prometheus; OpenMetrics when the Accept header asks for it."""
        body, content_type = self._life.metrics.render(request.headers.get("accept"))
        return Response(body, headers={"content-type": content_type})

    async def models(self, request: Request) -> Response:  # noqa: ARG002
        """The versions in the model store, and which of them answers."""
        listings = await self._life.store_list.read()
        served = self._life.predictor.description
        return Response(
            orjson.dumps({"models": [describe(one, served) for one in listings]}), media_type=JSON
        )

    def _model(self) -> ModelDescription:
        model = self._life.predictor.description
        if model is None:
            raise NotReady
        return model


def check_content(scope: Scope) -> None:
    """Raise `UnsupportedMediaType` unless the body says that it is plain JSON in UTF-8."""
    stated = header_of(scope, b"content-type")
    if stated != _IS_JSON[1]:
        _check_type((stated or b"").decode("latin-1"))
    encoding = header_of(scope, b"content-encoding")
    if encoding is not None and encoding.lower() != b"identity":
        raise UnsupportedMediaType("The body must not be compressed.")


def _check_type(stated: str) -> None:
    kind, _, parameters = stated.partition(";")
    if kind.strip().lower() != JSON:
        raise UnsupportedMediaType
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset" and value.strip().strip('"').lower() not in {"utf-8", "utf8"}:
            raise UnsupportedMediaType("The charset must be utf-8.")


def describe(listing: Listing, served: ModelDescription | None) -> dict[str, object]:
    """One version of the store as `ModelVersion`."""
    version = str(listing.version)
    entry: dict[str, object] = {
        "name": listing.name,
        "version": version,
        "served": served is not None and (served.name, served.version) == (listing.name, version),
    }
    if listing.manifest is not None:
        entry["labels"] = listing.manifest.labels
        entry["max_tokens"] = listing.manifest.max_tokens
        entry["forms"] = [form(model) for model in listing.manifest.models]
    if listing.problem is not None:
        entry["problem"] = listing.problem
    return entry
