"""The report of the check of a GPU: outcomes, figures, exit status, the machine. Knows nothing of engines."""

import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path

from load_tests.gpu_bench import Figure

OK, WRONG, OPEN = "ok", "wrong", "not checked"
EXITS = {WRONG: 1, OPEN: 2}
LIMIT_S = 240.0
"""After this, nothing new is begun: all is done in five minutes."""
LONGEST_REASON = 300


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: the outcome ("ok", "wrong", "not checked"), and the figure or reason."""

    name: str
    outcome: str
    detail: str


@dataclass(slots=True)
class Report:
    """All that was found out; each line is printed as it comes."""

    machine: list[str]
    checks: list[Check] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    started_s: float = field(default_factory=time.perf_counter)

    def note(self, name: str, outcome: str, detail: str) -> None:
        """Keep and print one outcome."""
        self.checks.append(Check(name, outcome, detail))
        print(f"{outcome:11}  {name}: {detail}", flush=True)

    def check(self, name: str, look: Callable[[], str]) -> None:
        """Run one check, which gives its figure, or raises what is wrong. Out of time: not checked."""
        if time.perf_counter() - self.started_s > LIMIT_S:
            self.note(name, OPEN, "out of time")
            return
        try:
            self.note(name, OK, look())
        except Exception as error:  # noqa: BLE001 - whatever a driver raises belongs in the report
            self.note(name, WRONG, f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST_REASON]}")

    def exit_code(self) -> int:
        """0, 1 or 2: see the docstring of the module."""
        outcomes = {check.outcome for check in self.checks}
        return next((code for outcome, code in EXITS.items() if outcome in outcomes), 0)

    def markdown(self) -> str:
        """The report as a page."""
        lines = ["# Check of the GPU path", "", *(f"- {line}" for line in self.machine), ""]
        lines += ["| check | outcome | detail |", "|---|---|---|"]
        lines += [f"| {c.name} | {c.outcome} | {c.detail.replace('|', '/')} |" for c in self.checks]
        lines += ["", "| engine | plan | texts/s | median call, ms |", "|---|---|---|---|"]
        lines += [f"| {f.engine} | {f.plan} | {f.texts_per_s:,.0f} | {f.p50_ms:.3f} |" for f in self.figures]
        return "\n".join(lines) + "\n"


def processor() -> str:
    """Processor and cores. The load test's own line asks for a package that a GPU install does not have."""
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cores = len(os.sched_getaffinity(0))
    return f"{cpu[1] if cpu else platform.machine()}, {cores} cores, Python {platform.python_version()}"


def gpus() -> list[str]:
    """Name, memory and driver of each GPU; empty when there is no driver."""
    return nvidia("name,memory.total,driver_version")


def nvidia(query: str) -> list[str]:
    """What `nvidia-smi` says, one line for each GPU; empty where it is not, or fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    asked = [command, f"--query-gpu={query}", "--format=csv,noheader"]
    ran = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=30)
    return ran.stdout.strip().splitlines() if ran.returncode == 0 else []


def versions() -> str:
    """What is installed of that which computes."""
    found = []
    for name in ("onnxruntime", "onnxruntime-gpu", "torch", "numpy"):
        try:
            found.append(f"{name} {installed(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)
