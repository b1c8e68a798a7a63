"""The layer that keeps a body within its limit.

Not Starlette's own limit, which answers a declared length in plain text, past the one place where errors
become answers, and before anybody asks for a key. Knows bytes, and nothing of what they mean.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import TooLarge
from service.exchange import header_of


class BodyLimit:
    """Refuses a body over the limit before it is held: by its declared length when it is asked for, else at
    the limit.

    Who must not come in, or asks for something that takes no body, has another answer before that; the
    connection is ended in the same way.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = header_of(scope, b"content-length")
        # The server delivers no more than what is declared, and refuses what is not a number. It passes on
        # zeros before it, and Python reads no number of more than 4,300 digits.
        too_long = declared is not None and int(declared.lstrip(b"0") or b"0") > self._max_body_bytes
        if too_long or _comes_later(scope):
            body = _CountedBody(receive, send, self._max_body_bytes, is_over=too_long)
            await self._app(scope, body.receive, body.send)
        else:
            await self._app(scope, receive, send)


def _comes_later(scope: Scope) -> bool:
    """Whether the body is of unknown length, or may never come.

    A client that asks first ("Expect: 100-continue") and is refused need not send its body. What comes next
    on its connection can then be the body or another request, and nobody can tell which.
    """
    if header_of(scope, b"transfer-encoding") is not None:
        return True
    return header_of(scope, b"expect") is not None and header_of(scope, b"content-length") is not None


class _CountedBody:
    """The two ends of a request whose body may be too long.

    An answer that is sent before the whole body was there ends the connection.
    """

    def __init__(self, receive: Receive, send: Send, limit: int, *, is_over: bool) -> None:
        self._receive = receive
        self._send = send
        self._limit = self._left = limit
        self._is_over = is_over
        self._whole = False

    async def receive(self) -> Message:
        self._refuse_when_over()  # the server, when asked, would tell a client that asked first to go on
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            self._whole = not message.get("more_body", False)
            self._is_over = self._left < 0
            self._refuse_when_over()
        return message

    def _refuse_when_over(self) -> None:
        if self._is_over:
            raise TooLarge(f"The body is over the limit of {self._limit} bytes.")

    async def send(self, message: Message) -> None:
        if not self._whole and message["type"] == "http.response.start":
            message["headers"].append((b"connection", b"close"))
        await self._send(message)
