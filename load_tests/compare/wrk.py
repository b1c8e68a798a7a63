"""Drives one address with wrk: a closed loop of so many connections, bodies from a file in turns.

Knows nothing of who answers.
"""

import json
import resource
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).parent / "load.lua"
TIMEOUT_S = 60  # of one answer; wrk's own 2 s would count a slow server's answers as lost
GRACE_S = 90
MISSING = "wrk is not there. Debian and Ubuntu: apt-get install wrk; macOS: brew install wrk"


class WrkError(Exception):
    """wrk is not there, or did not say what it counted."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of wrk saw.

    Attributes:
        not_200: answers with a status of 400 or more.
        lost: connections refused or broken, and answers later than `TIMEOUT_S`.
        cpu_s: of wrk itself.
    """

    requests: int
    duration_s: float
    p50_ms: float
    p99_ms: float
    not_200: int
    lost: int
    cpu_s: float

    @property
    def rate(self) -> float:
        """Answers a second."""
        return self.requests / self.duration_s


def find() -> str:
    """The path of wrk. Raises WrkError with the way to get it."""
    found = shutil.which("wrk")
    if found is None:
        raise WrkError(MISSING)
    return found


def write_bodies(file: Path, bodies: Iterable[object]) -> None:
    """One JSON document a line."""
    file.write_text("".join(f"{json.dumps(body)}\n" for body in bodies), encoding="utf-8")


def drive(url: str, bodies: Path, *, connections: int, seconds: float) -> Load:
    """Send for so long, each connection its next request when it has its answer. Raises WrkError."""
    command = [find(), "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", f"--timeout={TIMEOUT_S}s"]
    before_s = _children_cpu_s()
    ran = subprocess.run(
        [*command, "-s", str(SCRIPT), url, "--", str(bodies)],
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds + TIMEOUT_S + GRACE_S,
    )
    cpu_s = _children_cpu_s() - before_s
    lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    if ran.returncode != 0 or len(lines) != 1:
        raise WrkError(f"wrk ended with code {ran.returncode}: {ran.stdout[-500:]} {ran.stderr[-500:]}")
    seen = json.loads(lines[0].removeprefix("RESULT "))
    return Load(
        requests=seen["requests"],
        duration_s=seen["duration_us"] / 1e6,
        p50_ms=seen["p50_us"] / 1e3,
        p99_ms=seen["p99_us"] / 1e3,
        not_200=seen["not_200"],
        lost=seen["lost"],
        cpu_s=cpu_s,
    )


def _children_cpu_s() -> float:
    """CPU of the processes that were started here and have ended: between two calls, of wrk alone."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
