"""I. Start and stop of the process, as a shell, a container or an impatient operator does it."""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from service.settings import Settings
from tests.models import make_version
from tests.reliability.gates import hold, predict
from tests.reliability.processes import SERVE, by_shell
from tests.reliability.wire import connect, reply, request
from tests.server import ROOT, SAFETY_S, Server, environment, eventually, local_server, serving, starting
from tests.service.stand_ins import Opener


@contextmanager
def client_of(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=SAFETY_S, trust_env=False) as client:
        yield client


def test_r59_r64_there_are_no_workers_to_supervise(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, whatever the environment says to other servers; a setting that is none is told."""
    assert "workers" not in Settings.model_fields
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    monkeypatch.setenv("UVICORN_WORKERS", "4")
    with serving(model_store=store, workers=4) as server, client_of(server) as client:
        assert psutil.Process(server.process.pid).children(recursive=True) == []
        assert server.events("VALENCE_WORKERS is not a setting")
        assert predict(client).status_code == 200


def test_r59_a_load_that_holds_the_model_back_ends_nothing(store: Path) -> None:
    """However long it takes: nobody but liveness is asked whether the process lives, and it does."""
    opener = Opener()
    opener.may_open.clear()
    with (
        local_server(open_engine=opener, model_store=store, ready=False, request_timeout_s=0.1) as server,
        server.client() as client,
    ):
        assert opener.opening.wait(SAFETY_S)
        lag = server.metric("valence_event_loop_lag_seconds_count")
        eventually(
            lambda: server.metric("valence_event_loop_lag_seconds_count") > lag + 1, "deadlines have passed"
        )
        assert client.get("/health/live").status_code == 200
        assert server.thread.is_alive()
        opener.may_open.set()
        eventually(lambda: client.get("/health/ready").status_code == 200, "ready")


def test_r61_a_signal_reaches_the_server_that_a_shell_became(store: Path) -> None:
    """`exec`, as in `make serve`: the number that the shell had is the server's, and no shell is left."""
    with by_shell(SERVE, model_store=store) as server:
        process = psutil.Process(server.process.pid)
        assert "service" in process.cmdline()
        assert process.children() == []
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert server.events("stopped")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^serve:.*\n\texec ", makefile, re.MULTILINE)


# --- three more


def test_r65_kill_9_under_load_leaves_nothing_that_the_next_start_meets(store: Path, tmp_path: Path) -> None:
    """The store is as it was, the folder of passing files is empty, and the same port is taken at once."""
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    port = 0
    for _ in range(3):
        command = f"TMPDIR={tmp_path} {SERVE}"
        with by_shell(command, model_store=store, port=port) as server, client_of(server) as client:
            port = int(server.url.rpartition(":")[2])
            assert predict(client).status_code == 200
            over = threading.Event()

            def ask(client: httpx.Client = client, over: threading.Event = over) -> None:
                while True:
                    try:
                        predict(client, ["good"] * 50)
                    except httpx.TransportError:
                        over.set()
                        return

            asking = threading.Thread(target=ask)
            asking.start()
            server.process.kill()
            assert over.wait(SAFETY_S)
            asking.join(SAFETY_S)
            assert server.wait() == -signal.SIGKILL
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before
    assert list(tmp_path.iterdir()) == []


def test_signals_without_end_end_it_once(store: Path) -> None:
    """A dozen at once, of both kinds, while it drains: the exit code is 0, and nothing is logged as wrong."""
    with serving(model_store=store, drain_delay_s=600) as server:
        server.process.send_signal(signal.SIGTERM)
        server.event("draining")
        for number in range(12):
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGTERM if number % 2 else signal.SIGINT)
        assert server.wait() == 0
        assert [line["event"] for line in server.lines if line.get("level") == "error"] == []


def test_a_signal_beyond_the_last_stage_still_closes_all(
    store: Path, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    """Drain, stop, give up, and one more, in one turn of the loop: an answer, a closed engine, no trace."""
    opener = Opener()
    with (
        local_server(open_engine=opener, model_store=store, lanes=1, drain_delay_s=600.0) as server,
        server.client() as client,
    ):
        held = hold(opener, client, pool)

        def ask_five_times() -> None:
            for _ in range(5):
                server.server.ask_to_stop()

        server.loop.call_soon_threadsafe(ask_five_times)
        refused = held.result(SAFETY_S)
        assert (refused.status_code, refused.json()["code"]) == (503, "stopping")
        assert server.wait() == 0
        opener.engine.gate.set()
    assert opener.engine.closed.is_set()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("variable", ["PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"])
def test_r65_metrics_in_files_of_several_processes_are_refused(
    store: Path, tmp_path: Path, variable: str
) -> None:
    """They would pile up, one set for each start; without the folder the start would be a bare trace."""
    ended = subprocess.run(
        [sys.executable, "-m", "service", "serve"],
        cwd=ROOT,
        env=environment(model_store=store, port=0) | {variable: str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=SAFETY_S,
    )
    assert ended.returncode == 2
    [said] = ended.stderr.splitlines()
    assert said.startswith(f"valence: {variable} is set: metrics would be kept in files")
    assert list(tmp_path.iterdir()) == []


def test_ended_while_it_still_starts_it_says_nothing_of_failure(store: Path) -> None:
    with starting(model_store=store) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert server.events("start failed") == []


def test_paused_longer_than_a_deadline_it_goes_on_as_before(store: Path) -> None:
    """As `docker pause` does, or a host that sleeps: a request sent meanwhile is answered afterwards."""
    settings = {"request_timeout_s": 0.5, "keep_alive_s": 75}
    with serving(model_store=store, **settings) as server, client_of(server) as client:
        assert predict(client).status_code == 200
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        server.process.send_signal(signal.SIGSTOP)
        eventually(lambda: psutil.Process(server.process.pid).status() == "stopped", "paused")
        with connect((host, int(port))) as connection:
            connection.sendall(request())
            threading.Event().wait(1)
            server.process.send_signal(signal.SIGCONT)
            assert reply(connection).status == 200
        assert predict(client).status_code == 200
        assert client.get("/health/ready").status_code == 200


def test_a_reason_with_a_path_that_is_not_utf_8_is_told(tmp_path: Path) -> None:
    """As text that can be sent: what readiness and the log say is what the start ended with."""
    folder = tmp_path / os.fsdecode(b"store \xff")
    folder.mkdir()
    make_version(folder)
    (make_version(folder, "broken") / "manifest.json").write_text("{}")
    opener = Opener()
    opener.may_open.clear()
    with (
        local_server(open_engine=opener, model_store=folder, ready=False) as server,
        server.client() as client,
    ):
        assert opener.opening.wait(SAFETY_S)
        broken, _ = client.get("/models").json()["models"]
        assert "store \\udcff/broken/1/manifest.json" in broken["problem"]
        (folder / "sentiment/1/model.onnx").write_bytes(b"")
        started = server.life.started
        opener.may_open.set()
        assert server.wait() == 1
    assert "store \\udcff/sentiment/1/model.onnx" in str(started.result())
