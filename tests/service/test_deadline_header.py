"""`X-Request-Timeout`: a caller says how long he waits, and nothing is run for him afterwards."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.errors import DeadlineExceeded
from service.exchange import Exchange, begin, time_left_s
from tests.models import bert_tokenizer, make_version
from tests.server import SAFETY_S, LocalServer, local_server
from tests.service.stand_ins import Opener


@pytest.fixture
def opener() -> Opener:
    return Opener()


@pytest.fixture
def server(tmp_path: Path, opener: Opener) -> Iterator[LocalServer]:
    """One lane, so that one text fills it."""
    make_version(tmp_path)
    with local_server(model_store=tmp_path, open_engine=opener, lanes=1, request_timeout_s=50.0) as running:
        yield running
        opener.engine.gate.set()


def ask(server: LocalServer, text: str, *timeouts: str) -> httpx.Response:
    headers = [("x-request-timeout", timeout) for timeout in timeouts]
    with server.client() as client:
        return client.post("/predict", json={"inputs": text}, headers=headers)


@pytest.mark.parametrize("timeout", ["5", "2.5", "3600", "0050.0"])
def test_a_number_of_seconds_is_taken(server: LocalServer, timeout: str) -> None:
    assert ask(server, "good", timeout).status_code == 200


@pytest.mark.parametrize(
    "timeout", ["", "soon", "-1", "0", "0.0", "nan", "inf", "1e3", "1,5", "5 s", "+1", ".5", "9" * 40]
)
def test_what_is_no_positive_number_is_refused(server: LocalServer, timeout: str) -> None:
    answer = ask(server, "good", timeout)
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")
    assert "X-Request-Timeout" in answer.json()["detail"]


def test_two_of_them_are_refused(server: LocalServer) -> None:
    assert ask(server, "good", "5", "6").status_code == 400


def test_it_is_refused_before_the_body_is_read(server: LocalServer) -> None:
    with socket.create_connection(server.address, timeout=SAFETY_S) as connection:
        connection.sendall(
            b"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            b"content-length: 1000\r\nx-request-timeout: soon\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_the_answer_comes_on_time_and_the_text_never_reaches_the_engine(
    server: LocalServer, opener: Opener
) -> None:
    engine = opener.engine
    before = len(engine.calls)
    engine.gate.clear()
    answers: list[httpx.Response] = []
    stuck = threading.Thread(target=lambda: answers.append(ask(server, "the film")))
    stuck.start()
    while len(engine.calls) == before:
        threading.Event().wait(0.001)
    # The lane is taken and stays so until the gate opens: this one is answered before.
    late = ask(server, "terrible", "0.2")
    assert (late.status_code, late.json()["code"]) == (504, "deadline_exceeded")
    engine.gate.set()
    stuck.join(SAFETY_S)
    assert answers[0].status_code == 200
    assert ask(server, "good").status_code == 200
    assert not engine.has_seen(bert_tokenizer().encode("terrible").ids)


def test_the_answer_comes_on_time_when_the_body_does_not(server: LocalServer, opener: Opener) -> None:
    before = len(opener.engine.calls)
    with socket.create_connection(server.address, timeout=SAFETY_S) as connection:
        connection.sendall(
            b"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            b'content-length: 1000\r\nx-request-timeout: 0.2\r\n\r\n{"inputs"'
        )
        # The bound on a slow arrival is the setting's 50 s: this answer is the header's.
        assert connection.recv(4096).startswith(b"HTTP/1.1 504 ")
    assert len(opener.engine.calls) == before


@pytest.mark.parametrize(("headers", "left_s"), [([], 25.0), ([(b"x-request-timeout", b"10 ")], 5.0)])
def test_the_time_that_the_arrival_took_counts(headers: list[tuple[bytes, bytes]], left_s: float) -> None:
    scope: dict[str, Any] = {"headers": headers}
    begin(scope, Exchange("id", "POST", "/predict", started_s=time.perf_counter() - 5))
    assert left_s - 1 < time_left_s(scope, 30.0) <= left_s


def test_who_arrived_too_late_is_told_so() -> None:
    scope: dict[str, Any] = {"headers": []}
    begin(scope, Exchange("id", "POST", "/predict", started_s=time.perf_counter() - 5))
    with pytest.raises(DeadlineExceeded):
        time_left_s(scope, 4.0)


def test_a_time_that_is_over_at_once_runs_nothing(server: LocalServer, opener: Opener) -> None:
    before = len(opener.engine.calls)
    assert ask(server, "good", "0.000000001").status_code == 504
    assert len(opener.engine.calls) == before


def test_the_setting_is_the_most(tmp_path: Path, opener: Opener) -> None:
    make_version(tmp_path)
    with local_server(model_store=tmp_path, open_engine=opener, request_timeout_s=0.2) as server:
        opener.engine.gate.clear()
        try:
            assert ask(server, "good", "3600").status_code == 504
        finally:
            opener.engine.gate.set()
