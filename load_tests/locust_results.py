"""What a load test has seen, phase by phase, the objectives, and the verdict.

Every latency is kept as it was measured: locust's own table rounds. Knows nothing of locust or of HTTP.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any

from load_tests.locust_mix import Outcome
from load_tests.open_loop import percentile
from load_tests.shapes import Phase, Plan
from load_tests.verdict import EXIT_CANNOT_RUN, Verdict, note


@dataclass(frozen=True, slots=True)
class Objectives:
    """What must hold in a judged phase, of the requests that are not wrong.

    Attributes:
        latency_ms: within which `in_time` of the answered ones must be, from the intended start.
        available: the share that must be answered.
    """

    latency_ms: float = 250.0
    in_time: float = 0.99
    available: float = 0.999


@dataclass(slots=True)
class Tally:
    """One phase. Requests that must be refused are counted apart, and are in no latency.

    Attributes:
        outcomes: of the well-formed requests.
        wrong_requests: of the requests that must be refused; in a crowd the service may say 503 to them, too.
        latencies_ms: of the answered well-formed requests, from the intended start.
        lateness_ms: how late each request was sent.
    """

    phase: Phase
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    wrong_requests: Counter[Outcome] = field(default_factory=Counter)
    latencies_ms: list[float] = field(default_factory=list)
    lateness_ms: list[float] = field(default_factory=list)

    @property
    def sent(self) -> int:
        """Well-formed requests."""
        return self.outcomes.total()

    @property
    def untrue(self) -> int:
        """Answers that are not as documented, and requests without an answer."""
        lost = len(self.lateness_ms) - self.sent - self.wrong_requests.total()
        return lost + self.outcomes[Outcome.WRONG] + self.wrong_requests[Outcome.WRONG]

    @property
    def available(self) -> float:
        """The share that was answered."""
        return self.outcomes[Outcome.ANSWERED] / self.sent if self.sent else 0.0

    def in_time(self, latency_ms: float) -> float:
        """The share of the answered ones that were answered within so long."""
        fast = sum(one <= latency_ms for one in self.latencies_ms)
        return fast / len(self.latencies_ms) if self.latencies_ms else 0.0

    def latency_ms(self, share: float) -> float:
        """A percentile, by nearest rank; NaN when nobody was answered."""
        return percentile(sorted(self.latencies_ms), share)

    def holds(self, objectives: Objectives) -> bool:
        """Whether all were answered, and enough of them in time: what a step to the knee must do."""
        everybody = self.sent > 0 and self.outcomes[Outcome.ANSWERED] == self.sent
        return everybody and self.in_time(objectives.latency_ms) >= objectives.in_time


class Results:
    """The tallies of a plan. `phase` is the one that requests belong to now."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.phase = plan.phases[0]
        self._tallies = {phase.name: Tally(phase) for phase in plan.phases}

    @property
    def tallies(self) -> list[Tally]:
        """In the order of the plan."""
        return list(self._tallies.values())

    def sent(self, phase: Phase, *, late_ms: float) -> None:
        """A request was sent, so long after its moment."""
        self._tallies[phase.name].lateness_ms.append(late_ms)

    def ended(self, phase: Phase, outcome: Outcome, *, latency_ms: float, wrong_request: bool) -> None:
        """What became of one."""
        tally = self._tallies[phase.name]
        if wrong_request:
            tally.wrong_requests[outcome] += 1
            return
        tally.outcomes[outcome] += 1
        if outcome is Outcome.ANSWERED:
            tally.latencies_ms.append(latency_ms)

    def knee(self, objectives: Objectives) -> Tally | None:
        """The last step that holds before one does not; None when the first does not."""
        held = list(takewhile(lambda tally: tally.holds(objectives), self.tallies))
        return held[-1] if held else None

    def judge(self, objectives: Objectives) -> int:
        """Print the phases and the goals; 0 when all are met, 1 when not, 2 when nothing was sent."""
        for line in table(self.tallies, objectives):
            print(line)
        if not any(tally.lateness_ms for tally in self.tallies):
            print("cannot run: nothing was sent")
            return EXIT_CANNOT_RUN
        verdict = Verdict()
        for tally in self.tallies:
            _judge(tally, objectives, verdict)
        if self.plan.shape == "knee":
            knee = self.knee(objectives)
            note(f"the knee, the last step that holds: {knee.phase.name if knee else 'below the first step'}")
        return verdict.exit_code()

    def figures(self, objectives: Objectives) -> dict[str, Any]:
        """For a program."""
        knee = self.knee(objectives) if self.plan.shape == "knee" else None
        return {
            "shape": self.plan.shape,
            "objectives": asdict(objectives),
            "knee_per_s": knee.phase.rate_per_s if knee else None,
            "phases": [_figures(tally, objectives) for tally in self.tallies],
        }


def _judge(tally: Tally, objectives: Objectives, verdict: Verdict) -> None:
    name = tally.phase.name
    total = len(tally.lateness_ms)
    verdict.goal(f"{name}: {tally.untrue} of {total} answers untrue or missing (0)", met=tally.untrue == 0)
    if not tally.phase.judged:
        return
    verdict.goal(
        f"{name}: {tally.available:.3%} of {tally.sent} answered (>= {objectives.available:.3%})",
        met=tally.available >= objectives.available,
    )
    in_time = tally.in_time(objectives.latency_ms)
    verdict.goal(
        f"{name}: {in_time:.2%} within {objectives.latency_ms:g} ms (>= {objectives.in_time:.2%})",
        met=in_time >= objectives.in_time,
    )


def table(tallies: Iterable[Tally], objectives: Objectives) -> list[str]:
    """The phases, in Markdown."""
    head = ("phase", "sent/s", "answered", "refused", "late", "untrue", "p50, ms", "p90", "p95", "p99")
    lines = [_row([*head, f"within {objectives.latency_ms:g} ms", "sent late, p99, ms"])]
    lines.append("|---" * 12 + "|")
    for tally in tallies:
        percentiles = [f"{tally.latency_ms(share):.1f}" for share in (0.5, 0.9, 0.95, 0.99)]
        counts = [str(tally.outcomes[one]) for one in (Outcome.ANSWERED, Outcome.REFUSED, Outcome.LATE)]
        rate = f"{len(tally.lateness_ms) / tally.phase.seconds:.1f}"
        share = f"{tally.in_time(objectives.latency_ms):.2%}"
        late = f"{percentile(sorted(tally.lateness_ms), 0.99):.1f}"
        lines.append(_row([tally.phase.name, rate, *counts, str(tally.untrue), *percentiles, share, late]))
    return lines


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _figures(tally: Tally, objectives: Objectives) -> dict[str, Any]:
    return {
        "name": tally.phase.name,
        "judged": tally.phase.judged,
        "intended_per_s": tally.phase.rate_per_s,
        "sent_per_s": len(tally.lateness_ms) / tally.phase.seconds,
        "outcomes": {one.value: tally.outcomes[one] for one in Outcome},
        "wrong_requests": tally.wrong_requests.total(),
        "refused_rightly": tally.wrong_requests[Outcome.ANSWERED],
        "untrue": tally.untrue,
        "available": tally.available,
        "in_time": tally.in_time(objectives.latency_ms),
        "holds": tally.holds(objectives),
        # None and not NaN, which is no JSON.
        "latency_ms": {
            f"p{share:g}": tally.latency_ms(share / 100) if tally.latencies_ms else None
            for share in (50, 90, 95, 99)
        },
    }
