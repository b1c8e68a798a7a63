"""The OpenAPI document and the page /docs that is made from it.

The page is plain HTML of our own: FastAPI's loads its scripts from elsewhere, which a closed network does not
have and a service should not need. Knows nothing of what the service does at run time.
"""

import hashlib
from base64 import b64encode
from collections.abc import Collection, Iterable, Sequence
from html import escape
from typing import Any

import orjson
from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute

from service.errors import (
    BadRequest,
    Crowded,
    DeadlineExceeded,
    EngineDead,
    EngineFailed,
    InternalError,
    MethodNotAllowed,
    NotFound,
    NotReady,
    QueueFull,
    ServiceError,
    Stopping,
    TextEmpty,
    TextInvalid,
    TextTooLong,
    TooLarge,
    TooManyTexts,
    Unauthorized,
    Unprocessable,
    UnsupportedMediaType,
)
from service.metrics import service_version
from service.schemas import PredictRequest, Problem

_REF = "#/components/schemas/{model}"
_JSON = "application/json"

PREDICT_ERRORS: tuple[type[ServiceError], ...] = (
    BadRequest,
    TooLarge,
    TooManyTexts,
    UnsupportedMediaType,
    Unprocessable,
    TextEmpty,
    TextInvalid,
    TextTooLong,
    InternalError,
    EngineFailed,
    QueueFull,
    Crowded,
    NotReady,
    Stopping,
    EngineDead,
    DeadlineExceeded,
)

SMALL_ERRORS: tuple[type[ServiceError], ...] = (InternalError, Crowded)
"""What a route without a body may answer when it is not for health or metrics."""

PREDICT_REQUESTS: dict[str, dict[str, Any]] = {
    "one text": {"inputs": "Great product, highly recommend!"},
    "several texts": {"inputs": ["Absolutely loved it, will buy again.", "Terrible, a waste of money."]},
    "the best label only": {"inputs": "Average, nothing special.", "top_k": 1},
    "logits, and nothing cut": {"inputs": ["Poor quality."], "raw_scores": True, "truncate": False},
}

PREDICT_ANSWER: dict[str, Any] = {
    "model": "sentiment",
    "version": "1",
    "predictions": [
        {
            "label": "positive",
            "score": 0.998,
            "scores": {"positive": 0.998, "negative": 0.002},
            "tokens": 7,
            "truncated": False,
        },
        {"error": {"code": TextEmpty.code, "detail": TextEmpty.default_detail}},
    ],
}


REQUEST_ID: dict[str, Any] = {
    "description": "That of the request, if it brought one of 1 to 64 letters, digits, dots, dashes and "
    "underscores; else a new one.",
    "required": True,
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"},
}

PREDICT_HEADERS: dict[str, dict[str, Any]] = {
    "Server-Timing": {
        "description": "Milliseconds in each stage: tokenize, queue, infer.",
        "required": True,
        "schema": {
            "type": "string",
            "pattern": "^tokenize;dur=[0-9.]+, queue;dur=[0-9.]+, infer;dur=[0-9.]+$",
        },
    }
}

OPENMETRICS: dict[str, Any] = {"content": {"application/openmetrics-text": {"schema": {"type": "string"}}}}


def request_body() -> dict[str, Any]:
    """The body and the header of `POST /predict`, described for FastAPI's `openapi_extra`."""
    content = {
        "schema": {"$ref": _REF.format(model=PredictRequest.__name__)},
        "examples": {name: {"value": value} for name, value in PREDICT_REQUESTS.items()},
    }
    timeout = {
        "name": "X-Request-Timeout",
        "in": "header",
        "required": False,
        "description": "Seconds, counted from the arrival of the request, after which nobody waits for the "
        "answer. The setting VALENCE_REQUEST_TIMEOUT_S is the most.",
        "schema": {"type": "string", "pattern": "^(?!0+([.]0+)?$)[0-9]{1,9}([.][0-9]{1,9})?$"},
        "example": "2.5",
    }
    return {"parameters": [timeout], "requestBody": {"required": True, "content": {_JSON: content}}}


def error_responses(errors: Sequence[type[ServiceError]]) -> dict[int | str, dict[str, Any]]:
    """What FastAPI is to say of these errors, by status."""
    responses: dict[int | str, dict[str, Any]] = {}
    for status in sorted({error.status for error in errors}):
        same = [error for error in errors if error.status == status]
        content = {
            "schema": {"$ref": _REF.format(model=Problem.__name__)},
            "examples": {error.code: {"value": _problem_example(error)} for error in same},
        }
        responses[status] = {
            "description": "; ".join(error.title for error in same),
            "content": {Problem.media_type: content},
        }
        if all(error().retry_after_s is not None for error in same):
            header = _header("Seconds to wait before trying again.", {"type": "integer", "minimum": 1})
            responses[status]["headers"] = {"Retry-After": header}
    return responses


def _header(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A header that the answer has always."""
    return {"description": description, "required": True, "schema": schema}


def _problem_example(error: type[ServiceError]) -> dict[str, Any]:
    return {
        "type": f"/docs#{error.code}",
        "title": error.title,
        "status": error.status,
        "detail": error.default_detail,
        "code": error.code,
        "request_id": "8f14e45fceea467a9575b1c3a1d0f8b2",
    }


def document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """The OpenAPI document of these routes."""
    made = get_openapi(
        title="Valence",
        version=service_version(),
        description="How positive or negative a text is. Errors are application/problem+json (RFC 9457).",
        routes=routes,
    )
    schemas = made.setdefault("components", {}).setdefault("schemas", {})
    for model in (PredictRequest, Problem):
        schemas[model.__name__] = model.model_json_schema(ref_template=_REF)
    for operations in made["paths"].values():
        for operation in operations.values():
            for response in operation["responses"].values():
                response.setdefault("headers", {})["X-Request-ID"] = REQUEST_ID
    return made


def declare_keys(made: dict[str, Any], open_to_all: Collection[str]) -> dict[str, Any]:
    """The document of a service that asks for a key everywhere but at these paths. Changes it in place."""
    made["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    made["security"] = [{"bearer": []}, {"header": []}]
    answer = error_responses([Unauthorized])[Unauthorized.status]
    challenge = _header("Always Bearer.", {"type": "string", "const": "Bearer"})
    for path, operations in made["paths"].items():
        for operation in operations.values():
            if path in open_to_all:
                operation["security"] = []
            else:
                operation["responses"][str(Unauthorized.status)] = answer | {
                    "headers": {"WWW-Authenticate": challenge, "X-Request-ID": REQUEST_ID}
                }
    return made


def page_headers() -> dict[str, str]:
    """What keeps a browser from doing anything with the page but showing it."""
    style = b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{style}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {"content-security-policy": policy, "referrer-policy": "no-referrer"}


def page(made: dict[str, Any]) -> str:
    """The document as a page that needs nothing else."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>Valence</title><style>{_STYLE}</style>",
        f"<h1>Valence {escape(made['info']['version'])}</h1><p>{escape(made['info']['description'])} ",
        "The whole contract, for programs: <a href=openapi.json>openapi.json</a>.",
    ]
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            parts += _operation(path, method, operation, with_key="security" in made)
    parts += ["<h2>Errors</h2><p>The field <code>code</code> of an error, its status and what it means.<dl>"]
    errors: list[type[ServiceError]] = [*PREDICT_ERRORS, Unauthorized, NotFound, MethodNotAllowed]
    for error in sorted(errors, key=lambda one: one.status):
        parts += [f"<dt id={error.code}><code>{error.code}</code> {error.status}"]
        parts += [f"<dd>{escape(error.default_detail)}"]
    return "\n".join([*parts, "</dl></html>\n"])


_STYLE = (
    "body{font:16px/1.5 system-ui;max-width:50em;margin:2em auto;padding:0 1em}"
    "pre{background:#f4f4f4;padding:.7em;overflow-x:auto}dt{margin-top:.5em}h2{margin-top:2em}"
)


def _operation(path: str, method: str, operation: dict[str, Any], *, with_key: bool) -> Iterable[str]:
    key = '-H "X-API-Key: $KEY" ' if with_key and "security" not in operation else ""
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['description'])}"
    examples = operation.get("requestBody", {}).get("content", {}).get(_JSON, {}).get("examples", {})
    for name, example in examples.items():
        body = orjson.dumps(example["value"]).decode()
        command = f"curl {key}-H 'Content-Type: {_JSON}' -d '{body}' \\\n  http://127.0.0.1:8000{path}"
        yield f"<p>{escape(name)}:<pre>{escape(command)}</pre>"
    statuses = ", ".join(
        f"{status} ({escape(response['description'])})" for status, response in operation["responses"].items()
    )
    yield f"<p>Answers: {statuses}."
