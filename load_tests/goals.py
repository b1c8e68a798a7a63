"""What the service should reach, each goal with its bound. Knows nothing of how a figure is measured."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure and its bound.

    Attributes:
        what: the figure.
        bound: the figure must be this or less, or this or more when `at_least`.
        unit: written after both.
        command: the load test that measures it, or the manifest of the version.
    """

    what: str
    bound: float
    command: str
    unit: str = ""
    at_least: bool = False

    def met(self, figure: float) -> bool:
        """NaN meets no goal."""
        return figure >= self.bound if self.at_least else figure <= self.bound

    @property
    def wanted(self) -> str:
        """The bound in words."""
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}{self.unit}"


GOALS: dict[str, Goal] = {
    "over mosec-docs": Goal(
        "requests/s at 64 connections over mosec as documented", 3, "compare", at_least=True
    ),
    "over the best": Goal(
        "the same over the best tuning of another server with the same file", 1.5, "compare", at_least=True
    ),
    "over pipeline": Goal("the same over the transformers pipeline", 15, "compare", at_least=True),
    "served singles": Goal(
        "texts/s served, one a request, over the engine's best", 0.85, "served", at_least=True
    ),
    "served lists": Goal(
        "texts/s served, 32 a request, over the engine's best", 0.95, "served", at_least=True
    ),
    "lone latency": Goal("p50 at one connection over the engine alone", 1.3, "served"),
    "front": Goal("CPU of the way in and out a request, 64 connections", 200, "front_bench", " µs"),
    "goodput long": Goal(
        "goodput at three times the capacity, texts of 200 tokens", 0.95, "overload", at_least=True
    ),
    "goodput sentences": Goal("the same, single sentences", 0.7, "overload", at_least=True),
    "refusals": Goal("p99 of a refusal under overload", 50, "overload", " ms"),
    "short beside long": Goal(
        "growth of a short text's p95 beside long texts in every lane, in long calls", 1, "fairness"
    ),
    "single beside list": Goal(
        "growth of a single text's p95 beside lists of 256, in calls of theirs", 1, "fairness"
    ),
    "forming": Goal("forming a batch over running it, dearest queue", 2, "forming", " %"),
    "neighbours": Goal("largest change of a probability by neighbours", 1e-4, "manifest"),
    "quantisation": Goal("p99 of the change of a probability by quantisation", 0.1, "manifest"),
    "import": Goal("import of the service", 1, "footprint", " s"),
    "start": Goal("start to ready, int8", 3, "footprint", " s"),
    "memory": Goal("resident when ready, int8", 350, "footprint", " MB"),
    "idle": Goal("CPU when idle", 2, "served", " % of a core"),
}


def table(figures: Mapping[str, float], names: Iterable[str] = GOALS) -> list[str]:
    """Markdown: each goal with its figure, ticked or missed; one without a figure was not measured."""
    lines = ["| | goal | wanted | seen | measured by |", "|---|---|---|---|---|"]
    for name in names:
        goal = GOALS[name]
        seen = f"{figures[name]:.4g}{goal.unit}" if name in figures else "not measured"
        mark = "–" if name not in figures else "✓" if goal.met(figures[name]) else "✗"
        lines.append(f"| {mark} | {goal.what} | {goal.wanted} | {seen} | `{goal.command}` |")
    return lines


def missed(figures: Mapping[str, float]) -> list[str]:
    """The names of the goals that were measured and not met."""
    return [name for name, figure in figures.items() if not GOALS[name].met(figure)]
