"""A number as Grafana would write it, for the units that the dashboards use."""

import math
from collections.abc import Mapping
from typing import Any

_STEPS: dict[str, tuple[tuple[float, str], ...]] = {
    "s": ((1, " s"), (1e-3, " ms"), (1e-6, " µs")),
    "bytes": ((1024**3, " GiB"), (1024**2, " MiB"), (1024, " KiB"), (1, " B")),
    "percentunit": ((0.01, "%"),),
    "none": ((1, ""),),
}
_SHORT: tuple[tuple[float, str], ...] = ((1e9, " Bil"), (1e6, " Mil"), (1e3, " K"), (1, ""))


def with_unit(value: float, defaults: Mapping[str, Any]) -> str:
    """`defaults` of a field: its unit, and its decimals if fixed. KeyError: a unit that nobody taught."""
    unit, decimals, word = str(defaults["unit"]), defaults.get("decimals"), ""
    if math.isinf(value):
        return "∞"
    if unit == "reqps":
        unit = "suffix: req/s"
    if unit.startswith("suffix:"):
        steps, word = _SHORT, unit.removeprefix("suffix:")
    else:
        steps = _STEPS[unit]
    smallest = next((step for step in steps if step[0] == 1), steps[0]) if value == 0 else steps[-1]
    factor, name = next((step for step in steps if abs(value) >= step[0]), smallest)
    return _plain(value / factor, decimals) + name + word


def _plain(value: float, decimals: int | None) -> str:
    """Three figures unless the decimals are fixed."""
    if decimals is not None:
        return f"{value:.{decimals}f}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
