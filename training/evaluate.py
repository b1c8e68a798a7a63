"""Measures a classifier on labelled sets: accuracy, weighted F1, confusion, calibration, pairs, by set.

Knows nothing of how a classifier is opened or was trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from training.calibrate import (
    Chances,
    calibration_error,
    chances_of,
    log_loss,
    reliability,
    without_temperature,
)
from training.data import DataError, Example, find_files, read_rows, role_of_name, set_name
from training.leaks import TrainedTexts, overlap


class Classifier(Protocol):
    """What can be measured.

    `scores` gives the probabilities float64[n, labels] that would be served, in the order of the texts; a bar
    shows how far it is when `progress` names it. `temperature` is the one in them.
    """

    labels: tuple[str, ...]
    temperature: float

    def scores(self, texts: Sequence[str], *, progress: str | None = None) -> Chances: ...


@dataclass(frozen=True, slots=True)
class LabelledSet:
    """What is measured together.

    Attributes:
        left_out: rows of the file that hold no text.
        pairs: for each example the name of its pair, where it is right only if all of its pair are.
    """

    examples: Sequence[Example]
    left_out: int = 0
    pairs: Sequence[str] | None = None


Sets = Mapping[str, LabelledSet]
Answers = Mapping[str, Chances]


@dataclass(frozen=True, slots=True)
class Scores:
    """What a set of predictions is worth. `confusion[i][j]` counts rows of label i predicted as j."""

    rows: int
    accuracy: float
    weighted_f1: float
    confusion: list[list[int]]


def score(labels: Sequence[int], predictions: Sequence[int], *, count: int) -> Scores:
    """Compares two sequences of label indices, both of n > 0 items below `count`, the number of labels.

    Weighted F1 is the mean of the labels' F1 = 2 TP / (2 TP + FP + FN), each weighted by its share of the
    rows; a label that is neither present nor predicted has F1 0 and weight 0 (scikit-learn's `f1_score` with
    `average="weighted"`). Raises ValueError for lengths that differ, no rows, or an index out of range.
    """
    truth = np.asarray(labels, dtype=np.int64)
    guess = np.asarray(predictions, dtype=np.int64)
    if truth.shape != guess.shape or truth.ndim != 1:
        raise ValueError(f"{truth.size} labels and {guess.size} predictions")
    if truth.size == 0:
        raise ValueError("no rows to score")
    if min(truth.min(), guess.min()) < 0 or max(truth.max(), guess.max()) >= count:
        raise ValueError(f"an index is outside 0 to {count - 1}")
    confusion = np.zeros((count, count), dtype=np.int64)
    np.add.at(confusion, (truth, guess), 1)
    hits = np.diag(confusion)
    support = confusion.sum(axis=1)
    totals = support + confusion.sum(axis=0)
    f1 = np.divide(2 * hits, totals, out=np.zeros(count), where=totals > 0)
    return Scores(
        rows=int(truth.size),
        accuracy=float(hits.sum() / truth.size),
        weighted_f1=float((f1 * support).sum() / truth.size),
        confusion=confusion.tolist(),
    )


def read_sets(paths: Sequence[Path], *, labels: int) -> dict[str, list[Example]]:
    """The rows of each file, by the name of the set. Of folders only dev*, val* and test* files are read.

    Raises DataError.
    """
    named = {path.resolve() for path in paths}
    found = find_files(paths)
    files = [path for path in found if path.resolve() in named or role_of_name(path.name) != "train"]
    if not files:
        raise DataError(f"{', '.join(map(str, paths))}: only training files; name one to measure it")
    sets: dict[str, list[Example]] = {}
    for file in files:
        name = set_name(file)
        rows = [example for example, _ in read_rows(file, labels=labels)]
        sets[name if name not in sets else str(file.resolve())] = rows
    return sets


def ask(classifier: Classifier, sets: Sets) -> dict[str, Chances]:
    """The probabilities of each set, float64[rows, labels], two columns or more."""
    return {
        name: chances_of(classifier.scores([example.text for example in one.examples], progress=name))
        for name, one in sets.items()
    }


def evaluate(
    sets: Sets, answers: Answers, *, temperature: float = 1.0, trained: TrainedTexts | None = None
) -> list[dict[str, Any]]:
    """What the answers to each set are worth, as JSON types.

    `ece` is the calibration error, `ece_without_temperature` what it is for the same logits at temperature 1,
    `nll` the log loss. `in_training_rows` counts what stands in `trained`; None when that is not known.
    """
    results = []
    for name, one in sets.items():
        chances, labels = answers[name], [example.label for example in one.examples]
        plain = without_temperature(chances, temperature)
        results.append(
            {
                "set": name,
                **asdict(score(labels, chances.argmax(axis=1).tolist(), count=chances.shape[1])),
                "ece": calibration_error(reliability(chances, labels)),
                "ece_without_temperature": calibration_error(reliability(plain, labels)),
                "nll": log_loss(chances, labels),
                "pairs": _pairs(one, chances),
                "left_out": one.left_out,
                "in_training_rows": None if trained is None else asdict(overlap(one.examples, trained)),
            }
        )
    return results


def _pairs(one: LabelledSet, chances: Chances) -> dict[str, Any] | None:
    if one.pairs is None:
        return None
    right: dict[str, bool] = {}
    for pair, example, best in zip(one.pairs, one.examples, chances.argmax(axis=1), strict=True):
        right[pair] = right.get(pair, True) and example.label == best
    return {"pairs": len(right), "both_right": sum(right.values()) / len(right)}


def compare(sets: Sets, answers: Answers, others: Answers) -> list[dict[str, Any]]:
    """What the answers lose against others, by set and over all rows (the last entry, `all sets`).

    `lost` is the accuracy of the others less that of the answers, `flips` the share of labels that differ.
    """
    truth = {name: np.array([example.label for example in one.examples]) for name, one in sets.items()}
    compared = [_compare(name, truth[name], answers[name], others[name]) for name in sets]
    pooled = [np.concatenate([by_set[name] for name in sets]) for by_set in (truth, answers, others)]
    return [*compared, _compare("all sets", *pooled)]


def _compare(name: str, labels: NDArray[np.int64], own: Chances, other: Chances) -> dict[str, Any]:
    best, others = own.argmax(axis=1), other.argmax(axis=1)
    right, theirs = float((best == labels).mean()), float((others == labels).mean())
    return {
        "set": name,
        "rows": len(labels),
        "accuracy": right,
        "accuracy_of_other": theirs,
        "lost": theirs - right,
        "flips": float((best != others).mean()),
        "mean_change_of_a_probability": float(np.abs(own - other).max(axis=1).mean()),
    }


def table(results: Sequence[dict[str, Any]], labels: Sequence[str]) -> str:
    """The results as text: a line for each set, then the confusion of each."""
    width = max(len("set"), *(len(result["set"]) for result in results))
    head = (
        f"{'set':<{width}}  {'rows':>6}  accuracy  weighted F1     ECE     NLL"
        "  in training rows (exact, normalised)"
    )
    lines = [head, "-" * len(head)]
    notes = []
    for result in results:
        shared = result["in_training_rows"]
        counts = "not known" if shared is None else f"{shared['exact']}, {shared['normalised']}"
        lines.append(
            f"{result['set']:<{width}}  {result['rows']:>6}  {result['accuracy']:>8.4f}"
            f"  {result['weighted_f1']:>11.4f}  {result['ece']:>6.4f}  {result['nll']:>6.4f}  {counts}"
        )
        if (pairs := result["pairs"]) is not None:
            share = f"{pairs['both_right']:.4f} of {pairs['pairs']}"
            notes.append(f"{result['set']}: both of a pair right: {share}")
        if result["left_out"]:
            notes.append(f"{result['set']}: {result['left_out']} rows without a text are left out")
    names = (f"not {labels[0]}", labels[0]) if len(labels) == 1 else labels
    return "\n".join([*lines, *([""] if notes else []), *notes, *_confusions(results, names)])


def _confusions(results: Sequence[dict[str, Any]], labels: Sequence[str]) -> list[str]:
    side = max(len(name) for name in labels)
    column = max(side, 6)
    lines = []
    for result in results:
        lines += ["", f"{result['set']}: rows are labels, columns predictions"]
        lines.append(" " * side + "".join(f"  {name:>{column}}" for name in labels))
        for name, row in zip(labels, result["confusion"], strict=True):
            lines.append(f"{name:>{side}}" + "".join(f"  {count:>{column}}" for count in row))
    return lines


def comparison_table(results: Sequence[dict[str, Any]], precision: str, other: str) -> str:
    """What `compare` gives as text, between two precisions."""
    width = max(len(result["set"]) for result in results)
    lines = [f"{'set':<{width}}  {'rows':>6}  {precision:>8}  {other:>8}     lost   flips"]
    lines += [
        f"{result['set']:<{width}}  {result['rows']:>6}  {result['accuracy']:>8.4f}"
        f"  {result['accuracy_of_other']:>8.4f}  {result['lost']:>+7.4f}  {result['flips']:>6.4f}"
        for result in results
    ]
    return "\n".join(lines)
