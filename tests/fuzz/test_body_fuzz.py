"""Any bytes at all, over a socket: no crash, no 500, no hang, no echo, and no harm to the next client."""

import json
import re
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.schemas import PredictResponse, Problem
from tests.fuzz import wire_strategies as wires
from tests.fuzz.aftermath import MARKER, assert_unharmed
from tests.models import make_version
from tests.server import SAFETY_S, serving

WHOLE_REQUESTS = 2_500
BROKEN_REQUESTS = 1_500
MAX_BODY_BYTES = 16_384
MAX_TEXTS = 32

# The same requests each time: what CI says does not depend on luck.
repeatable = settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server whose log is looked at in the end."""
    store = tmp_path_factory.mktemp("store")
    make_version(store)
    with serving(
        model_store=store, max_body_bytes=MAX_BODY_BYTES, max_texts=MAX_TEXTS, log_level="debug"
    ) as running:
        yield running.url
        assert running.process.poll() is None, "the server lives"
        assert_unharmed(running.url, {})
        assert MARKER not in json.dumps(running.lines), "nothing that was sent is in the log"
        assert not running.events("defect")
        assert not running.events("unhandled")


def exchange(url: str, pieces: Sequence[bytes], *, half_close: bool = False) -> bytes:
    """Send the pieces, and give all that comes back until the server closes. A hang is a `TimeoutError`."""
    host, _, port = url.removeprefix("http://").partition(":")
    received = bytearray()
    with socket.create_connection((host, int(port)), timeout=SAFETY_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for piece in pieces:
                connection.sendall(piece)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65_536):
                received += part
        except TimeoutError:
            raise
        except OSError:
            pass  # the server has hung up before all was sent
    return bytes(received)


def answers(received: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Status, headers and body of each answer; interim ones are dropped. Fails when one is not whole."""
    found = []
    while received:
        head, end, received = received.partition(b"\r\n\r\n")
        assert end, "a head is not whole"
        first, *lines = head.decode("latin-1").split("\r\n")
        assert re.fullmatch(r"HTTP/1\.1 \d{3} .*", first)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        status, length = int(first[9:12]), int(headers.get("content-length", "0"))
        if headers.get("transfer-encoding") == "chunked":
            size, _, received = received.partition(b"\r\n")
            length = int(size, 16)
            received = received[:length] + received[length:].removeprefix(b"\r\n0\r\n\r\n")
        body, received = received[:length], received[length:]
        assert len(body) == length, "a body is not whole"
        if status >= 200:
            found.append((status, headers, body))
    return found


class Sent:
    """A request; no dataclass, of which hypothesis would print all.

    Args:
        pieces: what goes over the wire, one after the other.
        body: what it holds.
        lines: its headers but the framing.
    """

    def __init__(self, pieces: Sequence[bytes], body: bytes = b"", lines: Sequence[bytes] = ()) -> None:
        self.pieces = pieces
        self.body = body
        self.lines = lines

    def __repr__(self) -> str:
        """Its beginning."""
        whole = b"".join(self.pieces)
        return f"{whole[:2_000]!r} of {len(whole)} bytes in {len(self.pieces)} pieces"


@st.composite
def whole_requests(draw: st.DrawFn) -> Sent:
    """Well framed, whatever it holds."""
    body = draw(wires.bodies())
    lines = [b"content-type: " + draw(wires.kinds()), *draw(wires.header_lines())]
    if draw(st.booleans()):
        framing, sent = b"content-length: %d" % len(body), body
    else:
        framing, sent = b"transfer-encoding: chunked", wires.framed_in_chunks(body, draw(wires.chunks()))
    head = [b"POST /predict HTTP/1.1", b"host: x", b"connection: close", framing, *lines]
    data = b"\r\n".join([*head, b"", sent])
    cut = draw(st.integers(0, len(data)))
    pieces = [data] if draw(st.booleans()) else [data[:cut], data[cut:]]
    return Sent(pieces, body, lines)


@settings(repeatable, max_examples=WHOLE_REQUESTS)
@given(sent=whole_requests())
def test_every_whole_request_has_one_answer(url: str, sent: Sent) -> None:
    received = exchange(url, sent.pieces)
    assert MARKER.encode() not in received
    [(status, headers, answer)] = answers(received)
    if status == 200:
        assert_belongs(PredictResponse.model_validate_json(answer), sent.body)
        return
    assert status in {400, 413, 415, 422, 504}
    assert headers["content-type"] == Problem.media_type
    assert Problem.model_validate_json(answer).status == status
    if status == 504:
        assert b"x-request-timeout: 0.000000001" in sent.lines


def assert_belongs(response: PredictResponse, body: bytes) -> None:
    """Python's own parser, which is laxer than ours, reads the same request."""
    value: dict[str, Any] = json.loads(body.decode("utf-8"))
    assert set(value) <= {"inputs", "top_k", "truncate", "raw_scores"}
    texts = [value["inputs"]] if isinstance(value["inputs"], str) else value["inputs"]
    assert all(isinstance(text, str) for text in texts)
    assert len(response.predictions) == len(texts) <= MAX_TEXTS
    assert len(body) <= MAX_BODY_BYTES


def _framings(length: int) -> list[bytes]:
    """Headers that say of a body of this length what is not so, or what nobody can understand."""
    return [
        b"content-length: %d" % max(length - 3, 0),
        b"content-length: %d" % (length + 9),
        b"content-length: 99999999999",
        b"content-length: 99999999999999999999999",
        b"content-length: -1",
        b"content-length: +%d" % length,
        b"content-length: 0x10",
        b"content-length: 1_0",
        b"content-length: \xb2",
        b"content-length: %d\r\ncontent-length: %d" % (length, length + 1),
        b"content-length: %d\r\ntransfer-encoding: chunked" % length,
        b"transfer-encoding: chunked",
        b"transfer-encoding: xyzzy",
        b"transfer-encoding: chunked, gzip",
        b"connection: close",
    ]


@st.composite
def broken_requests(draw: st.DrawFn) -> Sent:
    """Bytes that are no request, or one whose body does not end where it says, and what follows on it."""
    body = draw(wires.bodies())
    target = draw(
        st.sampled_from([b"POST /predict", b"GET /metrics", b"GET /xyzzy", b"POST //predict", b"QUERY *"])
    )
    framing = draw(st.sampled_from([*_framings(len(body)), b"content-length: %d" % len(body)]))
    lines = [target + b" HTTP/1.1", b"host: x", b"content-type: application/json", framing]
    data = b"\r\n".join([*lines, *draw(wires.header_lines()), b"", body])
    kind = draw(st.integers(0, 3))
    if kind == 0:
        data = wires.damaged(data, draw(wires.damage()))
    elif kind == 1:
        data = data[: draw(st.integers(0, len(data)))]
    elif kind == 2:
        data += data
    return Sent([data])


@settings(repeatable, max_examples=BROKEN_REQUESTS)
@given(sent=broken_requests())
def test_whatever_is_sent_harms_nobody(url: str, sent: Sent) -> None:
    """The client ends its side after it, so that nothing has to be waited for."""
    received = exchange(url, sent.pieces, half_close=True)
    assert MARKER.encode() not in received
    for status, _, _ in answers(received):
        assert status in {200, 400, 404, 405, 413, 415, 422, 431, 504}
