"""The way in and out: CPU a request of HTTP, JSON, tokenising, metrics and log, without the model.

    VALENCE_DATA=… python -m load_tests.front_bench [--seconds 1] [--rounds 10] [--connections 1 16 64]

Drives the real server, whose engine answers at once, with wrk; in between a plain ASGI callable on the same
uvicorn, uvloop and httptools, which is the floor. Knows nothing of how the service works.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from load_tests import record, texts
from load_tests.compare import wrk
from load_tests.driven import drive
from load_tests.record import Record
from load_tests.service_process import ServiceProcess
from load_tests.verdict import EXIT_CANNOT_RUN

SUBJECTS = {"valence": "Valence, instant engine", "plain": "plain ASGI callable"}
WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class Window:
    """One run of wrk on one server. CPU is in µs a request: the event loop's thread, the whole process."""

    server: str
    connections: int
    requests_per_s: float
    loop_us: float
    process_us: float
    generator_us: float


def window(server: ServiceProcess, name: str, bodies: Path, *, connections: int, seconds: float) -> Window:
    """Drive one server for so long. Raises WrkError, and RuntimeError when a request failed."""
    driven = drive(server, bodies, connections=connections, seconds=seconds)
    each = 1e6 / max(1, driven.load.requests)
    return Window(
        name,
        connections,
        requests_per_s=driven.load.rate,
        loop_us=driven.cpu.main_s * each,
        process_us=driven.cpu.all_s * each,
        generator_us=driven.load.cpu_s * each,
    )


def measure(*, seconds: float, rounds: int, connections: Sequence[int]) -> list[Window]:
    """Both servers in alternating windows.

    Raises:
        WrkError: wrk is not there.
        RuntimeError: a server did not start, or a request failed.
    """
    windows: list[Window] = []
    with ExitStack() as stack:
        bodies = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="valence-front-"))) / "bodies"
        wrk.write_bodies(bodies, ({"inputs": text} for text in texts.sentences()))
        servers = {
            name: stack.enter_context(ServiceProcess(command=("-m", "load_tests.front_server", name)))
            for name in SUBJECTS
        }
        for server in servers.values():
            server.wait_ready()
        for count in connections:
            for name, server in servers.items():
                window(server, name, bodies, connections=count, seconds=WARM_UP_S)
            for _ in range(rounds):
                windows += [
                    window(server, name, bodies, connections=count, seconds=seconds)
                    for name, server in servers.items()
                ]
    return windows


def report(windows: Sequence[Window]) -> Record:
    """The least and the median of each, and what the service takes beyond the floor."""
    made = Record("The way in and out, without the model")
    made.about += "; " + ", ".join(f"{name} {version(name)}" for name in ("uvicorn", "uvloop", "httptools"))
    made.figures["windows"] = [asdict(one) for one in windows]
    rows: list[list[str]] = []
    for count in dict.fromkeys(one.connections for one in windows):
        own = {
            name: [one for one in windows if (one.server, one.connections) == (name, count)]
            for name in SUBJECTS
        }
        for name, label in SUBJECTS.items():
            rows.append([str(count), label, *_cells(own[name])])
        ratio = _median(own["valence"]) / _median(own["plain"])
        least = _least(own["valence"]) / _least(own["plain"])
        rows.append([str(count), "ratio", "", "", f"{least:.2f} ({ratio:.2f})", ""])
        if count == 64:
            made.goals["front"] = _median(own["valence"])
    head = ["connections", "server", "requests/s", "event loop, µs", "whole process, µs", "generator, µs"]
    made.say(
        "CPU a request: least window (median window). The goal is about the median of the whole process."
    )
    made.table(head, rows)
    return made


def _cells(windows: Sequence[Window]) -> list[str]:
    loop = [one.loop_us for one in windows]
    process = [one.process_us for one in windows]
    return [
        f"{statistics.median(one.requests_per_s for one in windows):.0f}",
        f"{min(loop):.0f} ({statistics.median(loop):.0f})",
        f"{_least(windows):.0f} ({statistics.median(process):.0f})",
        f"{statistics.median(one.generator_us for one in windows):.0f}",
    ]


def _least(windows: Sequence[Window]) -> float:
    return min(one.process_us for one in windows)


def _median(windows: Sequence[Window]) -> float:
    return statistics.median(one.process_us for one in windows)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 when the goal is met, 1 when it is missed, 2 when it cannot run."""
    parser = record.parser(__doc__, seconds=1.0, rounds=10)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16, 64])
    options = parser.parse_args(arguments)
    try:
        windows = measure(seconds=options.seconds, rounds=options.rounds, connections=options.connections)
    except (wrk.WrkError, RuntimeError) as error:
        print(f"cannot run: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    return report(windows).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
