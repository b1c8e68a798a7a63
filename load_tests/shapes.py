"""How the rate of a load test goes over time: smoke, step to the knee, spike, soak.

Knows nothing of locust, of texts or of what a good figure is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

KNEE_STEPS = 10
SPIKE_TIMES = 5
CALM_S = 5.0  # after a spike what had queued is answered; this is no fault of the calm


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of one rate.

    Attributes:
        name: in the report; unique in its plan.
        rate_per_s: requests, at random moments.
        judged: whether the objectives must hold in it. In the others everybody must only get a true answer.
    """

    name: str
    rate_per_s: float
    seconds: float
    judged: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """The phases of a load test, in their order."""

    shape: str
    phases: tuple[Phase, ...]

    @property
    def seconds(self) -> float:
        """Of all phases."""
        return sum(phase.seconds for phase in self.phases)

    def at(self, run_s: float) -> Phase | None:
        """The phase so many seconds after the start; None when all are over."""
        for phase in self.phases:
            if run_s < phase.seconds:
                return phase
            run_s -= phase.seconds
        return None


Shape = Literal["smoke", "knee", "spike", "soak"]


@dataclass(frozen=True, slots=True)
class _Form:
    rate_per_s: float
    seconds: float
    phases: Callable[[float, float], tuple[Phase, ...]]


def _level(name: str) -> Callable[[float, float], tuple[Phase, ...]]:
    return lambda rate_per_s, seconds: (Phase(name, rate_per_s, seconds),)


def _knee(rate_per_s: float, seconds: float) -> tuple[Phase, ...]:
    """Equal steps up to the rate. Only the first must hold: the others are there to find out."""
    rates = [rate_per_s * step / KNEE_STEPS for step in range(1, KNEE_STEPS + 1)]
    return tuple(
        Phase(f"{rate:.0f}/s", rate, seconds / KNEE_STEPS, judged=number == 0)
        for number, rate in enumerate(rates)
    )


def _spike(rate_per_s: float, seconds: float) -> tuple[Phase, ...]:
    calm_s = min(CALM_S, seconds / 6)
    spike_s = seconds / 6
    rest_s = (seconds - spike_s - calm_s) / 2
    return (
        Phase("before", rate_per_s, rest_s),
        Phase("spike", SPIKE_TIMES * rate_per_s, spike_s, judged=False),
        Phase("calm", rate_per_s, calm_s, judged=False),
        Phase("after", rate_per_s, rest_s),
    )


_FORMS: dict[str, _Form] = {
    "smoke": _Form(10, 30, _level("smoke")),
    "knee": _Form(500, 80, _knee),
    "spike": _Form(50, 60, _spike),
    "soak": _Form(50, 1200, _level("soak")),
}
SHAPES = tuple(_FORMS)


def plan(shape: str, *, rate_per_s: float | None = None, seconds: float | None = None) -> Plan:
    """One of `SHAPES`, with the rate (of the knee: the highest) and the whole length, or its own.

    ValueError: no such shape, or a rate or length that is not above 0.
    """
    form = _FORMS.get(shape)
    if form is None:
        raise ValueError(f"there is no shape {shape!r}; there are {', '.join(SHAPES)}")
    rate_per_s = form.rate_per_s if rate_per_s is None else rate_per_s
    seconds = form.seconds if seconds is None else seconds
    if rate_per_s <= 0 or seconds <= 0:
        raise ValueError("rate and seconds must be above 0")
    return Plan(shape, form.phases(rate_per_s, seconds))
