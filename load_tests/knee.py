"""Latency against load, open loop, up to the rate where it bends: the knee.

    VALENCE_DATA=… python -m load_tests.knee [--seconds 10] [--slo-ms 250] [--texts sentences|long]

Measures the capacity in a closed loop, then sends fixed shares of it, Poisson arrivals, each latency counted
from the intended start. Knows nothing of how the service queues.
"""

import itertools
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import uvloop

from load_tests import record
from load_tests.cpu_time import CpuTime
from load_tests.http_client import Client
from load_tests.open_loop import Run, arrivals, closed_loop, lasting, open_loop, percentile
from load_tests.overload import GOODPUT, bodies_of
from load_tests.record import Record
from load_tests.service_process import ServiceProcess
from load_tests.verdict import EXIT_CANNOT_RUN

SHARES = (0.10, 0.25, 0.50, 0.70, 0.80, 0.90, 1.00, 1.10)
CALLERS = 64


@dataclass(frozen=True, slots=True)
class Step:
    """One rate. Latencies are those of the answers of 200, in ms from the intended start."""

    share: float
    offered_per_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    refused: int
    failed: int
    goodput_per_s: float
    server_cores: float
    generator_cores: float
    lag_p99_ms: float

    def holds(self, slo_ms: float) -> bool:
        """Whether everybody was answered, and nearly all within the objective."""
        return self.refused == self.failed == 0 and self.p99_ms <= slo_ms


@dataclass(frozen=True, slots=True)
class Seen:
    """The capacity, closed loop with `CALLERS` callers, and the steps."""

    capacity_per_s: float
    steps: list[Step]

    def knee(self, slo_ms: float) -> Step | None:
        """The last step that holds before one does not."""
        held = list(itertools.takewhile(lambda step: step.holds(slo_ms), self.steps))
        return held[-1] if held else None


async def measure(
    server: ServiceProcess, bodies: Sequence[bytes], *, seconds: float, shares: Sequence[float]
) -> Seen:
    """The server must be ready."""
    client, requests = Client(server.url), itertools.cycle(bodies)
    await closed_loop(client, requests, callers=CALLERS, go_on=lasting(seconds / 4))
    capacity = (await closed_loop(client, requests, callers=CALLERS, go_on=lasting(seconds))).good_per_s()
    steps: list[Step] = []
    for share in shares:
        due_s = arrivals(share * capacity, seconds, random.Random(len(steps)))  # noqa: S311 - seeded dice
        cpu = CpuTime.of(server.pid)
        run = await open_loop(client, requests, due_s)
        steps.append(_step(run, share, CpuTime.of(server.pid) - cpu))
    client.close()
    return Seen(capacity, steps)


def _step(run: Run, share: float, cpu: CpuTime) -> Step:
    good, statuses = run.latencies_ms(200), run.statuses()
    spent_s = run.ended_s - run.began_s
    whole_s = max(shot.ended_s for shot in run.shots) - run.began_s if run.shots else spent_s
    return Step(
        share=share,
        offered_per_s=len(run.shots) / spent_s,
        p50_ms=percentile(good, 0.5),
        p95_ms=percentile(good, 0.95),
        p99_ms=percentile(good, 0.99),
        refused=statuses["503"],
        failed=len(run.shots) - statuses["503"] - len(good),
        goodput_per_s=run.good_per_s(),
        server_cores=cpu.all_s / whole_s,
        generator_cores=run.generator_cores,
        lag_p99_ms=percentile(run.lag_ms(), 0.99),
    )


def report(seen: Seen, *, slo_ms: float, what: str) -> Record:
    """A row a rate, and the knee."""
    made = Record(f"Latency against load, {what}")
    made.figures = asdict(seen) | {"slo_ms": slo_ms}
    made.say(
        f"Capacity {seen.capacity_per_s:.0f}/s (closed loop, {CALLERS} callers). Open loop, "
        "Poisson arrivals, one text a request, latency from the intended start."
    )
    head = "of capacity", "offered/s", "p50, ms", "p95", "p99", "refused", "failed", "goodput/s"
    made.table(
        [*head, "server, cores", "generator, cores", "sent late, p99, ms"],
        [_cells(one) for one in seen.steps],
    )
    knee = seen.knee(slo_ms)
    where = "below the first rate" if knee is None else f"{knee.offered_per_s:.0f}/s, {knee.share:.0%}"
    made.say(f"The knee, the last rate with p99 within {slo_ms:g} ms and nobody refused: **{where}**.")
    return made


def _cells(one: Step) -> list[str]:
    return [
        f"{one.share:.0%}",
        f"{one.offered_per_s:.0f}",
        *(f"{latency_ms:.1f}" for latency_ms in (one.p50_ms, one.p95_ms, one.p99_ms)),
        str(one.refused),
        str(one.failed),
        f"{one.goodput_per_s:.0f}",
        f"{one.server_cores:.2f}",
        f"{one.generator_cores:.2f}",
        f"{one.lag_p99_ms:.1f}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 when it ran, 2 when it could not."""
    parser = record.parser(__doc__, seconds=10.0)
    parser.add_argument("--slo-ms", type=float, default=250.0, help="what p99 may be")
    parser.add_argument("--texts", choices=list(GOODPUT), default="sentences")
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="of the capacity")
    options = parser.parse_args(arguments)
    try:
        with ServiceProcess() as server:
            server.wait_ready()
            seen = uvloop.run(
                measure(server, bodies_of(options.texts), seconds=options.seconds, shares=options.shares)
            )
    except RuntimeError as error:
        print(f"cannot run: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    return report(seen, slo_ms=options.slo_ms, what=options.texts).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
