"""The parts of `load_tests.bench`: what each runs, in long and in short form, and the record that it leaves.

A part that writes a record itself is a command; the others are read here. Knows nothing of their order.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from load_tests import footprint, overload, record
from load_tests.chosen import chosen_version
from load_tests.open_loop import percentile
from load_tests.record import Record
from load_tests.service_process import ROOT, ServiceProcess
from load_tests.verdict import EXIT_MET, EXIT_MISSED

NEIGHBOURS = "largest change of a probability by neighbours"
QUANTISATION = "p99 of the change of a probability against float32"
SAME_FILE = ("mosec", "litserve")  # they serve the int8 file that Valence serves


@dataclass(frozen=True, slots=True)
class Part:
    """One part: its name, and what runs it in a folder of its own, long or short."""

    name: str
    run: Callable[[Path, bool], Record]


def all_parts() -> list[Part]:
    """In the order of the report."""
    return [
        Part("compare", compared),
        Part("engine_bench", engines),
        _command("served", long=[], short=["--seconds", "0.3", "--rounds", "1"]),
        _command("front_bench", long=[], short=["--rounds", "1", "--connections", "4"]),
        _command("knee", long=[], short=["--seconds", "0.5", "--shares", "0.25", "0.5"]),
        _command("fairness", long=["--seconds", "4"], short=["--seconds", "0.5", "--rounds", "1"]),
        _command("forming", long=[], short=["--batches", "5", "--queues", "10", "100"]),
        Part("overload", overloaded),
        Part("footprint", footprints),
        Part("manifest", manifest),
    ]


def _command(name: str, *, long: Sequence[str], short: Sequence[str]) -> Part:
    def run(folder: Path, is_short: bool) -> Record:
        kept = folder / "record.json"
        _call(name, *(short if is_short else long), "--json", str(kept))
        return record.read(kept)

    return Part(name, run)


def _call(name: str, *arguments: str) -> str:
    """Run a load test; what it printed. RuntimeError with its last words: it could not run."""
    command = [sys.executable, "-m", f"load_tests.{name}", *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode not in {EXIT_MET, EXIT_MISSED} or "Traceback" in ran.stderr:
        raise RuntimeError(f"it ended with code {ran.returncode}: {(ran.stderr or ran.stdout)[-1500:]}")
    return ran.stdout


def engines(folder: Path, is_short: bool) -> Record:
    """The engine alone; reviews without the plans that pad most, which would take as long as all the rest."""
    calls = {
        "sentences": ["--rounds", "3", "--texts", "48"],
        "reviews": ["--rounds", "2", "--texts", "48", "--plans", "one by one", "by length, 8"],
    }
    if is_short:
        calls = {"sentences": ["--rounds", "1", "--texts", "6", "--engines", "onnx/int8"]}
    made = Record("The engine alone")
    for kind, options in calls.items():
        kept = folder / f"{kind}.json"
        printed = _call("engine_bench", "--kinds", kind, "--json", str(kept), *options)
        made.lines += ["", *printed.splitlines()]
        made.figures[kind] = json.loads(kept.read_text(encoding="utf-8"))
    return made


def compared(folder: Path, is_short: bool) -> Record:
    """Other servers; in short Valence alone, which needs no install."""
    short = ["--only", "valence", "--seconds", "1", "--rounds", "1", "--connections", "1"]
    options = short if is_short else ["--seconds", "3", "--rounds", "3"]
    _call("compare", *options, "--out", str(folder))
    made = Record("Other servers")
    made.figures = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    made.lines = ["", *(folder / "result.md").read_text(encoding="utf-8").splitlines()]
    made.goals = ratios(made.figures["rows"])
    return made


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The goals of the comparison at 64 connections; none where a request failed, which costs less."""
    if any(row["failed"] for row in rows):
        return {}
    found = {row["server"]: row["ratio"] for row in rows if row["connections"] == 64}
    best = [ratio for server, ratio in found.items() if server.startswith(SAME_FILE)]
    made = {"over mosec-docs": found.get("mosec-docs"), "over pipeline": found.get("pipeline")}
    made["over the best"] = min(best, default=None)
    return {name: ratio for name, ratio in made.items() if ratio is not None}


def overloaded(_folder: Path, is_short: bool) -> Record:
    """Three times the capacity; `load_tests.overload` has more goals, and runs longer."""
    made = Record("Three times the capacity")
    seconds, capacity_s = (1.0, 0.5) if is_short else (15.0, 6.0)
    rows: list[list[str]] = []
    refusals_ms: list[float] = []
    for kind in ["sentences"] if is_short else list(overload.GOODPUT):
        with ServiceProcess() as server:
            server.wait_ready()
            bodies = overload.bodies_of(kind)
            seen = uvloop.run(
                overload.measure(server, bodies, factor=3, seconds=seconds, capacity_s=capacity_s)
            )
        share = seen.load.good_per_s() / seen.capacity_per_s
        refused, admitted = (percentile(seen.load.latencies_ms(status), 0.99) for status in (503, 200))
        made.goals[f"goodput {kind}"] = share
        refusals_ms += [refused] if seen.load.latencies_ms(503) else []
        statuses = dict(seen.load.statuses())
        rows.append(
            [
                kind,
                f"{seen.capacity_per_s:.0f}",
                f"{seen.load.good_per_s():.0f}",
                f"{share:.2f}",
                f"{refused:.1f}",
                f"{admitted:.0f}",
                f"{seen.load.generator_cores:.2f}",
                str(statuses),
            ]
        )
        made.figures[kind] = {"share": share, "refused_p99_ms": refused, "statuses": statuses}
    if refusals_ms:
        made.goals["refusals"] = max(refusals_ms)
    head = "texts", "capacity/s", "goodput/s", "share", "refusals, p99, ms", "admitted, p99, ms"
    made.table([*head, "generator, cores", "answers"], rows)
    return made


def footprints(_folder: Path, is_short: bool) -> Record:
    """Import, start and memory, the median of several starts."""
    rounds, precisions = (1, ["int8"]) if is_short else (footprint.ROUNDS, ["int8", "float32"])
    made = Record("Start and memory")
    made.goals["import"] = statistics.median(footprint.import_s() for _ in range(rounds))
    seen: dict[str, dict[str, float]] = {}
    for precision in precisions:
        starts = [footprint.one_start(precision) for _ in range(rounds)]
        seen[precision] = {name: statistics.median(start[name] for start in starts) for name in starts[0]}
    made.say(f"Median of {rounds}; `import service.app` takes {made.goals['import']:.2f} s.")
    names = seen["int8"]
    made.table(["", *seen], [[name, *(f"{one[name]:.2f}" for one in seen.values())] for name in names])
    made.goals["start"], made.goals["memory"] = (
        names["start to ready, s"],
        names["resident when ready, MB"],
    )
    made.figures = seen
    return made


def manifest(_folder: Path, _is_short: bool) -> Record:
    """What was measured when the version was made, of the precision that a CPU serves."""
    version = chosen_version().manifest
    made = Record(f"Precision, from the manifest of {version.name} {version.version}")
    own = [metric for metric in version.metrics if metric.precision == "int8"]
    made.table(["int8", "texts", "value"], [[one.name, one.dataset, f"{one.value:.4g}"] for one in own])
    wanted = {NEIGHBOURS: "neighbours", QUANTISATION: "quantisation"}
    made.goals = {wanted[one.name]: one.value for one in own if one.name in wanted}
    made.figures = {f"{one.name}, {one.dataset}": one.value for one in own}
    return made
