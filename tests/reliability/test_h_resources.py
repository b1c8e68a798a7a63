"""H. Cores, threads, memory, open files and the log, in a process of its own."""

import os
import pty
import random
import signal
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from service.core import TokenBatch
from service.errors import StartupError
from service.metrics import Metrics
from service.predictor import Predictor
from service.settings import Settings
from tests.models import GOOD, PLAIN
from tests.reliability.gates import predict
from tests.reliability.processes import SERVE, by_shell, unheard
from tests.reliability.wire import connect, hang_up
from tests.server import SAFETY_S, Server, eventually, local_server, serving
from tests.service.stand_ins import Opener

REPOSITORY = Path(__file__).parents[2] / "model_store"


@contextmanager
def client_of(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=SAFETY_S, trust_env=False) as client:
        yield client


def processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def test_r49_an_idle_process_uses_no_processor(store: Path) -> None:
    """Less than 2 % of one core in 3 s after work; a pool that spins would use all of it."""
    with serving(model_store=store) as server, client_of(server) as client:
        for _ in range(10):
            assert predict(client).status_code == 200
        process = psutil.Process(server.process.pid)
        used_s, start_s = processor_s(process), time.monotonic()
        threading.Event().wait(3)
        share = (processor_s(process) - used_s) / (time.monotonic() - start_s)
    assert share < 0.02


def test_r50_mixed_lengths_and_sizes_need_no_more_than_the_warm_up(tmp_path: Path) -> None:
    """The model of the repository: the largest shapes are run before it is ready."""
    dice = random.Random(50)
    words = (*GOOD, *PLAIN)
    peaks: list[int] = []
    with serving(model_store=REPOSITORY) as server, client_of(server) as client:
        process = psutil.Process(server.process.pid)
        ready = process.memory_info().rss
        for half in range(2):
            peaks.append(0)
            for number in range(30):
                lengths = [
                    dice.choice([1, 4, 20, 60, 200 if number % 5 else 500]) for _ in range(dice.randint(1, 8))
                ]
                texts = [" ".join(dice.choices(words, k=length)) for length in lengths]
                assert predict(client, texts).status_code == 200
                peaks[half] = max(peaks[half], process.memory_info().rss)
    assert peaks[1] < 1.15 * peaks[0]  # how often both lanes run a long batch at once is left to the system
    assert peaks[0] < 1.25 * ready


def test_r51_inference_happens_on_the_lanes_alone(store: Path) -> None:
    """However many clients ask, and whatever thread the tokenizer uses."""
    opener, names = Opener(), set()

    def note(_: TokenBatch) -> None:
        names.add(threading.current_thread().name)

    with (
        local_server(open_engine=opener, model_store=store, lanes=2, threads_per_lane=1) as server,
        server.client() as client,
        ThreadPoolExecutor(40) as pool,
    ):
        opener.engine.fault = note
        texts = ["good film " * (1 + number) for number in range(200)]
        answers = list(pool.map(lambda text: predict(client, text), texts))
    assert {answer.status_code for answer in answers} == {200}
    assert len(names) <= 2
    assert all(name.startswith("lane") for name in names)


# --- three more


@pytest.mark.parametrize(
    "redirect",
    ["2>/dev/full", "2>&-", "0<&- 1>&- 2>&-", "2>&1 | :"],
    ids=["a full disk", "closed", "all closed", "a reader that left"],
)
@pytest.mark.parametrize("log_format", ["auto", "console"])
def test_a_log_that_cannot_be_written_is_no_reason_to_fail(
    store: Path, redirect: str, log_format: str
) -> None:
    """Started so, it serves, and ends with 0 when it is told to."""
    with unheard(redirect=redirect, model_store=store, log_format=log_format) as (process, client):
        assert predict(client).json()["predictions"][0]["label"] == "positive"
        if "|" in redirect:
            [child] = psutil.Process(process.pid).children() or [psutil.Process(process.pid)]
            child.send_signal(signal.SIGTERM)
        else:
            process.send_signal(signal.SIGTERM)
        assert process.wait(SAFETY_S) == 0


def test_a_log_that_nobody_reads_holds_nobody(store: Path) -> None:
    """The pipe is full: requests, health and SIGTERM go on, lines are left out, and their number is told."""
    reading, writing = os.pipe()
    try:
        with unheard(stderr=writing, model_store=store, log_format="json") as (process, client):
            os.set_blocking(writing, False)
            fill(writing)
            for _ in range(50):
                assert predict(client).status_code == 200
                assert client.get("/health/live").status_code == 200
            os.set_blocking(writing, True)  # the other end of it is the server's, too
            os.set_blocking(reading, False)
            drain(reading)
            assert predict(client).status_code == 200
            eventually(lambda: b"log lines lost" in drain(reading), "the lost lines are told")
            os.set_blocking(writing, False)
            fill(writing)
            process.send_signal(signal.SIGTERM)
            assert process.wait(SAFETY_S) == 0
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("log_format", ["console", "json"])
@pytest.mark.parametrize("stopped", [False, True], ids=["full", "Ctrl-S"])
def test_a_terminal_that_nobody_reads_holds_nobody(store: Path, log_format: str, stopped: bool) -> None:
    """As the pipe; and the descriptor that is shared with the shell still waits."""
    person, terminal = pty.openpty()
    own = os.open(os.ttyname(terminal), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    os.set_blocking(person, False)

    def stop() -> None:
        if stopped:
            termios.tcflow(terminal, termios.TCOOFF)
        else:
            fill(own)

    try:
        with unheard(stderr=terminal, model_store=store, log_format=log_format) as (process, client):
            stop()
            for _ in range(50):
                assert predict(client).status_code == 200
                assert client.get("/health/live").status_code == 200
            assert os.get_blocking(terminal)
            termios.tcflow(terminal, termios.TCOON)
            drain(person)
            assert predict(client).status_code == 200
            eventually(lambda: b"log lines lost" in drain(person), "the lost lines are told")
            stop()
            process.send_signal(signal.SIGTERM)
            assert process.wait(SAFETY_S) == 0
    finally:
        for number in (own, terminal, person):
            os.close(number)


def fill(writing: int) -> None:
    """Until nothing more goes in. Not more than a byte at the end, or a little room stays."""
    for size in (65_536, 4096, 1):
        try:
            while True:
                os.write(writing, b"x" * size)
        except BlockingIOError:
            pass


def drain(reading: int) -> bytes:
    received = b""
    try:
        while part := os.read(reading, 1 << 20):
            received += part
    except BlockingIOError:
        pass
    return received


def test_running_out_of_open_files_is_survived(store: Path) -> None:
    """Connections beyond are closed and cost no processor; when they go, all is as before."""
    with by_shell(f"ulimit -n 60; {SERVE}", model_store=store) as server, client_of(server) as client:
        assert server.event("few open files are allowed")["allowed"] == 60
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        process = psutil.Process(server.process.pid)
        before = process.num_fds()
        connections = [connect((host, int(port))) for _ in range(100)]
        eventually(lambda: process.num_fds() >= 59, "no file is left")
        used_s, start_s = processor_s(process), time.monotonic()
        threading.Event().wait(1)
        assert (processor_s(process) - used_s) / (time.monotonic() - start_s) < 0.2
        hang_up(connections)
        eventually(lambda: process.num_fds() <= before + 1, "the files are free again")
        assert predict(client).status_code == 200


def test_nothing_is_written_anywhere_and_nobody_is_told(store: Path, tmp_path: Path) -> None:
    """As a container with a read-only root wants it. onnxruntime would keep a database of events at home."""
    command = (
        f"cd / && PYTHONDONTWRITEBYTECODE=1 HOME={tmp_path} TMPDIR={tmp_path} PYTHONPATH=$OLDPWD {SERVE}"
    )
    with by_shell(command, model_store=store) as server, client_of(server) as client:
        assert predict(client).status_code == 200
        process = psutil.Process(server.process.pid)
        assert process.open_files() == []
        port = int(server.url.rpartition(":")[2])
        assert {one.laddr.port for one in process.net_connections()} == {port}, "it calls nobody"
    assert list(tmp_path.iterdir()) == []


def test_once_ready_it_needs_no_more_threads(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a limit on processes is reached later, long texts are read and files are listed all the same."""
    with local_server(model_store=store) as server, server.client() as client:

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for inputs in ("good", "good film " * 2_000, ["good film " * 2_000] * 20):
                assert predict(client, inputs).status_code == 200
            for path in ("/models", "/docs", "/health/ready", "/metrics"):
                assert client.get(path).status_code == 200


@pytest.mark.parametrize("failing", ["lane", "tokenize"])
async def test_a_start_without_threads_is_refused(
    store: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    real = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(failing) and not thread.name.endswith("0"):
            raise RuntimeError("can't start new thread")
        real(thread)

    predictor = Predictor(Settings(model_store=store, device="cpu", lanes=2, threads_per_lane=1), Metrics())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises((StartupError, RuntimeError), match="thread"):
        await predictor.start()
    assert predictor.unready_reason() is not None
    await predictor.stop(SAFETY_S)
