"""Draws the curves of a run into a picture. Knows nothing of how the numbers came about."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


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
