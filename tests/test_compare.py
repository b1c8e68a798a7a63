"""The comparison with other servers in its short form: Valence alone, nothing to install, no times."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from load_tests.compare.engine_alone import Bound
from load_tests.compare.report import Report, Turn
from load_tests.compare.servers import Server, ServerError
from load_tests.compare.wrk import MISSING, Load
from load_tests.service_process import free_port

ROOT = Path(__file__).parent.parent
SHORT = ["--only", "valence", "--seconds", "1", "--rounds", "1", "--connections", "1,4"]

needs_wrk = pytest.mark.skipif(shutil.which("wrk") is None, reason=MISSING)


def command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "load_tests.compare", "--out", str(out), "--cache", str(out), *arguments]


@needs_wrk
def test_the_short_form_measures_valence(tmp_path: Path) -> None:
    ran = subprocess.run(command(tmp_path, *SHORT), cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "valence: positive, negative, positive, negative" in ran.stdout
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert [(row["server"], row["connections"], row["failed"]) for row in result["rows"]] == [
        ("valence", 1, 0),
        ("valence", 4, 0),
    ]
    assert all(row["rate"] > 0 and row["server_cpu_ms"] > row["generator_cpu_ms"] for row in result["rows"])
    assert len(result["bounds"]) == 1
    assert (tmp_path / "result.md").read_text(encoding="utf-8") in ran.stdout


@needs_wrk
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_was_started(tmp_path: Path, number: signal.Signals) -> None:
    whole = command(tmp_path, *SHORT, "--rounds", "1000")
    with subprocess.Popen(whole, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert b"positive" in process.stdout.readline()  # the server has answered
            started = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            assert process.wait(60) == 128 + number
        finally:
            process.kill()
    assert started
    assert psutil.wait_procs(started, timeout=60)[1] == []


def test_a_name_that_nobody_has_is_refused(tmp_path: Path) -> None:
    ran = subprocess.run(
        command(tmp_path, "--only", "moses"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert "moses" in ran.stderr or MISSING in ran.stderr


# A server whose child has left the session and is deaf to SIGTERM; it answers with the child's id.
FAMILY = """
import http.server, json, subprocess, sys
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(99)"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(child.pid).encode())

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server_of(code: str, folder: Path) -> Server:
    port = free_port()
    return Server(
        [sys.executable, "-c", code, str(port)],
        environment=dict(os.environ),
        url=f"http://127.0.0.1:{port}/",
        cwd=folder,
        log=folder / "log",
    )


def test_no_process_of_a_server_is_left(tmp_path: Path) -> None:
    with server_of(FAMILY, tmp_path) as server:
        server.wait_ready({})
        child = psutil.Process(server.ask({}))
        assert child.is_running()
        server.hold()
    assert not child.is_running()


def test_a_server_that_is_held_goes_on_where_it_was(tmp_path: Path) -> None:
    with server_of(FAMILY, tmp_path) as server:
        server.wait_ready({})
        server.hold()
        held_s = server.cpu_s()
        assert server.cpu_s() == held_s > 0
        server.go_on()
        assert server.ask({}) == server.ask({})


def test_a_server_that_ends_shows_its_log(tmp_path: Path) -> None:
    with (
        server_of("raise SystemExit('no such model')", tmp_path) as server,
        pytest.raises(ServerError, match="no such model"),
    ):
        server.wait_ready({})


def test_a_ratio_compares_within_a_round() -> None:
    def turn(number: int, server: str, rate: int) -> Turn:
        load = Load(rate, 1.0, p50_ms=1.0, p99_ms=2.0, not_200=0, lost=0, cpu_s=0.1)
        return Turn(number, server, 64, load, server_cpu_s=1.0)

    one = {"about": "", "versions": {}, "rss_mb": 1.0}
    # The machine is ten times slower in the last round: the ratio of the medians would be 3.
    turns = [turn(0, "valence", 200), turn(0, "other", 100), turn(1, "valence", 300), turn(1, "other", 150)]
    turns += [turn(2, "valence", 30), turn(2, "other", 15)]
    report = Report("", "", "", 1.0, {"valence": one, "other": one}, turns, [Bound(400.0, 800.0, 4.0)] * 3)
    assert [(row.server, row.rate, row.ratio) for row in report.rows()] == [
        ("valence", 200, 1.0),
        ("other", 100, 2.0),
    ]
    assert "| other | 100 |" in report.as_markdown()
