"""The frontier as a picture and as a page of Markdown. Knows nothing of how the figures came about."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import Bbox

from load_tests.frontier_figures import Form, Name, fastest_front, smallest_front, standard_error

SENTENCES = "sentences"
LONG = "200 tokens"
DASH = "–"
COLUMNS = (
    ("sst2/test",),
    ("imdb/test", "imdb/test_subset1000"),
    ("blitzer/kitchen",),
    ("cr/all",),
)
"""Sets with a column of their own; of several names the first that was measured."""
MARKERS = {"float32": "s", "int8": "o"}
COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#ccbb44", "#66ccee")
PLACES = ((8, 0), (-8, 0), (0, 10), (0, -10), (8, 12), (-8, 12), (8, -12), (-8, -12), (0, 24), (0, -24))
"""Where the label of a point may stand, in points of 1/72 inch; the first that is free is taken."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """Everything that is shown.

    Attributes:
        sets: what the mean accuracy is over.
        about: machine, versions, texts, command and so on, in JSON types.
        note: Markdown for the end of the page.
    """

    forms: Sequence[Form]
    sets: Sequence[str]
    about: Mapping[str, Any]
    note: str = ""

    def fastest(self, kind: str = SENTENCES) -> list[Name]:
        """The front of accuracy over speed."""
        return fastest_front(self.forms, self.sets, kind)

    def smallest(self) -> list[Name]:
        """The front of accuracy over size."""
        return smallest_front(self.forms, self.sets)

    def fronts_of(self, form: Form) -> list[str]:
        """The fronts that it is on, in words of the table."""
        fronts = {
            SENTENCES: self.fastest(),
            LONG: self.fastest(LONG),
            "size": self.smallest(),
        }
        return [name for name, members in fronts.items() if form.name in members]


def draw(frontier: Frontier, path: Path) -> None:
    """Writes a PNG: accuracy over sentences a second and core, and over the size of the file."""
    figure = Figure(figsize=(11, 4.8), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    speed, size = cast("tuple[Axes, Axes]", figure.subplots(1, 2, sharey=True))
    speeds = {form.name: form.texts_per_s(SENTENCES) for form in frontier.forms}
    _panel(speed, frontier, speeds, frontier.fastest())
    _panel(size, frontier, {form.name: form.megabytes for form in frontier.forms}, frontier.smallest())
    speed.set(xlabel="sentences a second and core (right is better)")
    speed.set(ylabel=f"accuracy, mean of {len(frontier.sets)} sets")
    size.set(xlabel="MB of the ONNX file (left is better)")
    figure.draw_without_rendering()  # from here on places are known in pixels
    figure.set_layout_engine("none")
    for axes, values in ((speed, speeds), (size, {form.name: form.megabytes for form in frontier.forms})):
        _label(axes, [(name, x, y) for name, x, y in _points(frontier, values)])
    figure.savefig(path, format="png")


def _points(frontier: Frontier, values: Mapping[Name, float | None]) -> Iterator[tuple[Name, float, float]]:
    for form in frontier.forms:
        x, y = values[form.name], form.accuracy(frontier.sets)
        if x is not None and y is not None:
            yield form.name, x, y


def _panel(
    axes: Axes, frontier: Frontier, values: Mapping[Name, float | None], members: Sequence[Name]
) -> None:
    points = {name: (x, y) for name, x, y in _points(frontier, values)}
    labels = list(dict.fromkeys(form.label for form in frontier.forms))
    axes.set_xscale("log")
    axes.margins(x=0.22, y=0.14)
    if members:
        xs, ys = zip(*(points[name] for name in members), strict=True)
        axes.plot(xs, ys, color="0.6", lw=1.2, zorder=1, label="Pareto front")
    for (label, precision), (x, y) in points.items():
        colour = COLOURS[labels.index(label) % len(COLOURS)]
        face = colour if (label, precision) in members else "white"
        axes.plot(x, y, MARKERS.get(precision, "^"), color=colour, mfc=face, ms=8, mew=1.8)
    if not points:
        axes.text(0.5, 0.5, "nothing was measured", ha="center", transform=axes.transAxes)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    if members:
        axes.legend(loc="lower right", fontsize="small")


def _label(axes: Axes, points: Sequence[tuple[Name, float, float]]) -> None:
    """Names the points, each where it covers no other point and no other name, if there is such a place."""
    dots = [axes.transData.transform((x, y)) for _, x, y in points]
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in dots]
    inside = axes.get_window_extent()
    for (label, precision), x, y in points:
        text = axes.annotate(f"{label} {precision}", (x, y), (0, 0), textcoords="offset points", fontsize=8.5)
        least, best = float("inf"), PLACES[0]
        for place in PLACES:
            _move(text, place)
            box = text.get_window_extent()
            out = _area(box) - _area(Bbox.intersection(box, inside))
            covered = out + sum(_area(Bbox.intersection(box, one)) for one in taken)
            if covered < least:
                least, best = covered, place
        _move(text, best)
        taken.append(text.get_window_extent())


def _move(text: Any, place: tuple[int, int]) -> None:
    right, up = place
    text.set_position(place)
    text.set_horizontalalignment("left" if right > 0 else "right" if right < 0 else "center")
    text.set_verticalalignment("center" if up == 0 else "bottom" if up > 0 else "top")


def _area(box: Bbox | None) -> float:
    return 0.0 if box is None else float(box.width * box.height)


def page(frontier: Frontier) -> str:
    """The page: picture, table with the most accurate first, and how the figures came about."""
    parts = [
        "# Accuracy against speed and size",
        "![Mean accuracy over speed and over size of each form](frontier.png)",
        _table(frontier),
        *_notes(frontier),
        *([frontier.note.strip()] if frontier.note.strip() else []),
    ]
    return "\n\n".join(parts) + "\n"


def _table(frontier: Frontier) -> str:
    columns = [_column(frontier.forms, names) for names in COLUMNS]
    heads = [
        "model",
        "precision",
        f"mean of {len(frontier.sets)} sets",
        *columns,
        "sentences/s/core",
        "200-token texts/s/core",
        "MB",
        "on the front of",
    ]
    rows = [heads, ["---"] * len(heads)]
    for form in ordered(frontier):
        scores = [form.scores[one].accuracy if one in form.scores else None for one in columns]
        rows.append(
            [
                form.label,
                form.precision,
                *(_shown(value, ".4f") for value in (form.accuracy(frontier.sets), *scores)),
                _shown(form.texts_per_s(SENTENCES), ".0f"),
                _shown(form.texts_per_s(LONG), ".1f"),
                f"{form.megabytes:.1f}",
                ", ".join(frontier.fronts_of(form)) or DASH,
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def ordered(frontier: Frontier) -> list[Form]:
    """The most accurate first, of equals the fastest; those that were not measured last."""

    def key(form: Form) -> tuple[float, float, int]:
        return (
            -(form.accuracy(frontier.sets) or 0.0),
            -(form.texts_per_s(SENTENCES) or 0.0),
            form.bytes,
        )

    return sorted(frontier.forms, key=key)


def _column(forms: Sequence[Form], names: Sequence[str]) -> str:
    return next((one for one in names if any(one in form.scores for form in forms)), names[0])


def _shown(value: float | None, form: str) -> str:
    return DASH if value is None else format(value, form)


def _notes(frontier: Frontier) -> list[str]:
    about = frontier.about
    measured = [form for form in frontier.forms if form.accuracy(frontier.sets) is not None]
    if measured:
        error = max(standard_error(form, frontier.sets) for form in measured)
        mean = (
            f"The mean is over {', '.join(frontier.sets)}, each with the same weight; its standard error is "
            f"{error:.4f} at most, but less for a difference, since all read the same texts."
        )
    else:
        mean = "Nothing has an accuracy on all sets of the mean."
    return [
        mean,
        (
            "A form is on a front when no other is as good in both numbers and better in one. The picture "
            "shows the fronts of sentences and of size; a filled mark is on the front."
        ),
        (
            "Speed is that of onnxruntime on one thread, texts by CPU second, the best of "
            f"{about['rounds']} rounds in turns: {about['texts']}, in the batches that a server makes when "
            "all of them wait. Nothing of HTTP or queues is in it. Sizes are those of the ONNX files; with "
            "float32 the weights are stored as float16."
        ),
        f"{about['machine']}; {about['libraries']}.",
        (
            "Accuracies are those of `valence-train evaluate <version> --suite $VALENCE_DATA --json FILE` "
            f"(`--precision`, `--against` for the other). All else:\n\n```\n{about['command']}\n```"
        ),
    ]
