"""The goals of a load test and the exit code that follows. Knows nothing of what was measured."""

import os
import platform
import re
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

EXIT_MET = 0
EXIT_MISSED = 1
EXIT_CANNOT_RUN = 2


def machine() -> str:
    """Processor, cores, load and versions, in one line."""
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    return (
        f"{cpu[1] if cpu else platform.machine()}, {len(os.sched_getaffinity(0))} cores, load before {load}; "
        f"Python {platform.python_version()}, onnxruntime {version('onnxruntime')}"
    )


@dataclass(slots=True)
class Verdict:
    """Goals, met or missed.

    Attributes:
        goals: for each its name and whether it was met.
    """

    goals: list[tuple[str, bool]] = field(default_factory=list)

    def goal(self, name: str, *, met: bool) -> None:
        """Print and keep the outcome of one goal; the name says the figure and the bound."""
        self.goals.append((name, met))
        print(f"  {'ok    ' if met else 'MISSED'}  {name}", flush=True)

    def missed(self) -> list[str]:
        """The names of the goals that were not met."""
        return [name for name, met in self.goals if not met]

    def exit_code(self) -> int:
        """Print the whole verdict; 0 when every goal is met, else 1."""
        missed = self.missed()
        print(f"{len(self.goals) - len(missed)} of {len(self.goals)} goals met", flush=True)
        return EXIT_MISSED if missed else EXIT_MET


def note(text: str) -> None:
    """Print a figure that no goal is about."""
    print(f"          {text}", flush=True)
