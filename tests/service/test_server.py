"""Start, drain and stop, and the bounds on connections."""

import json
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from service import server as server_module
from service.connections import RESERVED_CONNECTIONS
from service.errors import StartupError
from service.server import allow_connections, listen, url_of
from service.settings import Settings
from tests.models import make_version
from tests.reliability.processes import SERVE, by_shell
from tests.server import ROOT, SAFETY_S, LocalServer, environment, eventually, local_server, serving, starting
from tests.service.stand_ins import Opener

PREDICT = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    make_version(folder)
    return folder


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as made:
        yield made


def post(client: httpx.Client, text: str = "good") -> httpx.Response:
    return client.post("/predict", json={"inputs": text})


def held(
    server: LocalServer, opener: Opener, ask: Callable[[], "Future[httpx.Response]"]
) -> "Future[httpx.Response]":
    """Ask something that the engine holds until its gate is opened."""
    opener.engine.gate.clear()
    calls = len(opener.engine.calls)
    asked = ask()
    eventually(lambda: len(opener.engine.calls) > calls, "the engine was entered")
    return asked


def closes(connection: socket.socket) -> bytes:
    """Everything that comes until the other side closes."""
    connection.settimeout(SAFETY_S)
    received = b""
    while True:
        try:
            part = connection.recv(65536)
        except ConnectionResetError:
            return received
        if not part:
            return received
        received += part


def one_answer(connection: socket.socket) -> bytes:
    """One answer with a content length, head and body."""
    connection.settimeout(SAFETY_S)
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(
        int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
    )
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


# --- start


def test_r57_live_while_the_model_loads(store: Path) -> None:
    """Liveness answers at once; readiness and predictions wait for the model."""
    opener = Opener()
    opener.may_open.clear()
    with (
        local_server(open_engine=opener, ready=False, model_store=store) as server,
        server.client() as client,
    ):
        assert opener.opening.wait(SAFETY_S)
        assert client.get("/health/live").status_code == 200
        assert client.get("/metrics").status_code == 200
        ready = client.get("/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "unready", "reason": "starting"})
        assert client.get("/health").status_code == 503
        refused = post(client)
        assert (refused.status_code, refused.json()["code"]) == (503, "not_ready")
        assert int(refused.headers["retry-after"]) >= 1
        assert b"valence_ready 0.0" in client.get("/metrics").content
        opener.may_open.set()
        eventually(lambda: client.get("/health/ready").status_code == 200, "ready")
        assert post(client).status_code == 200
        assert b"valence_ready 1.0" in client.get("/metrics").content


def damaged(store: Path, damage: Callable[[Path], None]) -> Path:
    damage(make_version(store))
    return store


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "model.onnx").unlink(), "model.onnx"),
        (
            lambda folder: (folder / "model.onnx").write_bytes((folder / "model.onnx").read_bytes()[:99]),
            "model.onnx",
        ),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json"),
    ],
    ids=["missing", "truncated", "wrong type"],
)
def test_r56_a_version_that_cannot_be_served_is_never_ready(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    """The process says why and exits with 1; readiness is not 200 at any moment."""
    with starting(model_store=damaged(tmp_path, damage)) as server:
        answers = set()
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            while server.process.poll() is None:
                try:
                    answers.add(client.get("/health/ready").status_code)
                except httpx.TransportError:
                    break
        assert server.wait() == 1
        assert answers <= {503}
        [failure] = server.events("start failed")
        assert reason in failure["reason"]
        assert failure["level"] == "error"
        assert server.events("stopped")[0]["exit_code"] == 1


def test_a_defect_while_loading_ends_the_process_with_its_place_in_the_log(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("xyzzy")

    with local_server(open_engine=broken, ready=False, model_store=store) as server:
        assert server.wait() == 1
    failures = [record for record in caplog.records if record.getMessage() == "start failed"]
    assert len(failures) == 1
    assert "RuntimeError" in failures[0].__dict__["fields"]["reason"]


def test_the_port_that_was_free_is_told(store: Path) -> None:
    with serving(model_store=store) as server:
        assert httpx.get(f"{server.url}/health/live", trust_env=False).status_code == 200
        assert server.event("ready on ")["event"] == f"ready on {server.url}"


def test_a_port_that_is_taken_is_told(store: Path) -> None:
    with closing(listen("127.0.0.1", 0)[0]) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f":{port}: Address already in use"):
            listen("127.0.0.1", port)
    with pytest.raises(StartupError, match=r"cannot listen on a\.\.b:0: not the name of a host"):
        listen("a..b", 0)
    with pytest.raises(StartupError, match="cannot listen on no-such-host"):
        listen("no-such-host.invalid", 0)


def test_every_address_of_a_host_is_listened_on_by_one_port() -> None:
    sockets = listen("localhost", 0)
    try:
        assert len({one.getsockname()[1] for one in sockets}) == 1
        assert all(url_of(one).startswith("http://") for one in sockets)
    finally:
        for one in sockets:
            one.close()


def test_open_files_are_allowed_as_far_as_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (64, 1000)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(now=new))
    others = RESERVED_CONNECTIONS + 128
    assert allow_connections(300) == 300
    assert limits["now"] == (300 + others, 1000)
    assert allow_connections(100) == 100
    assert limits["now"] == (300 + others, 1000)
    assert allow_connections(5000) == 1000 - others
    assert limits["now"] == (1000, 1000)
    assert allow_connections(5000) == 1000 - others
    limits["now"] = (64, others)
    assert allow_connections(5000) == 1
    assert limits["now"] == (others, others)
    limits["now"] = (64, resource.RLIM_INFINITY)
    assert allow_connections(5000) == 5000
    limits["now"] = (16, 49)
    with pytest.raises(StartupError, match=r"49 open files are allowed \(ulimit -n\)"):
        allow_connections(1)


def test_where_too_few_files_may_be_open_the_reason_is_told(store: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f"ulimit -n 20; {SERVE}"],
        cwd=ROOT,
        env=environment(model_store=store, port=0),
        capture_output=True,
        timeout=SAFETY_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(b"valence: only 20 open files are allowed")
    assert done.stderr.count(b"\n") == 1


def test_where_few_files_may_be_open_fewer_connections_are_served(store: Path) -> None:
    """Health is reachable beyond them all the same, and all is well when they are gone."""
    with by_shell(f"ulimit -n 256; {SERVE}", model_store=store) as server:
        warning = server.event("few open files are allowed")
        most = warning["max_connections"]
        assert (warning["level"], warning["allowed"], warning["max_connections_set"]) == (
            "warning",
            256,
            2048,
        )
        assert warning["wanted"] - warning["allowed"] == 2048 - most > 0
        server.event("ready on ")
        connections = [
            socket.create_connection(address_of(server.url)) for _ in range(most + 2 * RESERVED_CONNECTIONS)
        ]
        with httpx.Client(base_url=server.url, timeout=SAFETY_S, trust_env=False) as client:
            with connections.pop(most) as first_beyond:
                assert closes(first_beyond) == b""
            assert is_live(server.url)
            assert post(client).json()["code"] == "crowded"
            hang_up(connections)
            eventually(lambda: post(client).status_code == 200, "served in full")


# --- stop


def test_sigterm_drains_and_ends_with_0(store: Path) -> None:
    """Readiness turns 503 at once, predictions go on, connections are ended with their answer."""
    with serving(model_store=store, drain_delay_s=600) as server:
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            assert post(client).headers.get("connection") is None
            server.process.send_signal(signal.SIGTERM)
            server.event("draining")
            ready = client.get("/health/ready")
            assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
            assert client.get("/health/live").status_code == 200
            answer = post(client)
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        server.process.send_signal(signal.SIGTERM)  # a second one cuts the delay short
        assert server.wait() == 0
        order = [
            line["event"] for line in server.lines if line["event"] in {"draining", "stopping", "stopped"}
        ]
        assert order == ["draining", "stopping", "stopped"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_it_is_stopped_in_the_same_way_by(store: Path, number: signal.Signals) -> None:
    """Ctrl-C, and the end of the terminal."""
    with serving(model_store=store) as server:
        server.process.send_signal(number)
        assert server.wait() == 0
        assert server.events("draining")
        assert server.events("stopped")[0]["exit_code"] == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_while_loading_stops_at_once(
    store: Path, caplog: pytest.LogCaptureFixture, signals: int
) -> None:
    opener = Opener()
    opener.may_open.clear()
    with local_server(open_engine=opener, ready=False, model_store=store, drain_delay_s=600.0) as server:
        assert opener.opening.wait(SAFETY_S)
        for _ in range(signals):
            server.ask_to_stop()
        eventually(lambda: server.server.should_exit, "stopping")
        opener.may_open.set()
        assert server.wait() == 0
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_the_end_of_a_terminal_that_was_to_be_ignored_is_ignored(store: Path) -> None:
    """`nohup valence serve`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the process gets it from this one
    try:
        with serving(model_store=store) as server:
            signal.signal(signal.SIGHUP, before)
            server.process.send_signal(signal.SIGHUP)
            assert httpx.get(f"{server.url}/health/ready", trust_env=False).status_code == 200
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0
            assert len(server.events("draining")) == 1
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_that_cut_everything_short_leave_no_trace(store: Path, pool: ThreadPoolExecutor) -> None:
    """One request is in a lane that never comes back, one has not arrived: both are ended, and no defect."""
    settings = {"model_store": store, "device": "cpu", "drain_delay_s": 600, "stop_timeout_s": 600}
    with (
        starting(module=["tests.service.endless"], **settings, request_timeout_s=600) as server,
        httpx.Client(base_url=server.url, timeout=SAFETY_S, trust_env=False) as client,
        socket.create_connection(address_of(server.url)) as unfinished,
    ):
        server.event("ready on ")
        unfinished.sendall(PREDICT + b"content-length: 100\r\n\r\n{")
        refused = pool.submit(post, client)
        two = 'valence_http_requests_in_flight{route="/predict"} 2.0'
        eventually(lambda: two in client.get("/metrics").text, "both are in flight")
        server.process.send_signal(signal.SIGTERM)
        server.event("draining")
        server.process.send_signal(signal.SIGTERM)
        server.event("stopping")
        server.process.send_signal(signal.SIGTERM)
        assert refused.result(SAFETY_S).status_code == 503
        server.process.send_signal(signal.SIGTERM)
        assert closes(unfinished) == b""
        assert server.wait() == 0
        assert [line for line in server.lines if line.get("level") == "error"] == []
        assert sorted(line["status"] for line in server.events("request")) == [499, 503]


def test_a_request_that_never_arrives_ends_with_the_stop_timeout(store: Path) -> None:
    with (
        serving(model_store=store, stop_timeout_s=0.1, request_timeout_s=600) as server,
        socket.create_connection(address_of(server.url)) as unfinished,
    ):
        unfinished.sendall(PREDICT + b"content-length: 100\r\n\r\n{")
        flying = 'valence_http_requests_in_flight{route="/predict"} 1.0'
        eventually(lambda: flying in httpx.get(f"{server.url}/metrics", trust_env=False).text, "in flight")
        server.process.send_signal(signal.SIGTERM)
        assert closes(unfinished) == b""
        assert server.wait() == 0
        assert [line for line in server.lines if line.get("level") == "error"] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_to_the_very_last_moment_do_not_change_the_exit_code(
    store: Path, number: signal.Signals
) -> None:
    with serving(model_store=store) as server:
        while server.process.poll() is None:
            server.process.send_signal(number)
            time.sleep(0.001)  # not faster than they can be heard
        assert server.wait() == 0


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def test_a_load_that_never_comes_back_does_not_hold_the_end(store: Path) -> None:
    with starting(module=["tests.service.endless_load"], model_store=store, device="cpu") as server:
        assert httpx.get(f"{server.url}/health/live", timeout=SAFETY_S, trust_env=False).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert server.events("stopped")


def test_a_store_that_does_not_answer_holds_neither_a_caller_nor_the_end(store: Path) -> None:
    """Nor a second caller, nor the pages that another thread makes."""
    settings = {"model_store": store, "device": "cpu", "request_timeout_s": 1.0}
    with (
        starting(module=["tests.service.hung_store"], **settings) as server,
        httpx.Client(base_url=server.url, timeout=SAFETY_S, trust_env=False) as client,
    ):
        server.event("ready on ")
        for _ in range(2):
            late = client.get("/models")
            assert (late.status_code, late.json()["code"]) == (504, "deadline_exceeded")
        assert client.get("/openapi.json").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert server.events("stopped")


def is_live(url: str) -> bool:
    """Where there are too many connections a new one is closed at once."""
    try:
        return httpx.get(f"{url}/health/live", timeout=SAFETY_S, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize(
    ("seen", "number"),
    [
        (b"import 'asyncio'", signal.SIGINT),
        (b"import 'pydantic'", signal.SIGHUP),
        (b"import 'uvicorn'", signal.SIGTERM),
    ],
)
def test_a_signal_before_the_server_is_there_ends_with_0(
    store: Path, seen: bytes, number: signal.Signals
) -> None:
    """While the modules load."""
    process = subprocess.Popen(
        [sys.executable, "-v", "-m", "service", "serve"],
        env=environment(port=0, model_store=store),
        cwd=ROOT,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        assert any(line.startswith(seen) for line in process.stderr)
        process.send_signal(number)
        process.communicate(timeout=SAFETY_S)
        assert process.returncode == 0
    finally:
        process.kill()


@pytest.mark.parametrize(("command", "code"), [("serve", 0), ("predict", 128 + signal.SIGTERM)])
def test_the_first_process_of_a_container_hears_a_signal_while_modules_load(
    store: Path, command: str, code: int
) -> None:
    """It is not ended by one for which it has no handler."""
    unshare = [shutil.which("unshare") or "unshare", "--pid", "--fork"]
    if subprocess.run([*unshare, sys.executable, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip("a namespace of processes may not be made here")
    process = subprocess.Popen(
        [*unshare, sys.executable, "-v", "-m", "service", command],
        env=environment(port=0, model_store=store),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        assert any(line.startswith(b"import 'asyncio'") for line in process.stderr)
        [first] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        process.communicate(timeout=SAFETY_S)
        assert process.returncode == code
    finally:
        process.kill()


def test_what_was_accepted_is_answered_before_the_end(store: Path, pool: ThreadPoolExecutor) -> None:
    opener = Opener()
    with local_server(open_engine=opener, model_store=store, lanes=1) as server, server.client() as client:
        running = held(server, opener, lambda: pool.submit(post, client))
        waiting = pool.submit(post, client, "bad")
        eventually(lambda: server.life.predictor.unready_reason() is None, "alive")
        eventually(lambda: in_flight(server) == 2, "both are in flight")
        server.ask_to_stop()
        eventually(lambda: server.server.should_exit, "stopping")
        assert server.thread.is_alive()
        opener.engine.gate.set()
        assert [one.result(SAFETY_S).status_code for one in (running, waiting)] == [200, 200]
        assert server.wait() == 0
        assert opener.engine.closed.is_set()


def test_after_the_drain_delay_no_more_is_taken(store: Path, pool: ThreadPoolExecutor) -> None:
    """An open connection is not closed under a request, but the request is refused."""
    opener = Opener()
    with local_server(open_engine=opener, model_store=store, lanes=1) as server, server.client() as client:
        running = held(server, opener, lambda: pool.submit(post, client))
        with socket.create_connection(server.address) as connection:
            body = b'{"inputs": "good"}'
            connection.sendall(PREDICT + b"content-length: %d\r\n\r\n" % len(body))
            eventually(lambda: in_flight(server) == 2, "the head was read")
            server.ask_to_stop()
            eventually(lambda: server.life.unready_reason() == "stopping", "stopping")
            connection.sendall(body)
            head, _, answer = closes(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert json.loads(answer)["code"] == "stopping"
        opener.engine.gate.set()
        assert running.result(SAFETY_S).status_code == 200
        assert server.wait() == 0


@pytest.mark.parametrize("by", ["timeout", "signal"])
def test_a_batch_that_does_not_end_holds_nobody_back(store: Path, pool: ThreadPoolExecutor, by: str) -> None:
    """After the stop timeout, or a further signal, its requests are refused and the process ends."""
    opener = Opener()
    stop_timeout_s = 0.05 if by == "timeout" else 600.0
    with (
        local_server(open_engine=opener, model_store=store, lanes=1, stop_timeout_s=stop_timeout_s) as server,
        server.client() as client,
    ):
        running = held(server, opener, lambda: pool.submit(post, client))
        server.ask_to_stop()
        if by == "signal":
            eventually(lambda: server.server.should_exit, "stopping")
            server.ask_to_stop()
        refused = running.result(SAFETY_S)
        assert (refused.status_code, refused.json()["code"]) == (503, "stopping")
        assert server.wait() == 0
        opener.engine.gate.set()


def test_a_lane_that_is_left_behind_does_not_abort_the_process(store: Path, pool: ThreadPoolExecutor) -> None:
    """A call that never comes back from onnxruntime: the exit code is that of a clean stop all the same."""
    settings = {"model_store": store, "device": "cpu", "stop_timeout_s": 0.1}
    with (
        starting(module=["tests.service.endless"], **settings) as server,
        httpx.Client(base_url=server.url, timeout=SAFETY_S, trust_env=False) as client,
    ):
        server.event("ready on ")
        refused = pool.submit(post, client)
        eventually(lambda: "valence_lanes_busy 1.0" in client.get("/metrics").text, "a busy lane")
        server.process.send_signal(signal.SIGTERM)
        assert refused.result(SAFETY_S).status_code == 503
        assert server.wait() == 0
        assert server.events("stopped")


def test_a_second_signal_ends_the_wait_for_a_call_that_hangs(store: Path) -> None:
    """Its client has left already: nothing is open, and the end waits for the lane alone."""
    opener = Opener()
    settings: dict[str, Any] = {"model_store": store, "lanes": 1, "stop_timeout_s": 600}
    with local_server(open_engine=opener, **settings) as server, server.client() as client:
        opener.engine.gate.clear()
        late = client.post("/predict", json={"inputs": "good"}, headers={"x-request-timeout": "0.1"})
        assert late.status_code == 504
        client.close()
        server.ask_to_stop()
        eventually(lambda: server.life.predictor.unready_reason() == "stopping", "the end waits for the lane")
        server.ask_to_stop()
        assert server.wait() == 0
        opener.engine.gate.set()


def in_flight(server: LocalServer) -> float:
    return server.metric("valence_http_requests_in_flight", route="/predict")


# --- overload and stuck engines


def test_r08_r09_r58_a_full_queue_leaves_the_service_live_and_ready(
    store: Path, pool: ThreadPoolExecutor
) -> None:
    """An overflow is 503 with Retry-After, counted as a refusal, and no error is logged."""
    opener = Opener()
    with (
        local_server(
            open_engine=opener, model_store=store, lanes=1, max_queue_items=2, max_texts=2, log_level="debug"
        ) as server,
        server.client() as client,
    ):
        running = held(server, opener, lambda: pool.submit(post, client))
        queued = pool.submit(client.post, "/predict", json={"inputs": ["good", "bad"]})
        eventually(lambda: b"valence_queue_items 2.0" in client.get("/metrics").content, "the queue is full")
        for inputs in ("apple", ["apple"]):  # both shapes obey the same rule
            refused = client.post("/predict", json={"inputs": inputs})
            assert (refused.status_code, refused.json()["code"]) == (503, "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
        assert client.get("/health/live").status_code == 200
        assert client.get("/health/ready").status_code == 200
        opener.engine.gate.set()
        assert [one.result(SAFETY_S).status_code for one in (running, queued)] == [200, 200]
        assert server.metric("valence_refusals_total", reason="queue_full") == 2
        assert server.metric("valence_refusals_total", reason="internal_error") == 0
        assert server.metric("valence_http_requests_total", route="/predict", status="503") == 2


def test_r53_r54_health_and_metrics_answer_while_predictions_are_held(
    store: Path, pool: ThreadPoolExecutor
) -> None:
    opener = Opener()
    with local_server(open_engine=opener, model_store=store) as server, server.client() as client:
        opener.engine.gate.clear()
        asked = [pool.submit(post, client, f"good {number}") for number in range(32)]
        eventually(lambda: in_flight(server) == 32, "all are held")
        for path in ("/health/live", "/health/ready", "/health", "/metrics", "/models"):
            assert client.get(path).status_code == 200
        assert not any(one.done() for one in asked)
        opener.engine.gate.set()
        assert {one.result(SAFETY_S).status_code for one in asked} == {200}


def test_r10_the_deadline_is_kept_while_a_batch_hangs(store: Path, pool: ThreadPoolExecutor) -> None:
    """The waiting text is refused at its deadline and never run; an overdue batch makes readiness false."""
    opener = Opener()
    with (
        local_server(open_engine=opener, model_store=store, lanes=1, request_timeout_s=0.2) as server,
        server.client() as client,
    ):
        running = held(server, opener, lambda: pool.submit(post, client))
        late = post(client, "outstanding")
        assert (late.status_code, late.json()["code"]) == (504, "deadline_exceeded")
        assert running.result(SAFETY_S).status_code == 504
        eventually(lambda: client.get("/health/ready").status_code == 503, "overdue")
        assert "a batch has been running" in client.get("/health/ready").json()["reason"]
        assert client.get("/health/live").status_code == 200
        calls = len(opener.engine.calls)
        opener.engine.gate.set()
        eventually(lambda: client.get("/health/ready").status_code == 200, "ready again")
        assert post(client).status_code == 200
        assert len(opener.engine.calls) == calls + 1, "only the last one was run"


def test_r02_r03_an_engine_that_fails_fails_that_text_alone(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opener = Opener()
    with local_server(open_engine=opener, model_store=store) as server, server.client() as client:

        def fault(_: object) -> None:
            raise MemoryError("xyzzy")

        opener.engine.fault = fault
        failed = post(client, "good xyzzy")
        assert (failed.status_code, failed.json()["code"]) == (500, "engine_failed")
        listed = client.post("/predict", json={"inputs": ["good"]})
        assert listed.json()["predictions"][0]["error"]["code"] == "engine_failed"
        opener.engine.fault = lambda _: None
        assert post(client).status_code == 200
        assert client.get("/health/ready").status_code == 200
    assert b"xyzzy" not in failed.content + listed.content


# --- clients that go


def hang_up(connections: list[socket.socket]) -> None:
    """Reset the connections, as a client does that is killed."""
    for connection in connections:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        connection.close()


def test_r13_r14_what_a_client_leaves_behind_is_not_run(store: Path, pool: ThreadPoolExecutor) -> None:
    """With every layer in place: at most the batch under way is run, and the gauges go back."""
    opener = Opener()
    with local_server(open_engine=opener, model_store=store, lanes=1) as server, server.client() as client:
        for turn in (1, 2, 3):
            neighbour = held(server, opener, lambda: pool.submit(post, client))
            calls = len(opener.engine.calls)
            connections = [socket.create_connection(server.address) for _ in range(50)]
            for number, connection in enumerate(connections):
                body = json.dumps({"inputs": f"good {number}"}).encode()
                connection.sendall(PREDICT + b"content-length: %d\r\n\r\n" % len(body) + body)
            eventually(lambda: b"valence_queue_items 50.0" in client.get("/metrics").content, "all wait")
            assert in_flight(server) == 51
            hang_up(connections)
            eventually(lambda: in_flight(server) == 1, "all are gone")
            assert b"valence_queue_items 0.0" in client.get("/metrics").content
            opener.engine.gate.set()
            assert neighbour.result(SAFETY_S).status_code == 200
            assert len(opener.engine.calls) == calls, "nothing was run for nobody"
            eventually(lambda: in_flight(server) == 0, "nothing is in flight")
            gone = server.metric("valence_http_requests_total", route="/predict", status="499")
            assert gone == 50 * turn
            assert server.metric("valence_refusals_total", reason="client_gone") == 50 * turn


def test_a_client_that_goes_while_it_sends(store: Path) -> None:
    with local_server(model_store=store) as server:
        connection = socket.create_connection(server.address)
        connection.sendall(PREDICT + b"content-length: 100\r\n\r\n{")
        eventually(lambda: in_flight(server) == 1, "the head was read")
        hang_up([connection])
        eventually(lambda: in_flight(server) == 0, "gone")
        assert server.metric("valence_http_requests_total", route="/predict", status="499") == 1


# --- connections


def test_r62_an_idle_connection_is_kept_as_long_as_it_is_set(store: Path) -> None:
    """Longer than a proxy keeps it by default; the end of the time is watched with a short one."""
    assert Settings().keep_alive_s == 75
    with (
        local_server(model_store=store, keep_alive_s=1) as server,
        socket.create_connection(server.address) as used,
        socket.create_connection(server.address) as unused,
    ):
        for _ in range(3):
            used.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
            assert one_answer(used).startswith(b"HTTP/1.1 200")
        assert (closes(used), closes(unused)) == (b"", b"")


def test_a_head_without_end_is_refused(store: Path) -> None:
    with local_server(model_store=store) as server:
        for start in (b"GET /" + b"x" * 10, b"GET / HTTP/1.1\r\nhost: x\r\nx-big: ", b"GET / HTTP/1.1\r\n"):
            with socket.create_connection(server.address) as connection:
                connection.sendall(start)
                piece = b"a: b\r\n" * 2000 if start.endswith(b"\n") else b"x" * 12_000
                for _ in range(2 * Settings().max_head_bytes // len(piece)):
                    try:
                        connection.sendall(piece)
                    except OSError:
                        break
                assert closes(connection).startswith(b"HTTP/1.1 431 ")
        with server.client() as client:
            assert client.get("/health/live", headers={"x-big": "x" * 60_000}).status_code == 200


def test_trailers_without_end_are_refused(store: Path) -> None:
    """What comes behind the chunks of a body is bounded as a head is, and not kept."""
    with local_server(model_store=store) as server:
        with socket.create_connection(server.address) as connection:
            connection.sendall(PREDICT + b"transfer-encoding: chunked\r\n\r\n12\r\n" + b'{"inputs": "good"}')
            connection.sendall(b"\r\n0\r\n")
            for _ in range(64):
                try:
                    connection.sendall(b"a: b\r\n" * 2000)
                except OSError:
                    break
            assert closes(connection).startswith(b"HTTP/1.1 431 ")
        eventually(lambda: in_flight(server) == 0, "nothing is in flight")
        with socket.create_connection(server.address) as connection:
            connection.sendall(PREDICT + b"transfer-encoding: chunked\r\n\r\n12\r\n" + b'{"inputs": "good"}')
            connection.sendall(b"\r\n0\r\na: b\r\n\r\n")
            assert one_answer(connection).startswith(b"HTTP/1.1 200 ")


def test_empty_lines_do_not_keep_a_connection(store: Path) -> None:
    """They are allowed before a request, and are no request."""
    with (
        local_server(model_store=store, keep_alive_s=1) as server,
        socket.create_connection(server.address) as fresh,
        socket.create_connection(server.address) as used,
    ):
        used.sendall(b"\r\nGET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert one_answer(used).startswith(b"HTTP/1.1 200")
        for connection in (fresh, used):
            connection.sendall(b"\r\n")
        assert (closes(fresh), closes(used)) == (b"", b"")


def test_a_client_that_leaves_with_requests_in_line_is_no_defect(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = b'{"inputs": "good"}'
    request = PREDICT + b"content-length: %d\r\n\r\n" % len(body) + body
    opener = Opener()
    with local_server(open_engine=opener, model_store=store, lanes=1) as server:
        opener.engine.gate.clear()
        calls = len(opener.engine.calls)
        with socket.create_connection(server.address) as connection:
            connection.sendall(request * 3)
            eventually(lambda: len(opener.engine.calls) > calls, "the engine was entered")
        eventually(lambda: not server.server.server_state.connections, "the connection is gone")
        opener.engine.gate.set()
        eventually(lambda: in_flight(server) == 0, "nothing is in flight")
        eventually(lambda: not server.server.server_state.tasks, "no task is left")
        # The first may be done before its client is missed; those behind it are never begun.
        statuses = ("200", "499", "500")
        ended = [
            server.metric("valence_http_requests_total", route="/predict", status=one) for one in statuses
        ]
        assert sorted(ended) == [0, 0, 1]
        assert ended[2] == 0
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("start", [b"GET /health", PREDICT, PREDICT + b"content-length: 100\r\n\r\n{"])
def test_a_request_that_does_not_arrive_is_given_up(store: Path, start: bytes) -> None:
    with local_server(model_store=store, request_timeout_s=0.2) as server:
        with socket.create_connection(server.address) as connection:
            connection.sendall(start)
            assert closes(connection).startswith(b"HTTP/1.1 408 ")
        eventually(lambda: in_flight(server) == 0, "nothing is in flight")
        with server.client() as client:
            assert post(client).status_code == 200


def test_a_request_that_arrives_in_pieces_is_answered(store: Path) -> None:
    with local_server(model_store=store) as server, socket.create_connection(server.address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        body = b'{"inputs": "good"}'
        request = PREDICT + b"content-length: %d\r\n\r\n" % len(body) + body
        for _ in range(2):
            for position in range(len(request)):
                connection.sendall(request[position : position + 1])
            assert one_answer(connection).startswith(b"HTTP/1.1 200 ")
        connection.sendall(request * 3)  # pipelined
        received = b""
        while received.count(b'"predictions"') < 3:
            received += connection.recv(65536)
        assert received.count(b"HTTP/1.1 200 ") == 3


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_wish_for_another_protocol_is_ignored(store: Path, protocol: bytes, at_once: bool) -> None:
    """The HTTP client of Java asks for HTTP/2 so; uvicorn would lose the body."""
    with local_server(model_store=store) as server, socket.create_connection(server.address) as connection:
        body = b'{"inputs": "good"}'
        head = PREDICT + b"Connection: Upgrade, HTTP2-Settings\r\nUPGRADE: %b\r\n" % protocol
        request = head + b"content-length: %d\r\n\r\n" % len(body) + body
        for _ in range(2):
            size = len(request) if at_once else 1
            for position in range(0, len(request), size):
                connection.sendall(request[position : position + size])
            answer = one_answer(connection)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b'"positive"' in answer
        wish = b"host: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
        connection.sendall(b"GET /health/live HTTP/1.1\r\n" + wish)
        assert one_answer(connection).startswith(b"HTTP/1.1 200 ")
        assert server.metric("valence_http_requests_total", route="/predict", status="200") == 2


@pytest.mark.parametrize("target", [b"example.org:443", b"/predict"])
def test_no_tunnel_is_dug(store: Path, target: bytes) -> None:
    with local_server(model_store=store) as server:
        with socket.create_connection(server.address) as connection:
            connection.sendall(b"CONNECT %b HTTP/1.1\r\nhost: x\r\n\r\n" % target)
            assert one_answer(connection).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 405 "))
        with server.client() as client:
            assert post(client).status_code == 200


def test_connections_too_many_get_health_alone(store: Path) -> None:
    with local_server(model_store=store, max_connections=2) as server:
        connections = [socket.create_connection(server.address) for _ in range(2)]
        eventually(lambda: len(server.server.server_state.connections) == 2, "both are taken")
        with server.client() as client:
            assert client.get("/health/live").status_code == 200
            refused = post(client)
            assert (refused.status_code, refused.json()["code"]) == (503, "crowded")
            assert refused.headers["connection"] == "close"
        hang_up(connections)
        eventually(lambda: len(server.server.server_state.connections) == 0, "all are gone")
        with server.client() as client:
            assert post(client).status_code == 200


@pytest.mark.parametrize(
    "said", [b"", b"GET /health/live HTTP/1.1\r\nhost: "], ids=["nothing", "half a head"]
)
def test_who_asks_for_nothing_does_not_keep_health_away(store: Path, said: bytes) -> None:
    """The oldest beyond the limit gives way to who comes; those within it stay, whatever comes."""
    with local_server(model_store=store, max_connections=2) as server:
        served = server.server.server_state.connections
        connections: list[socket.socket] = []
        for _ in range(2 + RESERVED_CONNECTIONS):
            connections.append(socket.create_connection(server.address))
            connections[-1].sendall(said)
        eventually(lambda: len(served) == 2 + RESERVED_CONNECTIONS, "all are taken")
        within, beyond = connections[:2], connections[2:]
        for first in beyond[:3]:
            with server.client() as client:
                assert client.get("/health/live").status_code == 200
            assert closes(first) == b""
            connections.append(socket.create_connection(server.address))  # in the place of the client
            connections[-1].sendall(said)
            eventually(lambda: len(served) == 2 + RESERVED_CONNECTIONS, "all are taken again")
        for one in within:
            rest = b"x\r\n\r\n" if said else b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
            one.sendall(rest)
            assert one_answer(one).startswith(b"HTTP/1.1 200 ")
        hang_up(connections)
        eventually(lambda: not served, "all are gone")


# --- defects of the loop


def test_what_nobody_handles_is_logged_without_its_message(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with local_server(model_store=store) as server:
        told = threading.Event()

        def fail() -> None:
            server.loop.call_soon(told.set)
            raise ValueError("xyzzy")

        server.loop.call_soon_threadsafe(fail)
        assert told.wait(SAFETY_S)
    [record] = [record for record in caplog.records if record.getMessage() == "unhandled"]
    assert record.levelno == logging.ERROR
    assert "xyzzy" not in str(record.__dict__["fields"])
    assert record.name == server_module.__name__


def test_the_lag_of_the_loop_is_measured(store: Path) -> None:
    with local_server(model_store=store) as server:
        eventually(lambda: server.metric("valence_event_loop_lag_seconds_count") >= 2, "measured twice")
