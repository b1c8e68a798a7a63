"""A lean HTTP/1.1 client over raw connections: a request costs it a fraction of what it costs the service.

A client library would cost more than the service does. It reads what this service answers, bodies with a
content-length, and knows nothing of texts or of when to ask.
"""

import asyncio
import json
from dataclasses import dataclass
from urllib.parse import urlsplit

TIMEOUT_S = 60.0
HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers (lower case) and body of an answer."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def retry_after_s(self) -> int | None:
        """The header, in seconds."""
        value = self.headers.get(b"retry-after")
        return None if value is None else int(value)


def predict_request(inputs: str | list[str], headers: str = "") -> bytes:
    """The bytes of a `POST /predict`; `headers` are further lines, each with its CRLF."""
    body = json.dumps({"inputs": inputs}).encode()
    head = (
        "POST /predict HTTP/1.1\r\nhost: load\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{headers}\r\n"
    )
    return head.encode() + body


def get_request(path: str) -> bytes:
    """The bytes of a GET."""
    return f"GET {path} HTTP/1.1\r\nhost: load\r\n\r\n".encode()


class _Connection(asyncio.Protocol):
    """One request at a time."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self.usable = True
        self._received = b""
        self._waiter: asyncio.Future[Answer] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def ask(self, request: bytes) -> "asyncio.Future[Answer]":
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._waiter

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(HEAD_END)
        if end < 0:
            return
        status, headers = _read_head(self._received[:end])
        length = int(headers.get(b"content-length", b"0"))
        if len(self._received) < end + len(HEAD_END) + length:
            return
        body = self._received[end + len(HEAD_END) :]
        self._received = b""
        if headers.get(b"connection") == b"close":
            self.usable = False
        self._settle(Answer(status, headers, body))

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._settle(exc or ConnectionResetError("closed without an answer"))

    def close(self) -> None:
        self.usable = False
        self._transport.abort()

    def _settle(self, outcome: Answer | Exception) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if isinstance(outcome, Answer):
            self._waiter.set_result(outcome)
        else:
            self._waiter.set_exception(outcome)


def _read_head(head: bytes) -> tuple[int, dict[bytes, bytes]]:
    first, *lines = head.split(b"\r\n")
    pairs = (line.partition(b":") for line in lines)
    return int(first.split(b" ", 2)[1]), {name.lower(): value.strip() for name, _, value in pairs}


class Client:
    """Asks one server over as many connections as there are requests under way.

    Args:
        keep: whether a connection is used again; else each request has one of its own.
    """

    def __init__(self, url: str, *, keep: bool = True, timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "127.0.0.1", parts.port or 80
        self._keep = keep
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []

    async def ask(self, request: bytes) -> Answer:
        """OSError: no connection, or it ended without an answer. TimeoutError: nothing came in time."""
        async with asyncio.timeout(self._timeout_s):
            connection = await self._connect()
            try:
                answer = await connection.ask(request)
            except BaseException:
                connection.close()
                raise
        if connection.usable and self._keep:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def close(self) -> None:
        """End the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(_Connection, *self._address)
        return connection


async def scrape(client: Client) -> dict[str, float]:
    """The series of /metrics, by their name with labels as printed."""
    answer = await client.ask(get_request("/metrics"))
    lines = answer.body.decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}
