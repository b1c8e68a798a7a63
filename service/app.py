"""`create_app(settings)`: all the wiring of one service, and the order of its layers as data.

Knows nothing of sockets, signals or the environment.
"""

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from service import engines
from service.access import Access, Keys, open_keys, open_paths
from service.api import JSON, Api, PlainRoute
from service.body_limit import BodyLimit
from service.errors import DeadlineExceeded, NotFound
from service.life import Life
from service.loading import OpenEngine
from service.metrics import Metrics, service_version
from service.middleware import Connections, Errors, Exchanges
from service.openapi import (
    OPENMETRICS,
    PREDICT_ANSWER,
    PREDICT_ERRORS,
    PREDICT_HEADERS,
    SMALL_ERRORS,
    declare_keys,
    document,
    error_responses,
    page,
    page_headers,
    request_body,
)
from service.predictor import Predictor
from service.quota import memory_limit, throttled_folder, throttling
from service.schemas import Health, ModelList, PredictResponse
from service.settings import Settings
from service.tracing import open_tracer


def create_app(settings: Settings, *, open_engine: OpenEngine = engines.open_engine) -> FastAPI:
    """The application of one service; `app.state.life` is its life.

    Args:
        settings: all of them; nothing else is read.
        open_engine: how the predictor gets its engine; a test may bring its own.

    Raises:
        StartupError: API keys are wanted and cannot be read, or traces and OpenTelemetry is not there.
    """
    keys = open_keys(settings)
    metrics = Metrics(deadline_s=settings.request_timeout_s)
    metrics.watch_limits(functools.partial(throttling, throttled_folder()), memory_limit_bytes=memory_limit())
    tracer = open_tracer(settings, version=service_version())
    predictor = Predictor(settings, metrics, open_engine=open_engine, traced=tracer is not None)
    life = Life(settings, metrics, predictor, tracer)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with life.run():
            yield

    app = _Application(
        openapi_url=None,  # with it go FastAPI's own pages
        redirect_slashes=False,  # a POST that is redirected is sent twice; a wrong path is told so
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        middleware=layers(life, keys),
        lifespan=lifespan,
    )
    app.state.life = life
    app.router.route_class = PlainRoute
    add_routes(app, Api(life))
    add_documentation(app, None if keys is None else open_paths(settings))
    return app


class _Application(FastAPI):
    """FastAPI without what it does for each request: its own layers, and the search for a route.

    The layers answer errors in another form than ours, and look for telemetry. The search tries each route in
    turn, and all of ours are found by their path. Together they cost a third of a request.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        await self.middleware_stack(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        app: ASGIApp = _Routes(self.router)
        for layer, arguments, options in reversed(self.user_middleware):
            app = layer(app, *arguments, **options)
        return app


class _Routes:
    """The routes by their paths. The lifespan is left to the router."""

    def __init__(self, router: APIRouter) -> None:
        self._router = router
        self._routes = {route.path: route for route in router.routes if isinstance(route, PlainRoute)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        route = self._routes.get(scope["path"])
        if route is None:
            raise NotFound
        await route.handle(scope, receive, send)


def layers(life: Life, keys: Keys | None = None) -> list[Middleware]:
    """The layers round the routes, the outermost first; without keys, none asks for one."""
    ask = Middleware(Access, keys=keys, paths=open_paths(life.settings)) if keys is not None else None
    return [
        Middleware(Exchanges, metrics=life.metrics, tracer=life.tracer),
        Middleware(Connections, is_draining=life.is_draining),
        Middleware(BodyLimit, max_body_bytes=life.settings.max_body_bytes),
        Middleware(Errors),
        *([ask] if ask is not None else []),
    ]


def life_of(app: FastAPI) -> Life:
    """The life of an application made by `create_app`."""
    life: Life = app.state.life
    return life


def add_routes(app: FastAPI, api: Api) -> None:
    """Every route but the documentation's. The first is tried first, so `/predict` comes first."""
    app.add_api_route(
        "/predict",
        api.predict,
        methods=["POST"],
        response_model=PredictResponse,
        responses={200: _example(PREDICT_ANSWER), **error_responses(PREDICT_ERRORS)},
        openapi_extra=request_body(),
    )
    unready: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Unready"}}
    app.add_api_route("/health/live", api.live, response_model=Health, response_model_exclude_none=True)
    app.add_api_route("/health/ready", api.ready, response_model=Health, responses=unready)
    app.add_api_route("/health", api.health, response_model=Health, responses=unready)
    app.add_api_route("/metrics", api.metrics, response_class=PlainTextResponse, responses={200: OPENMETRICS})
    app.add_api_route(
        "/models",
        api.models,
        response_model=ModelList,
        responses=error_responses((*SMALL_ERRORS, DeadlineExceeded)),
    )


def add_documentation(app: FastAPI, open_to_all: frozenset[str] | None) -> None:
    """`/openapi.json` and `/docs`, made when first asked for; in a thread, since it takes a while.

    Args:
        open_to_all: the paths that need no key; None when none does.
    """

    @functools.cache
    def made() -> dict[str, Any]:
        found = document(app.routes)
        return found if open_to_all is None else declare_keys(found, open_to_all)

    async def openapi_json(request: Request) -> Response:  # noqa: ARG001 - every endpoint takes the request
        return Response(orjson.dumps(await asyncio.to_thread(made)), media_type=JSON)

    async def docs(request: Request) -> Response:  # noqa: ARG001
        return HTMLResponse(page(await asyncio.to_thread(made)), headers=page_headers())

    app.add_api_route("/openapi.json", openapi_json, include_in_schema=False)
    app.add_api_route("/docs", docs, include_in_schema=False)


def _example(value: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": "The predictions, in the order of the texts",
        "content": {JSON: {"example": value}},
        "headers": PREDICT_HEADERS,
    }
