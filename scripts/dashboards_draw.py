"""Draws one row of a dashboard, from the answers to its queries, much as Grafana would.

Knows the panels as the file describes them, and nothing of who answered.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from scripts.dashboards_prometheus import Series
from scripts.dashboards_read import Target, View
from scripts.dashboards_units import with_unit

BACKGROUND, PANEL, EDGE, TEXT, FAINT = "#111217", "#181b1f", "#2c3235", "#d8d9da", "#8e9297"
PALETTE = ("#73BF69", "#FADE2A", "#5794F2", "#FF9830", "#F2495C", "#B877D9", "#8AB8FF", "#FFA6B0")
HEAT = LinearSegmentedColormap.from_list("heat", (PANEL, "#5c2b0f", "#c4570c", "#ff9830", "#ffe6c7"))
WIDTH_PX, UNIT_PX, GAP_PX, DPI = 1400, 34, 8, 100
LEGEND_MOST = 9


@dataclass(frozen=True, slots=True)
class Drawn:
    """A panel and what Prometheus answered: the series of each target, and the single requests."""

    view: View
    answers: Sequence[tuple[Target, Sequence[Series]]]
    exemplars: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True)
class _Line:
    name: str
    color: str
    dashed: bool
    points: Sequence[tuple[float, float]]


def draw_row(drawn: Sequence[Drawn], path: Path, start_s: float) -> None:
    """Write the picture of these panels; times count from `start_s`, Unix seconds."""
    grids = [one.view.panel["gridPos"] for one in drawn]
    top = min(grid["y"] for grid in grids)
    rows = max(grid["y"] + grid["h"] for grid in grids) - top
    figure = Figure(figsize=(WIDTH_PX / DPI, rows * UNIT_PX / DPI), dpi=DPI, facecolor=BACKGROUND)
    FigureCanvasAgg(figure)
    for one, grid in zip(drawn, grids, strict=True):
        column = WIDTH_PX / 24
        box = (
            grid["x"] * column + GAP_PX / 2,
            (rows - grid["y"] + top - grid["h"]) * UNIT_PX + GAP_PX / 2,
            grid["w"] * column - GAP_PX,
            grid["h"] * UNIT_PX - GAP_PX,
        )
        _Frame(figure, box).draw(one, start_s)
    figure.savefig(path, dpi=DPI, facecolor=BACKGROUND, pil_kwargs={"optimize": True})


@dataclass(frozen=True, slots=True)
class _Frame:
    """The place of a panel: left, bottom, width and height in pixels."""

    figure: Figure
    box: tuple[float, float, float, float]

    def draw(self, drawn: Drawn, start_s: float) -> None:
        left, bottom, width, height = self.box
        high = self.figure.get_figheight() * DPI
        patch = FancyBboxPatch(
            (left / WIDTH_PX, bottom / high),
            width / WIDTH_PX,
            height / high,
            boxstyle="square,pad=0",
            facecolor=PANEL,
            edgecolor=EDGE,
            linewidth=0.8,
            zorder=-1,
            transform=self.figure.transFigure,
        )
        self.figure.patches.append(patch)
        self._text(10, height - 18, drawn.view.title, size=9.5, weight="bold")
        kind = drawn.view.panel["type"]
        if kind == "stat":
            self._stat(drawn)
        elif kind == "heatmap":
            _heat(self._axes(legend=False), drawn, start_s)
        else:
            lines = _lines_of(drawn)
            _draw_lines(self._axes(legend=True), drawn, lines, start_s)
            self._legend(lines)

    def _text(self, x: float, y: float, text: str, **look: Any) -> None:
        left, bottom, _, _ = self.box
        high = self.figure.get_figheight() * DPI
        look = {"color": TEXT, "va": "center"} | look
        self.figure.text((left + x) / WIDTH_PX, (bottom + y) / high, text, **look)

    def _axes(self, *, legend: bool) -> Axes:
        left, bottom, width, height = self.box
        high = self.figure.get_figheight() * DPI
        under = 58 if legend else 30
        place = (
            (left + 62) / WIDTH_PX,
            (bottom + under) / high,
            (width - 78) / WIDTH_PX,
            (height - under - 38) / high,
        )
        axes = self.figure.add_axes(place, facecolor=PANEL)
        axes.tick_params(colors=FAINT, labelsize=7.5, length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.grid(visible=True, color=EDGE, linewidth=0.7)
        axes.set_axisbelow(True)
        return axes

    def _legend(self, lines: Sequence[_Line]) -> None:
        x, y, width = 12.0, 22.0, self.box[2]
        for line in lines[:LEGEND_MOST]:
            needed = 22 + 5.6 * len(line.name)
            if x + needed > width and x > 12:
                x, y = 12.0, y - 13
            self._text(x, y, "╍" if line.dashed else "▬", color=line.color, size=7.5)
            self._text(x + 13, y, line.name, size=7.5)
            x += needed + 6

    def _stat(self, drawn: Drawn) -> None:
        panel, width = drawn.view.panel, self.box[2]
        target, series = drawn.answers[0]
        if panel["options"]["textMode"] == "name":
            for number, one in enumerate(series):
                name = target.name_of(one.labels)
                self._text(width / 2, 52 - 22 * number, name, size=12, color=_step(panel, 1.0), ha="center")
            return
        if not series:
            self._text(width / 2, 50, "No data", size=14, color=FAINT, ha="center")
            return
        last = series[0].points[-1][1]
        color = _step(panel, last)
        said = with_unit(last, panel["fieldConfig"]["defaults"])
        size = min(21.0, 1.25 * width / len(said))
        self._text(width / 2, 60, said, size=size, weight="bold", color=color, ha="center")
        left, bottom, _, _ = self.box
        high = self.figure.get_figheight() * DPI
        place = (left / WIDTH_PX, bottom / high, width / WIDTH_PX, 30 / high)
        axes = self.figure.add_axes(place)
        axes.set_axis_off()
        values = np.array([value for _, value in series[0].points])
        axes.plot(values, color=color, linewidth=1)
        axes.fill_between(range(len(values)), values, min(values), color=color, alpha=0.25, linewidth=0)
        axes.margins(0, 0.1)


def _step(panel: Mapping[str, Any], value: float) -> str:
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    return str([one["color"] for one in steps if one["value"] is None or value >= one["value"]][-1])


def _lines_of(drawn: Drawn) -> list[_Line]:
    overrides = drawn.view.panel["fieldConfig"]["overrides"]
    made: list[_Line] = []
    for target, series in drawn.answers:
        for one in series:
            name, color, dashed = target.name_of(one.labels), "", False
            for override in overrides:
                if not _matches(override["matcher"], target, name):
                    continue
                for change in override["properties"]:
                    if change["id"] == "color":
                        color = change["value"]["fixedColor"]
                    elif change["id"] == "custom.lineStyle":
                        dashed = True
            made.append(_Line(name, color or PALETTE[len(made) % len(PALETTE)], dashed, one.points))
    return made


def _matches(matcher: Mapping[str, Any], target: Target, name: str) -> bool:
    if matcher["id"] == "byFrameRefID":
        return bool(matcher["options"] == target.ref_id)
    return re.search(str(matcher["options"]).strip("/"), name) is not None


def _draw_lines(axes: Axes, drawn: Drawn, lines: Sequence[_Line], start_s: float) -> None:
    defaults = drawn.view.panel["fieldConfig"]["defaults"]
    if defaults["custom"].get("stacking", {}).get("mode") == "normal":
        _stack(axes, lines, start_s)
    else:
        for line in lines:
            at, values = _with_gaps(line.points)
            axes.plot(
                at - start_s,
                values,
                color=line.color,
                linewidth=1.4,
                linestyle=(0, (5, 4)) if line.dashed else "-",
            )
            alone = np.isnan(np.append(values[1:], np.nan)) & np.isnan(np.insert(values[:-1], 0, np.nan))
            axes.plot(at[alone] - start_s, values[alone], ".", color=line.color, markersize=4)
    if drawn.exemplars:
        times, seconds = zip(*drawn.exemplars, strict=True)
        axes.scatter(np.array(times) - start_s, seconds, marker="D", s=9, color="#8AB8FF", zorder=3)
    if defaults["custom"].get("scaleDistribution", {}).get("type", "linear") != "linear":
        axes.set_yscale("symlog", linthresh=1, base=10)
        axes.set_ylim(bottom=0)
    else:
        lowest = min((value for line in lines for _, value in line.points), default=0.0)
        axes.set_ylim(
            bottom=defaults.get("min", 0.0 if lowest >= 0 else None),
            top=defaults.get("max", axes.get_ylim()[1]),
        )
        axes.yaxis.set_major_locator(MaxNLocator(5))
    _label_axes(axes, lambda value: with_unit(value, defaults))


def _with_gaps(points: Sequence[tuple[float, float]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Times and values, with NaN where a series is missing for a while, so that no line bridges it."""
    columns = np.array(points, dtype=np.float64)
    at, values = columns[:, 0], columns[:, 1]
    apart = np.diff(at)
    after = np.flatnonzero(apart > 1.5 * apart.min(initial=np.inf)) + 1
    missing = np.insert(values, after, np.nan)
    return np.insert(at, after, at[after - 1]), missing


def _stack(axes: Axes, lines: Sequence[_Line], start_s: float) -> None:
    times = sorted({at for line in lines for at, _ in line.points})
    known = [dict(line.points) for line in lines]
    values = np.array([[one.get(at, 0.0) for at in times] for one in known])
    colors = [line.color for line in lines]
    axes.stackplot(np.array(times) - start_s, values, colors=colors, alpha=0.8, linewidth=0)


def _heat(axes: Axes, drawn: Drawn, start_s: float) -> None:
    """The buckets hold those below them, too: each is drawn without them."""
    defaults = drawn.view.panel["fieldConfig"]["defaults"]
    series = sorted(drawn.answers[0][1], key=lambda one: float(one.labels["le"]))
    times = sorted({at for one in series for at, _ in one.points})
    known = [dict(one.points) for one in series]
    below = np.array([[one.get(at, 0.0) for at in times] for one in known])
    counts = np.maximum(np.diff(below, axis=0, prepend=0), 0)
    bounds = [float(one.labels["le"]) for one in series]
    used = np.flatnonzero(counts.sum(axis=1) > 0)
    first, last = (int(used[0]), int(used[-1]) + 1) if used.size else (0, len(bounds))
    shown = counts[first:last]
    axes.pcolormesh(
        np.array(times) - start_s,
        np.arange(first, last) + 0.5,
        shown,
        cmap=HEAT,
        norm=PowerNorm(0.5, 0, max(1.0, float(shown.max(initial=0)))),
        edgecolors=PANEL,
        linewidth=0.4,
        shading="nearest",
    )
    axes.grid(visible=False)
    marks = list(range(first, last + 1, max(1, (last - first) // 7)))
    names = ["0" if mark == 0 else with_unit(bounds[mark - 1], defaults) for mark in marks]
    axes.set_ylim(first, last)
    axes.set_yticks(marks, names)
    axes.xaxis.set_major_formatter(FuncFormatter(_clock))


def _label_axes(axes: Axes, said: Callable[[float], str]) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: said(value)))
    axes.xaxis.set_major_formatter(FuncFormatter(_clock))
    axes.margins(x=0)


def _clock(seconds: float, _: object = None) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
