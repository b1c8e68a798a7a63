"""What can go wrong, and the HTTP status of each; the only place where a status code is decided.

    ServiceError
    ├── BadRequest 400            the body is not JSON, or not UTF-8
    ├── Unauthorized 401          no valid API key, where one is asked for
    ├── TooLarge 413              the body is over the byte limit
    ├── TooManyTexts 413          more texts than one request may bring
    ├── UnsupportedMediaType 415  the content type is not application/json
    ├── Unprocessable 422         the JSON does not have the documented shape
    │   └── TextRefused 422       this text cannot be predicted (its own place in a list)
    │       ├── TextEmpty         nothing is left of the text after normalisation
    │       ├── TextInvalid       the text holds a lone surrogate
    │       └── TextTooLong       over the limit, and the caller asked not to cut
    ├── NotFound 404, MethodNotAllowed 405
    ├── ClientGone 499            the client closed the connection; nobody reads the answer
    ├── InternalError 500         a defect of the service
    │   └── EngineFailed 500      the engine failed on this text
    ├── Unavailable 503
    │   ├── QueueFull 503         + Retry-After, computed from the drain rate
    │   ├── Crowded 503           + Retry-After: too many open connections
    │   ├── NotReady 503          + Retry-After: still loading and warming
    │   ├── Stopping 503          + Retry-After: after the drain delay
    │   └── EngineDead 503        + Retry-After: the batcher or engine cannot go on
    └── DeadlineExceeded 504      the deadline passed; the text is not run afterwards

    StartupError                  the service cannot start: settings, version or engine; never an HTTP answer

Knows nothing of requests, responses or JSON. No message may repeat the caller's text.
"""

from collections.abc import Iterator
from typing import ClassVar


class ServiceError(Exception):
    """Base of every error that has an HTTP answer.

    Args:
        detail: one sentence for the caller; never his text.
        retry_after_s: whole seconds for the Retry-After header, or None for no header.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    title: ClassVar[str] = "Internal error"
    default_detail: ClassVar[str] = "The service failed on this request."

    def __init__(self, detail: str | None = None, *, retry_after_s: int | None = None) -> None:
        self.detail = detail if detail is not None else self.default_detail
        self.retry_after_s = retry_after_s
        super().__init__(self.detail)

    def let_go(self) -> None:
        """Forget the way it came, and its cause, once it has been logged and answered.

        The frames on that way often name the error. As a ring they would hold a whole request, its body too,
        until a full collection.
        """
        self.__traceback__ = self.__context__ = self.__cause__ = None


def with_code(base: type[ServiceError]) -> Iterator[type[ServiceError]]:
    """An error class and all below it, depth first, that have a code of their own; the others group them."""
    if "code" in vars(base):
        yield base
    for child in base.__subclasses__():
        yield from with_code(child)


class BadRequest(ServiceError):
    status = 400
    code = "bad_request"
    title = "Bad request"
    default_detail = "The body is not valid JSON in UTF-8."


class Unauthorized(ServiceError):
    """The same whether no key came or a wrong one."""

    status = 401
    code = "unauthorized"
    title = "Unauthorized"
    default_detail = "A valid API key is needed: Authorization: Bearer <key>, or X-API-Key: <key>."


class NotFound(ServiceError):
    status = 404
    code = "not_found"
    title = "Not found"
    default_detail = "There is nothing at this path."


class MethodNotAllowed(ServiceError):
    status = 405
    code = "method_not_allowed"
    title = "Method not allowed"
    default_detail = "This path does not answer this method."

    def __init__(self, allow: tuple[str, ...]) -> None:
        super().__init__()
        self.allow = allow


class TooLarge(ServiceError):
    status = 413
    code = "body_too_large"
    title = "Body too large"
    default_detail = "The body is over the byte limit."


class TooManyTexts(ServiceError):
    status = 413
    code = "too_many_texts"
    title = "Too many texts"
    default_detail = "The request brings more texts than one request may."


class UnsupportedMediaType(ServiceError):
    status = 415
    code = "unsupported_media_type"
    title = "Unsupported media type"
    default_detail = "The content type must be application/json."


class Unprocessable(ServiceError):
    status = 422
    code = "unprocessable"
    title = "Unprocessable request"
    default_detail = "The request does not have the documented shape."


class TextRefused(Unprocessable):
    """This text cannot be predicted. Its children say why, and have the codes."""


class TextEmpty(TextRefused):
    code = "text_empty"
    title = "Empty text"
    default_detail = "The text is empty, or holds nothing that the model can read."


class TextInvalid(TextRefused):
    code = "text_invalid"
    title = "Invalid text"
    default_detail = "The text holds a lone surrogate, which is not a character."


class TextTooLong(TextRefused):
    code = "text_too_long"
    title = "Text too long"
    default_detail = "The text is longer than the model reads, and truncate is false."


class ClientGone(ServiceError):
    """The client closed the connection; the status is for logs and metrics only."""

    status = 499
    code = "client_gone"
    title = "Client gone"
    default_detail = "The client closed the connection."


class InternalError(ServiceError):
    pass


class EngineFailed(InternalError):
    code = "engine_failed"
    title = "Engine failed"
    default_detail = "The engine failed on this text."


class Unavailable(ServiceError):
    """The service cannot answer now. Its children say why, and have the codes."""

    status = 503

    def __init__(self, detail: str | None = None, *, retry_after_s: int | None = 1) -> None:
        super().__init__(detail, retry_after_s=retry_after_s)


class QueueFull(Unavailable):
    code = "queue_full"
    title = "Queue full"
    default_detail = "More waits than can be answered in time."


class Crowded(Unavailable):
    code = "crowded"
    title = "Too many connections"
    default_detail = "The service has too many open connections."


class NotReady(Unavailable):
    code = "not_ready"
    title = "Not ready"
    default_detail = "The model is still loading."


class Stopping(Unavailable):
    code = "stopping"
    title = "Stopping"
    default_detail = "The service is stopping."


class EngineDead(Unavailable):
    code = "engine_dead"
    title = "Engine dead"
    default_detail = "The engine cannot go on; the service must be restarted."


class DeadlineExceeded(ServiceError):
    status = 504
    code = "deadline_exceeded"
    title = "Deadline exceeded"
    default_detail = "The deadline passed before the answer was ready."


class StartupError(Exception):
    """The service cannot start; the message says what to change.

    It is answered as JSON too, so bytes of a path that are not UTF-8 are written as escapes.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.encode(errors="backslashreplace").decode())
