"""The yardsticks in their short form: that each works, and that a failure is told. No times."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from load_tests import bench, goals
from load_tests.bench_parts import Part, all_parts, ratios
from load_tests.compare.wrk import MISSING, write_bodies
from load_tests.cpu_time import CpuTime
from load_tests.driven import drive
from load_tests.knee import Seen, Step
from load_tests.record import Record, read
from load_tests.service_process import ROOT, ServiceProcess

# What a second on any machine can tell; the rest wants other servers, 64 connections or a real overload.
ALWAYS = {"served singles", "served lists", "lone latency", "idle", "goodput sentences", "forming", "import"}
ALWAYS |= {"short beside long", "single beside list", "start", "memory", "neighbours", "quantisation"}

needs_wrk = pytest.mark.skipif(shutil.which("wrk") is None, reason=MISSING)


def command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "load_tests.bench", "--short", "--out", str(out), *arguments]


@needs_wrk
def test_every_part_runs_in_short(tmp_path: Path) -> None:
    ran = subprocess.run(command(tmp_path), cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    kept = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert list(kept["parts"]) == [part.name for part in all_parts()]
    assert {name: part["problem"] for name, part in kept["parts"].items() if part["problem"]} == {}
    assert set(kept["goals"]) >= ALWAYS
    assert all(math.isfinite(goal["figure"]) for goal in kept["goals"].values())
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert all(f"\n## {part['record']['title']}" in report for part in kept["parts"].values())
    table = goals.table({name: goal["figure"] for name, goal in kept["goals"].items()})
    assert all(line in report and line in ran.stdout for line in table)


@needs_wrk
def test_a_signal_ends_what_was_started(tmp_path: Path) -> None:
    with subprocess.Popen(
        command(tmp_path, "--only", "knee"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            started = wait_for_server(psutil.Process(process.pid))
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert psutil.wait_procs(started, timeout=60)[1] == []


def wait_for_server(process: psutil.Process) -> list[psutil.Process]:
    """What it has started, once a server is among them."""
    give_up_s = time.monotonic() + 60
    while time.monotonic() < give_up_s:
        started = process.children(recursive=True)
        if len(started) > 1:
            return started
        time.sleep(0.02)
    raise AssertionError("no server was started")


def test_without_wrk_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bench.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"cannot run: {MISSING}\n"
    assert list(tmp_path.iterdir()) == []


@needs_wrk
def test_a_part_that_nobody_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--out", str(tmp_path), "--only", "kneee"]) == 2
    assert "kneee" in capsys.readouterr().err


def test_a_part_that_fails_stops_no_other(tmp_path: Path) -> None:
    def fails(_folder: Path, _is_short: bool) -> Record:
        raise SystemExit("no such model")

    def works(folder: Path, _is_short: bool) -> Record:
        assert folder == tmp_path / "works"
        return Record("It works", about="here", goals={"forming": 1.5})

    parts = [Part("fails", fails), Part("works", works)]
    outcomes = list(bench.run_all(parts, tmp_path, is_short=False))
    assert [(one.part, one.problem) for one in outcomes] == [
        ("fails", "SystemExit: no such model"),
        ("works", ""),
    ]
    report = bench.as_markdown(outcomes, "now")
    assert "Did not run: SystemExit: no such model" in report
    assert "## It works" in report
    assert bench.as_json(outcomes, "now")["goals"] == {"forming": {"figure": 1.5, "met": True}}


def test_a_goal_is_ticked_missed_or_not_measured() -> None:
    marks = {
        line.split(" | ")[1]: line.split(" | ")[0]
        for line in goals.table({"over pipeline": 15.0, "front": 200.1, "idle": math.nan})[2:]
    }
    found = [marks[goals.GOALS[name].what] for name in ("over pipeline", "front", "idle", "start")]
    assert found == ["| ✓", "| ✗", "| ✗", "| –"]
    assert goals.missed({"over pipeline": 15.0, "front": 200.1}) == ["front"]


def compared(server: str, connections: int, ratio: float, failed: int = 0) -> dict[str, object]:
    return {"server": server, "connections": connections, "ratio": ratio, "failed": failed}


def test_the_goals_of_the_comparison_are_about_64_connections() -> None:
    rows = [compared("valence", 64, 1.0), compared("mosec-docs", 64, 3.1), compared("mosec-docs", 1, 0.9)]
    rows += [compared("litserve-tuned", 64, 1.7), compared("infinity", 64, 1.2), compared("pipeline", 64, 16)]
    assert ratios(rows) == {"over mosec-docs": 3.1, "over the best": 1.7, "over pipeline": 16}
    assert ratios([*rows, compared("infinity", 1, 1.0, failed=1)]) == {}


def steps(*figures: tuple[float, float, int]) -> Iterator[Step]:
    for share, p99_ms, refused in figures:
        yield Step(share, 100 * share, 1, 2, p99_ms, refused, 0, 100 * share, 1, 0.1, 1)


def test_the_knee_is_the_last_rate_that_holds() -> None:
    seen = Seen(100.0, list(steps((0.5, 20, 0), (0.8, 200, 0), (0.9, 300, 0), (1.0, 240, 0))))
    knee, refused = seen.knee(250), Seen(100.0, list(steps((0.5, 20, 1)))).knee(250)
    assert knee is not None
    assert knee.share == 0.8
    assert refused is None


def test_a_record_is_read_as_it_was_kept(tmp_path: Path) -> None:
    made = Record("Title", about="here")
    made.table(["a", "b"], [["1", "2"]])
    made.goals["forming"] = 3.0
    assert made.finish(tmp_path / "kept.json") == 1
    assert read(tmp_path / "kept.json") == made
    assert "| a | b |\n|---|---|\n| 1 | 2 |" in made.as_markdown()


def test_the_cpu_of_the_main_thread_is_told_apart() -> None:
    before, end_s = CpuTime.of(os.getpid()), time.thread_time() + 0.1
    while time.thread_time() < end_s:
        pass
    spent = CpuTime.of(os.getpid()) - before
    assert spent.main_s > 0.05  # the scheduler counts at its ticks
    assert spent.main_s > spent.others_s
    assert spent.all_s == pytest.approx(spent.main_s + spent.others_s)


@needs_wrk
def test_figures_of_requests_that_failed_are_not_taken(tmp_path: Path) -> None:
    write_bodies(tmp_path / "bodies", [{"inputs": ["a list", "of two"]}])
    with ServiceProcess(max_texts=1) as server:
        server.wait_ready()
        with pytest.raises(RuntimeError, match="requests failed"):
            drive(server, tmp_path / "bodies", connections=1, seconds=1)
