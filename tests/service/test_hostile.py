"""Hostile and odd requests over a socket: never a 500, never an echo, and never harm to a neighbour."""

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import psutil
import pytest

from service.schemas import Problem
from tests.models import make_version
from tests.server import JSON, SAFETY_S, Server, serving

MARKER = "xyzzy"
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("store")
    make_version(store, max_tokens=64)
    with serving(model_store=store) as running:
        yield running
        assert running.process.poll() is None, "the server lives"
        log = json.dumps(running.lines)
        assert MARKER not in log, "no text in the log"
        assert not running.events("defect")
        assert not running.events("unhandled")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=SAFETY_S, trust_env=False) as made:
        yield made


@pytest.fixture(autouse=True)
def _neighbour(server: Server) -> Iterator[None]:
    """Somebody else, who predicts all the time and must be answered rightly all the time."""
    over = threading.Event()
    answered = threading.Event()
    wrong: list[str] = []

    def live() -> None:
        with httpx.Client(base_url=server.url, timeout=SAFETY_S, trust_env=False) as own:
            while not over.is_set():
                response = own.post("/predict", json={"inputs": ["a good film", "awful"]})
                labels = [one.get("label") for one in response.json().get("predictions", [])]
                if labels != ["positive", "negative"]:
                    wrong.append(response.text)
                answered.set()

    thread = threading.Thread(target=live)
    thread.start()
    assert answered.wait(SAFETY_S)
    answered.clear()
    yield
    assert answered.wait(SAFETY_S), "the neighbour is answered still"
    over.set()
    thread.join(SAFETY_S)
    assert not thread.is_alive()
    assert wrong == []


def post(client: httpx.Client, body: bytes, kind: str | None = "application/json") -> httpx.Response:
    return client.post("/predict", content=body, headers={} if kind is None else {"content-type": kind})


def refused(response: httpx.Response, *statuses: int) -> Problem:
    assert response.status_code in statuses, response.text
    assert response.headers["content-type"] == Problem.media_type
    assert MARKER not in response.text
    assert MARKER not in str(response.headers)
    return Problem.model_validate_json(response.content)


def predictions(client: httpx.Client, inputs: str | Sequence[str], **options: Any) -> list[dict[str, Any]]:
    response = client.post("/predict", json={"inputs": inputs, **options})
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["predictions"]
    return found


# --- bodies that are no request


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs": NaN}',
        b'{"inputs": 1e999}',
        b'{"inputs": [NaN, "xyzzy"]}',
        b'{"inputs": "xyzzy", "top_k": Infinity}',
        b'{"inputs": "xyzzy", "top_k": -1e999}',
    ],
)
def test_r16_numbers_that_json_has_not(client: httpx.Client, body: bytes) -> None:
    refused(post(client, body), 400, 422)


@pytest.mark.parametrize(
    "kind", ["application/octet-stream", "text/plain", "multipart/form-data", "xyzzy/xyzzy", None]
)
def test_r17_bytes_that_are_not_utf_8(client: httpx.Client, kind: str | None) -> None:
    refused(post(client, b"\xff\xfe\x00xyzzy", kind), 415)
    refused(post(client, b"\xff\xfe\x00xyzzy"), 400)
    refused(post(client, b'{"inputs": "caf\xe9 xyzzy"}'), 400)


@pytest.mark.parametrize("depth", [100, 500, 900, *range(930, 1001, 5), 5_000, 100_000])
def test_r20_nesting_of_any_depth(client: httpx.Client, depth: int) -> None:
    refused(post(client, b'{"inputs": ' + b"[" * depth + b"]" * depth + b"}"), 400, 422)
    refused(post(client, b'{"inputs": ' + b'{"xyzzy":' * depth + b"1" + b"}" * depth + b"}"), 400, 422)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b'"xyzzy"',
        b'["xyzzy"]',
        b"{}",
        b'{"inputs": null}',
        b'{"inputs": {"xyzzy": 1}}',
        b'{"inputs": ["good", ["xyzzy"]]}',
        b'{"inputs": []}',
        b'{"inputs": "xyzzy", "xyzzy": 1}',
        b'{"text": "xyzzy"}',
        b'{"instances": ["xyzzy"]}',
        b'{"inputs": "xyzzy", "top_k": true}',
        b'{"inputs": "xyzzy", "truncate": "xyzzy"}',
        b'{"inputs": "xyzzy',
        b'{"inputs": "xyzzy"}{"inputs": "xyzzy"}',
        b"\x00" * 100,
        b'{"inputs": "xyzzy", ' + b",".join(b'"xyzzy%d": 1' % n for n in range(50_000)) + b"}",
        b'{"inputs": [' + b",".join([b"1"] * 500_000) + b"]}",
        b'{"inputs": ' + b"1" * 1_000_000 + b"}",
    ],
    ids=lambda body: body[:32].decode(),
)
def test_bodies_of_another_shape(client: httpx.Client, body: bytes) -> None:
    refused(post(client, body), 400, 422)


def test_lone_surrogates_escaped_and_raw(client: httpx.Client) -> None:
    assert refused(post(client, rb'{"inputs": "xyzzy \ud800"}'), 422).code == "text_invalid"
    refused(post(client, b'{"inputs": "xyzzy \xed\xa0\x80"}'), 400)
    refused(post(client, rb'{"inputs": "good", "\ud800": 1}'), 422)


def test_a_lone_surrogate_harms_no_neighbour(client: httpx.Client) -> None:
    response = post(client, rb'{"inputs": ["good", "\udfff xyzzy", "bad"], "top_k": 1}')
    assert response.status_code == 200
    good, invalid, bad = response.json()["predictions"]
    assert (good["label"], bad["label"]) == ("positive", "negative")
    assert invalid["error"]["code"] == "text_invalid"
    assert "xyzzy" not in response.text
    for body in (
        rb'{"inputs": ["xyzzy \ud800", 3]}',
        rb'{"inputs": ["xyzzy \ud800"], "top_k": NaN}',
        rb'{"inputs": ["xyzzy \ud800"], "z": ["\ud800"]}',
        rb'{"inputs": ["xyzzy \ud800"], "z": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        rb'{"inputs": ["xyzzy \ud800"], "top_k": ' + b"9" * 5_000 + b"}",
    ):
        refused(post(client, body), 422)


def test_a_neighbour_in_the_same_list(client: httpx.Client) -> None:
    good, blank, cut, bad = predictions(client, ["good", "\u200b", "x" * 500_000, "bad"])
    assert (good["label"], bad["label"]) == ("positive", "negative")
    assert blank["error"]["code"] == "text_empty"
    assert cut["truncated"] is True


# --- odd texts


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n", "\t", "\x00", "\u200b\u200d\ufeff", "\u202e", "\x00\u200b \u00ad"]
)
def test_r23_texts_with_nothing_to_read(client: httpx.Client, text: str) -> None:
    """One rule: 422 alone, and in a list an error in that place alone."""
    assert refused(client.post("/predict", json={"inputs": text}), 422).code == "text_empty"
    good, empty = predictions(client, ["good", text])
    assert (good["label"], empty["error"]["code"]) == ("positive", "text_empty")
    assert predictions(client, [text]) == [empty]


def test_r23_a_nul_among_words_does_no_harm(client: httpx.Client) -> None:
    [one] = predictions(client, "good\x00 film\x00")
    assert one["label"] == "positive"


@pytest.mark.parametrize("token", ["[SEP]", "[CLS]", "[PAD]", "[MASK]", "[UNK]", "</s>", "<pad>", "<mask>"])
def test_r24_control_tokens_are_ordinary_characters(client: httpx.Client, token: str) -> None:
    """As a control token it would be one token; as characters it is several."""
    [without], [with_token] = predictions(client, "good"), predictions(client, f"good {token}")
    assert with_token["tokens"] >= without["tokens"] + 3
    [many] = predictions(client, f"{token}" * 5 + " good")
    assert many["label"] in {"positive", "negative"}


@pytest.mark.parametrize(
    "text",
    ["w" + "e" * 900_000, "a" * 1_000_000, "@" * 1_000_000, "\u0301" * 500_000, "\u0345\u0301" * 200_000],
    ids=["one word", "one letter", "signs", "accents", "reordered accents"],
)
def test_r25_one_huge_word(client: httpx.Client, text: str) -> None:
    """Cut before it is tokenised, so that it costs no more than a text of the longest length."""
    response = client.post("/predict", json={"inputs": text}, headers=JSON)
    assert response.status_code in {200, 422}, response.text
    if response.status_code == 200:
        assert response.json()["predictions"][0]["truncated"] is True
    refused(client.post("/predict", json={"inputs": f"{text} {MARKER}", "truncate": False}), 422)


@pytest.mark.parametrize("text", ["😍", "😡", "😂😂", "good 😍"])
def test_r26_emoji_are_answered(client: httpx.Client, text: str) -> None:
    assert predictions(client, text)[0]["tokens"] >= 3


# --- bodies without end


def pieces(count: int) -> Iterator[bytes]:
    """A JSON string of so many mebibytes."""
    yield b'{"inputs": "' + MARKER.encode()
    for _ in range(count):
        yield b"x" * MEBIBYTE
    yield b'"}'


def send_until_refused(server: Server, head: bytes, body: Iterator[bytes]) -> bytes:
    """Send until the server stops taking it; what it said, to the end of the connection."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=SAFETY_S) as connection:
        try:
            connection.sendall(
                b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + head
            )
            for piece in body:
                connection.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
        try:
            while part := connection.recv(65536):
                received += part
        except ConnectionResetError:
            pass
    return received


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
def test_r19_200_megabytes_are_refused_and_not_held(server: Server, declared: bool) -> None:
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    peak = before
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.005):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    if declared:
        size = sum(map(len, pieces(200)))
        answer = send_until_refused(server, b"content-length: %d\r\n\r\n" % size, pieces(200))
    else:
        chunks = (b"%x\r\n" % len(piece) + piece + b"\r\n" for piece in pieces(200))
        answer = send_until_refused(server, b"transfer-encoding: chunked\r\n\r\n", chunks)
    over.set()
    watcher.join()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in head.lower()
    assert Problem.model_validate_json(body).code == "body_too_large"
    assert MARKER.encode() not in answer
    assert peak - before < 20 * MEBIBYTE


def test_a_client_that_asks_first_is_refused_before_it_sends(server: Server) -> None:
    head = b"content-length: 200000000\r\nexpect: 100-continue\r\n\r\n"
    answer = send_until_refused(server, head, iter(()))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"100 Continue" not in answer


def test_a_length_that_lies(server: Server) -> None:
    """Too low: the text ends early, and what follows is no request. Two lengths: neither is believed."""
    body = b'{"inputs": "good xyzzy xyzzy"}'
    short = send_until_refused(server, b"content-length: 5\r\n\r\n", iter([body]))
    assert short.startswith(b"HTTP/1.1 400 ")
    both = send_until_refused(
        server, b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", iter([b"0\r\n\r\n" + body])
    )
    assert both.startswith(b"HTTP/1.1 400 ")
    two = send_until_refused(server, b"content-length: 5\r\ncontent-length: 6\r\n\r\n", iter([body]))
    assert two.startswith(b"HTTP/1.1 400 ")
    negative = send_until_refused(server, b"content-length: -1\r\n\r\n", iter([body]))
    assert negative.startswith(b"HTTP/1.1 400 ")
    for answer in (short, both, two, negative):
        assert MARKER.encode() not in answer


def test_zeros_before_a_length_change_nothing(server: Server) -> None:
    """More of them than Python reads as a number."""
    body = b'{"inputs": "good"}'
    head = b"connection: close\r\ncontent-length: " + b"0" * 5000 + b"%d\r\n\r\n"
    answer = send_until_refused(server, head % len(body), iter([body]))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"positive"' in answer
    assert send_until_refused(server, head % 200_000_000, iter([body])).startswith(b"HTTP/1.1 413 ")


def test_headers_that_are_odd(server: Server, client: httpx.Client) -> None:
    response = client.post(
        "/predict?xyzzy=xyzzy",
        json={"inputs": "good"},
        headers={"x-request-id": "xyzzy xyzzy", "x-forwarded-for": "xyzzy", "accept": "xyzzy"},
    )
    assert response.status_code == 200
    assert MARKER not in response.headers["x-request-id"]
    assert MARKER not in refused(client.get("/xyzzy?xyzzy"), 404).detail
    assert client.get(
        "/metrics", headers={"accept": "application/openmetrics-text; version=xyzzy"}
    ).is_success
    broken = send_until_refused(server, b"xyzzy\x00: \x01\r\n\r\n", iter(()))
    assert broken.startswith(b"HTTP/1.1 400 ")


def test_nothing_here_was_a_500(client: httpx.Client) -> None:
    page = client.get("/metrics").text
    failed = [line for line in page.splitlines() if 'status="500"' in line and not line.endswith(" 0.0")]
    assert failed == []
    assert 'valence_refusals_total{reason="internal_error"} 0.0' in page
