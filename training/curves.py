"""Draws the curves of a run and reliability diagrams. Knows nothing of how the numbers came about."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from training.calibrate import Bin, Chances, calibration_error, reliability, without_temperature


def draw_curves(metrics: dict[str, Any], path: Path) -> None:
    """Writes a PNG: the losses on the left, accuracy and weighted F1 of the dev set on the right.

    `metrics` are those that `train.fit` returns. The best epoch is marked.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    losses, scores = figure.subplots(1, 2)
    train, dev = metrics["train_loss"], metrics["epochs"]
    epochs = [entry["epoch"] for entry in dev]
    times = [entry["epoch"] for entry in train]
    losses.plot(times, [entry["loss"] for entry in train], label="training", lw=1)
    losses.plot(epochs, [entry["dev_loss"] for entry in dev], "o-", label="dev")
    losses.set(xlabel="epoch", ylabel="loss", title="Loss")
    for key, name in (("accuracy", "accuracy"), ("weighted_f1", "weighted F1")):
        scores.plot(epochs, [entry[key] for entry in dev], "o-", label=name, alpha=0.8)
    scores.axvline(metrics["best_epoch"], ls=":", color="grey", label="best epoch")
    scores.set(xlabel="epoch", xticks=epochs, title="Dev set")
    for axes in (losses, scores):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120, format="png")


def draw_reliability(
    chances: Chances, labels: Sequence[int], path: Path, *, temperature: float, title: str
) -> None:
    """Writes a PNG: how often answers are right by how sure they are, without and with the temperature.

    `chances` float64[n, labels] have the temperature in them. A bar that reaches the diagonal is honest.
    """
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    before, after = figure.subplots(1, 2, sharey=True)
    _bars(before, reliability(without_temperature(chances, temperature), labels), "temperature 1")
    _bars(after, reliability(chances, labels), f"temperature {temperature:.3g}")
    before.set(ylabel="share that is right, share of rows")
    before.legend(loc="upper left", fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=80, format="png")


def _bars(axes: Axes, bins: Sequence[Bin], name: str) -> None:
    filled = [one for one in bins if one.rows]
    rows = sum(one.rows for one in filled)
    width = bins[0].high - bins[0].low
    middles = [(one.low + one.high) / 2 for one in filled]
    axes.bar(middles, [one.accuracy or 0.0 for one in filled], width * 0.95, label="right", color="#4477aa")
    axes.bar(middles, [one.rows / rows for one in filled], width * 0.4, label="rows", color="#ccbb44")
    axes.plot([0, 1], [0, 1], ls=":", color="grey")
    axes.set(xlabel="confidence", xlim=(0.45, 1), ylim=(0, 1))
    axes.set_title(f"{name}: ECE {calibration_error(bins):.3f}", fontsize="medium")
    axes.grid(alpha=0.3)
