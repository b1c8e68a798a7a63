"""The load test by locust, in short: the real command and service, a server that lies, one that stands still.

Where much is asked, the real service has an engine that answers at once: a busy machine must not decide.
"""

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from load_tests import load
from load_tests.locust_mix import wrong_requests
from load_tests.service_process import ROOT, ServiceProcess, free_port
from load_tests.verdict import EXIT_CANNOT_RUN, EXIT_MET, EXIT_MISSED

LAX_MS = "30000"
INSTANT = ("-m", "load_tests.front_server", "valence")


@pytest.fixture(scope="module")
def server() -> Iterator[ServiceProcess]:
    with ServiceProcess(command=INSTANT, request_timeout_s=300) as started:
        started.wait_ready()
        yield started


def verdict_in(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
    return read


def rows_in(file: Path) -> dict[str, dict[str, str]]:
    """The rows of locust's table, by name."""
    with file.open(encoding="utf-8", newline="") as lines:
        return {row["Name"]: row for row in csv.DictReader(lines)}


def test_make_load_starts_the_service_and_leaves_a_report(tmp_path: Path) -> None:
    arguments = ["--rate", "8", "--seconds", "4", "--slo-ms", LAX_MS, "--out", str(tmp_path)]
    assert load.main(arguments) == EXIT_MET
    (phase,) = verdict_in(tmp_path)["phases"]
    assert phase["outcomes"]["answered"] > 0
    rows = rows_in(tmp_path / "locust_stats.csv")
    assert (
        int(rows["Aggregated"]["Request Count"]) == sum(phase["outcomes"].values()) + phase["wrong_requests"]
    )
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_each_kind_is_asked_and_wrong_requests_are_right_when_refused(
    server: ServiceProcess, tmp_path: Path
) -> None:
    arguments = ["--host", server.url, "--rate", "60", "--seconds", "4", "--slo-ms", LAX_MS]
    assert load.main([*arguments, "--out", str(tmp_path)]) == EXIT_MET
    (phase,) = verdict_in(tmp_path)["phases"]
    assert phase["untrue"] == 0
    assert phase["refused_rightly"] == phase["wrong_requests"] > 0
    rows = rows_in(tmp_path / "locust_stats.csv")
    # About 240 were sent, and of a hundred one is of each wrong kind.
    assert {one.kind for one in wrong_requests()} | {"sentence", "review", "list"} <= set(rows)
    assert {name: row["Failure Count"] for name, row in rows.items() if row["Failure Count"] != "0"} == {}


def test_an_objective_that_cannot_hold_is_missed(server: ServiceProcess, tmp_path: Path) -> None:
    arguments = ["--host", server.url, "--seconds", "1", "--rate", "20", "--slo-ms", "0.001"]
    assert load.main([*arguments, "--out", str(tmp_path)]) == EXIT_MISSED
    assert verdict_in(tmp_path)["exit_code"] == EXIT_MISSED


class _Liar(BaseHTTPRequestHandler):
    """Says 200 to everything, quickly, with no prediction in it."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that the library gave
        pass


def test_a_server_that_only_says_200_is_found_out(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Liar) as liar:
        thread = threading.Thread(target=liar.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{liar.server_port}"
            code = load.main(["--host", url, "--seconds", "1", "--rate", "20", "--out", str(tmp_path)])
        finally:
            liar.shutdown()
            thread.join()
    (phase,) = verdict_in(tmp_path)["phases"]
    assert code == EXIT_MISSED
    assert phase["outcomes"]["answered"] == phase["refused_rightly"] == 0
    assert phase["untrue"] == sum(phase["outcomes"].values()) + phase["wrong_requests"] > 0


def test_what_cannot_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    assert load.main(["--host", nobody, "--out", str(tmp_path)]) == EXIT_CANNOT_RUN
    assert "is not ready" in capsys.readouterr().err


def standing_still(pids: Sequence[int], over: threading.Event, still_s: list[float]) -> None:
    """Freeze one of the processes, in turns, one second in five."""
    for pid in itertools.cycle(pids):
        if over.wait(4):
            return
        began_s = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(1)  # this is what is measured, and no wait for something
        finally:
            os.kill(pid, signal.SIGCONT)
        still_s.append(time.monotonic() - began_s)


def test_neither_a_server_nor_a_generator_that_stands_still_can_hide_it(
    server: ServiceProcess, tmp_path: Path
) -> None:
    """At 50 requests a second, frozen one second in five, the true p90 is half of the freeze."""
    files = f"{ROOT / 'load_tests/locustfile.py'},{ROOT / 'tests/closed_loop_user.py'}"
    command = [sys.executable, "-m", "locust", "-f", files, "--headless", "--only-summary"]
    command += f"--host {server.url} --shape soak --mix sentences --rate 51 --seconds 10".split()
    command += [
        "--slo-ms",
        LAX_MS,
        "--verdict",
        str(tmp_path / "verdict.json"),
        "--csv",
        str(tmp_path / "locust"),
    ]
    over, still_s = threading.Event(), list[float]()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as locust:
        freezer = threading.Thread(target=standing_still, args=([server.pid, locust.pid], over, still_s))
        freezer.start()
        try:
            printed, _ = locust.communicate()
        finally:
            over.set()
            freezer.join()
    assert locust.returncode == EXIT_MET, printed.decode()
    rows = rows_in(tmp_path / "locust_stats.csv")
    (phase,) = verdict_in(tmp_path)["phases"]
    assert phase["outcomes"]["answered"] > 350, "about 500 were meant, whatever the server did"
    open_p90_ms, closed_p90_ms = phase["latency_ms"]["p90"], float(rows["closed loop"]["90%"])
    assert open_p90_ms > 0.25 * 1e3 * sum(still_s) / len(still_s)
    assert closed_p90_ms < open_p90_ms / 3, "a closed loop does not ask a server that stands still"
    assert float(rows["sentence"]["90%"]) == pytest.approx(open_p90_ms, rel=0.02), "locust's table agrees"
