"""HTTP by hand: requests as bytes, and what comes back, to the end of an answer or of the connection."""

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from tests.server import SAFETY_S

GOOD = b'{"inputs": "good"}'


@dataclass(frozen=True)
class Reply:
    """An answer. `headers` have lower-case names."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The code of a problem."""
        return str(json.loads(self.body)["code"])


def request(
    body: bytes = GOOD,
    *extra: bytes,
    target: bytes = b"POST /predict",
    kind: bytes = b"application/json",
    length: bool = True,
) -> bytes:
    """A request; `extra` are header lines."""
    lines = [target + b" HTTP/1.1", b"host: x", b"content-type: " + kind, *extra]
    if length:
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join([*lines, b"", body])


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=SAFETY_S)


def reply(connection: socket.socket) -> Reply:
    """The next answer on a connection; an interim one (1xx) is an answer without a body."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        assert byte, f"the connection ended after {head!r}"
        head += byte
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body, length = b"", int(headers.get("content-length", "0"))
    while len(body) < length:
        part = connection.recv(length - len(body))  # and nothing of the next answer
        assert part, "the connection ended in a body"
        body += part
    return Reply(int(first.split(" ")[1]), headers, body)


def to_the_end(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


def hang_up(connections: Sequence[socket.socket]) -> None:
    """Reset the connections, as a client does that is killed."""
    for connection in connections:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        connection.close()
