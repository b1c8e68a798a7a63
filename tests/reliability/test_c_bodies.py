"""C. Hostile or odd bodies, and the odd HTTP round them."""

import gzip
import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from service import closing
from service.connections import BoundedConfig
from tests.reliability.gates import in_flight, predict
from tests.reliability.wire import GOOD, Reply, connect, reply, request, to_the_end
from tests.server import JSON, SAFETY_S, LocalServer, eventually, local_server

CHUNKED = b"12\r\n" + GOOD + b"\r\n0\r\n\r\n"


@pytest.fixture(scope="module")
def server(store: Any) -> Iterator[LocalServer]:
    with local_server(model_store=store) as running:
        yield running
        assert running.metric("valence_refusals_total", reason="internal_error") == 0


@pytest.fixture(scope="module")
def client(server: LocalServer) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


@pytest.fixture(autouse=True)
def _well_afterwards(server: LocalServer, client: httpx.Client) -> Iterator[None]:
    yield
    assert predict(client).json()["predictions"][0]["label"] == "positive"
    eventually(lambda: in_flight(server) == 0, "nothing is in flight")


# --- where a request ends


@pytest.mark.parametrize(
    "lines",
    [
        [b"transfer-encoding: chunked", b"content-length: 18"],
        [b"transfer-encoding: chunked, identity"],
        [b"transfer-encoding: xchunked"],
        [b"transfer-encoding: chunked", b"transfer-encoding: chunked"],
        [b"transfer-encoding:", b" chunked"],
        [b"transfer-encoding : chunked"],
        [b"content-length: 18", b"content-length: 18"],
        [b"content-length: 18", b"content-length: 19"],
        [b"content-length: 18, 18"],
        [b"content-length: +18"],
        [b"content-length: -18"],
        [b"content-length: 0x12"],
        [b"content-length: 1_8"],
        [b"content-length:"],
        [b"content-length: 100000000000000000000000"],
        [b"x: a\x00b", b"content-length: 18"],
        [b"x: a\rb", b"content-length: 18"],
    ],
    ids=lambda lines: b"; ".join(lines).decode(),
)
def test_a_body_whose_end_is_doubtful_ends_the_connection(server: LocalServer, lines: list[bytes]) -> None:
    """What a proxy before us may read in another way must not become a second request."""
    body = CHUNKED if any(b"chunked" in line for line in lines) else GOOD
    with connect(server.address) as connection:
        connection.sendall(request(body, *lines, length=False) + request(target=b"GET /health/live"))
        received = to_the_end(connection)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "size", [b"-1", b"ffffffffffffffffff", b"zz", b"", b"0x12"], ids=lambda size: size.decode() or "none"
)
def test_a_chunk_of_a_doubtful_size_ends_the_connection(server: LocalServer, size: bytes) -> None:
    with connect(server.address) as connection:
        body = size + b"\r\n" + GOOD + b"\r\n0\r\n\r\n"
        connection.sendall(request(body, b"transfer-encoding: chunked", length=False))
        assert to_the_end(connection).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "start",
    [
        b"GET http:// HTTP/1.1",
        b"GET ?x HTTP/1.1",
        b"GET http://x:999999999/health HTTP/1.1",
        b"GET http://[::1/health HTTP/1.1",
        b"GET /pre\xffdict HTTP/1.1",
        b"FOO / HTTP/1.1",
        b"get /health/live HTTP/1.1",
        b"GET /health/live HTTP/1.9",
        b"PRI * HTTP/2.0",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_a_first_line_that_is_none_ends_the_connection(server: LocalServer, start: bytes) -> None:
    """Among them HTTP/2 by prior knowledge, and TLS sent to a plain port."""
    with connect(server.address) as connection:
        connection.sendall(start + b"\r\nhost: x\r\n\r\n")
        assert to_the_end(connection).startswith(b"HTTP/1.1 400 ")


def test_spellings_of_a_path_are_one_path_or_none(server: LocalServer) -> None:
    with connect(server.address) as connection:
        for target, status in (
            (b"POST /%70redict", 200),
            (b"POST http://x/predict", 200),
            (b"POST /predict?", 200),
            (b"POST //predict", 404),
            (b"POST /predict/.", 404),
            (b"POST /%ff%fe", 404),
            (b"OPTIONS *", 404),
            (b"PURGE /predict", 405),
        ):
            connection.sendall(request(target=target))
            assert reply(connection).status == status, target


def test_what_is_odd_and_clear_is_answered(server: LocalServer) -> None:
    """Chunks with extensions, zeros before a length, an expectation that we do not know, HTTP/1.0."""
    with connect(server.address) as connection:
        for data in (
            request(b"12;a=b;c\r\n" + CHUNKED[4:], b"transfer-encoding: Chunked", length=False),
            request(GOOD, b"content-length: 00000000000000000000000018", length=False),
            request(GOOD, b"expect: 200-ok"),
            request(GOOD).replace(b"HTTP/1.1", b"HTTP/1.0"),
        ):
            connection.sendall(data)
            assert reply(connection).status == 200
        assert to_the_end(connection) == b"", "HTTP/1.0 ends with its answer"


# --- clients that ask first


def test_a_client_that_asks_first_is_told_to_go_on(server: LocalServer) -> None:
    with connect(server.address) as connection:
        for _ in range(2):
            connection.sendall(request(b"", b"content-length: 18", b"expect: 100-continue", length=False))
            assert reply(connection).status == 100
            connection.sendall(GOOD)
            assert reply(connection).status == 200


def test_who_asks_in_http_1_0_is_not_told_to_go_on(server: LocalServer) -> None:
    """He would take it for the answer: 1.0 has no interim answers (RFC 9110, 10.1.1 and 15.2)."""
    head = request(b"", b"content-length: 18", b"expect: 100-continue", length=False)
    with connect(server.address) as connection:
        connection.sendall(head.replace(b"HTTP/1.1", b"HTTP/1.0"))
        eventually(lambda: in_flight(server) == 1, "the body is waited for")
        connection.sendall(GOOD)
        assert reply(connection).status == 200
        assert to_the_end(connection) == b""


@pytest.mark.parametrize(
    ("target", "kind", "status"),
    [
        (b"POST /predict", b"text/plain", 415),
        (b"POST /nothing", b"application/json", 404),
        (b"PUT /predict", b"application/json", 405),
        (b"GET /health/live", b"application/json", 200),
    ],
)
def test_an_answer_before_the_body_was_sent_ends_the_connection(
    server: LocalServer, target: bytes, kind: bytes, status: int
) -> None:
    """Its client may leave the body out: the next request would be read as that body."""
    head = request(
        b"", b"content-length: 18", b"expect: 100-continue", target=target, kind=kind, length=False
    )
    with connect(server.address) as connection:
        connection.sendall(head)
        answer = reply(connection)
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert to_the_end(connection) == b""


# --- clients that send on

ODD = b"content-encoding: x"


@pytest.mark.parametrize(
    ("target", "lines", "status"),
    [
        (b"POST /predict", [ODD, b"content-length: 200000"], 415),
        (b"POST /nothing", [b"content-length: 200000"], 404),
        (b"POST /metrics", [b"content-length: 200000"], 405),
        (b"POST /predict", [b"content-length: 200000", b"x-request-timeout: no"], 400),
        (b"POST /predict", [b"content-length: 20000000"], 413),
        (b"POST /predict", [ODD, b"transfer-encoding: chunked"], 415),
        (b"GET /health/live", [b"content-length: 200000"], 200),
    ],
    ids=["415", "404", "405", "400", "413", "chunked", "200"],
)
def test_who_sends_on_is_not_reset_before_he_read_his_answer(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, target: bytes, lines: list[bytes], status: int
) -> None:
    """A client that stops at the first error of its socket would not look for the answer."""
    monkeypatch.setattr(closing, "LINGER_S", SAFETY_S)
    head = request(b"", b"connection: close", *lines, target=target, length=False)
    with connect(server.address) as connection:
        connection.sendall(head + b"4e20\r\n")
        answer = to_the_end(connection)
        for _ in range(9):
            connection.sendall(b"x" * 20_000)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        connection.shutdown(socket.SHUT_WR)
        eventually(lambda: not lingering(server), "nobody is waited for any more")


def lingering(server: LocalServer) -> int:
    """How many connections are at their end and are still listened to."""
    config = server.server.config
    assert isinstance(config, BoundedConfig)
    return len(config.giving_way)


# --- a connection lives on after an error


def test_a_connection_is_used_again_after_every_refusal(server: LocalServer) -> None:
    refusals = [
        (request(b"{"), 400),
        (request(target=b"POST /nothing"), 404),
        (request(target=b"PUT /predict"), 405),
        (request(kind=b"text/plain"), 415),
        (request(b'{"inputs": ""}'), 422),
        (request(b'{"inputs": [' + b'"x",' * 256 + b'"x"]}'), 413),
        (
            request(b"3e8\r\n" + b"[" * 1000 + b"\r\n0\r\n\r\n", b"transfer-encoding: chunked", length=False),
            400,
        ),
    ]
    with connect(server.address) as connection:
        for data, status in refusals:
            connection.sendall(data)
            answer = reply(connection)
            assert (answer.status, answer.headers.get("connection")) == (status, None)
            connection.sendall(request())
            assert reply(connection).status == 200
        connection.sendall(b"".join(data for data, _ in refusals) + request())
        assert [reply(connection).status for _ in range(8)] == [*(status for _, status in refusals), 200]


# --- the body


@pytest.mark.parametrize(
    "body",
    [
        b"\xef\xbb\xbf" + GOOD,
        GOOD.decode().encode("utf-16"),
        GOOD.decode().encode("utf-32"),
        gzip.compress(GOOD, mtime=0),
        b'{"inputs": "a\nb"}',
        b'{"inputs": "a\x00b"}',
        b"{'inputs': 'good'}",
        b'{"inputs": "good",}',
        b'// c\n{"inputs": "good"}',
        GOOD + b"\x00",
        GOOD + GOOD,
    ],
    ids=ascii,
)
def test_what_is_nearly_json_is_refused(server: LocalServer, body: bytes) -> None:
    with connect(server.address) as connection:
        connection.sendall(request(body))
        assert reply(connection).status == 400
        connection.sendall(request(body, b"content-encoding: gzip"))
        assert reply(connection).status == 415


@pytest.mark.parametrize(
    ("option", "status"),
    [
        ('"top_k": 1', 200),
        ('"top_k": null', 200),
        ('"top_k": 1' + "0" * 30, 200),
        ('"top_k": 0', 422),
        ('"top_k": -1', 422),
        ('"top_k": -1' + "0" * 30, 422),
        ('"top_k": true', 422),
        ('"top_k": "2"', 422),
        ('"top_k": 1.0', 422),
        ('"top_k": 1e0', 422),
        ('"top_k": [1]', 422),
        ('"truncate": 1', 422),
        ('"truncate": null', 422),
        ('"truncate": "false"', 422),
        ('"raw_scores": 0', 422),
        ('"Inputs": "bad"', 422),
        ('"__proto__": {}', 422),
        ('"top_k": 0, "top_k": 1', 200),
        ('"inputs": 1, "inputs": "good"', 200),
    ],
    ids=lambda value: str(value)[:32],
)
def test_options_are_of_their_type_alike_with_a_lone_surrogate_beside(
    client: httpx.Client, option: str, status: int
) -> None:
    """A body with a lone surrogate is read by another parser: it must not be laxer."""
    for inputs in ('"good"', '["good", "bad"]'):
        body = f'{{"inputs": {inputs}, {option}}}'
        assert client.post("/predict", content=body, headers=JSON).status_code == status, inputs
    if '"inputs"' not in option:
        body = f'{{"inputs": ["good", "\\ud800"], {option}}}'
        assert client.post("/predict", content=body, headers=JSON).status_code == status


@pytest.mark.parametrize(
    ("text", "readable"),
    [
        ("\u0301" * 9, False),
        ("\u034f", False),
        ("\ufe0f", False),
        ("\u061c", False),
        ("\U000e0067", False),
        ("\x7f\x85", False),
        ("e\u0301\u0302" * 9, True),
        ("\u202eabc\u202c", True),
        ("\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd", True),
        ("\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", True),
        ("\U0001f3f3\ufe0f\u200d\U0001f308", True),
        ("\ufdfa" * 1000, True),
        ("\uffff\U0010ffff", True),
        ("\x1b[31m", True),
        ("a\u0300" * 40_000, True),
    ],
    ids=lambda value: ascii(value)[:32],
)
def test_r23_odd_texts_have_one_answer_alone_and_in_a_list(
    client: httpx.Client, text: str, readable: bool
) -> None:
    alone = predict(client, text)
    listed = predict(client, ["good", text, "bad"]).json()["predictions"]
    assert [listed[0]["label"], listed[2]["label"]] == ["positive", "negative"]
    if readable:
        assert alone.json()["predictions"] == [listed[1]]
    else:
        assert (alone.status_code, alone.json()["code"]) == (422, "text_empty")
        assert listed[1]["error"]["code"] == "text_empty"


@pytest.mark.parametrize(
    "text", ["\U0001f60d", "\U0001f621", "\U0001f602\U0001f602", "good \U0001f60d"], ids=ascii
)
def test_r26_how_much_of_a_text_is_unknown_can_be_seen(
    server: LocalServer, client: httpx.Client, text: str
) -> None:
    """Beside all tokens, so that the share can be watched."""
    names = ("valence_unknown_tokens_total", "valence_text_tokens_sum")
    unknown, tokens = (server.metric(name) for name in names)
    [one] = predict(client, text).json()["predictions"]
    assert server.metric(names[0]) == unknown + 1
    assert server.metric(names[1]) == tokens + one["tokens"]


# --- anything at all


def damaged(dice: random.Random, data: bytes) -> bytes:
    """The request with a few of its bytes changed, dropped, doubled or cut off."""
    made = bytearray(data)
    for _ in range(dice.randint(1, 6)):
        at = dice.randrange(len(made))
        kind = dice.randrange(4)
        if kind == 0:
            made[at] = dice.randrange(256)
        elif kind == 1:
            del made[at : at + dice.randint(1, 8)]
        elif kind == 2:
            made[at:at] = made[at : at + dice.randint(1, 40)]
        else:
            made[at:at] = dice.choice([b"\r\n", b"\x00", b"\xff", b'"', b"\\ud800", b"[", b"1e999", b":"])
        made = made or bytearray(b"G")
    return bytes(made)


def test_400_damaged_requests_crash_nothing(server: LocalServer) -> None:
    """Each on a connection of its own, closed by the client; a good request follows on the last one."""
    dice = random.Random(2026)
    whole = [
        request(json.dumps({"inputs": ["good", "b\u00e4d \ud83d\ude00"], "top_k": 1}).encode()),
        request(CHUNKED, b"transfer-encoding: chunked", length=False),
        request(target=b"GET /metrics"),
    ]
    for number in range(400):
        with connect(server.address) as connection:
            connection.sendall(damaged(dice, whole[number % 3]))
    eventually(lambda: in_flight(server) == 0, "nothing is in flight")
    eventually(lambda: not server.server.server_state.tasks, "no task is left")
    for route in ("/predict", "/metrics", "other"):
        assert server.metric("valence_http_requests_total", route=route, status="500") == 0


def test_reply_reads_what_is_there(server: LocalServer) -> None:
    """The reader of these tests is not lenient: an answer is whole."""
    with connect(server.address) as connection:
        connection.sendall(request(b'{"inputs": ""}'))
        answer: Reply = reply(connection)
    assert (answer.status, answer.code) == (422, "text_empty")
