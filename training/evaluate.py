"""Measures a classifier on labelled sets: accuracy, weighted F1, confusion, by set.

Knows nothing of how a classifier is opened or was trained.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from training.data import DataError, Example, find_files, read_rows, role_of_name, set_name
from training.leaks import overlap


class Classifier(Protocol):
    """What can be measured. `classify` gives the index of the best label of each text.

    `about` says in JSON types what read it: `kind`, `engine`, `precision` and `max_tokens`.
    """

    @property
    def labels(self) -> tuple[str, ...]: ...

    def about(self) -> dict[str, Any]: ...

    def classify(self, texts: Sequence[str]) -> list[int]: ...


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


def evaluate(
    classifier: Classifier, sets: dict[str, list[Example]], *, trained: frozenset[str] | None = None
) -> list[dict[str, Any]]:
    """The scores of each set, as JSON types, and its overlap with `trained` (None when that is not known)."""
    results = []
    for name, examples in sets.items():
        predictions = classifier.classify([example.text for example in examples])
        scores = score([example.label for example in examples], predictions, count=len(classifier.labels))
        shared = None if trained is None else asdict(overlap(examples, trained))
        results.append({"set": name, **asdict(scores), "in_training_rows": shared})
    return results


def table(results: Sequence[dict[str, Any]], labels: Sequence[str]) -> str:
    """The results as text: a line for each set, then the confusion of each."""
    width = max(len("set"), *(len(result["set"]) for result in results))
    head = f"{'set':<{width}}  {'rows':>6}  accuracy  weighted F1  in training rows (exact, normalised)"
    lines = [head, "-" * len(head)]
    for result in results:
        shared = result["in_training_rows"]
        counts = "not known" if shared is None else f"{shared['exact']}, {shared['normalised']}"
        lines.append(
            f"{result['set']:<{width}}  {result['rows']:>6}  {result['accuracy']:>8.4f}"
            f"  {result['weighted_f1']:>11.4f}  {counts}"
        )
    side = max(len(name) for name in labels)
    column = max(side, 6)
    for result in results:
        lines += ["", f"{result['set']}: rows are labels, columns predictions"]
        lines.append(" " * side + "".join(f"  {name:>{column}}" for name in labels))
        for name, row in zip(labels, result["confusion"], strict=True):
            lines.append(f"{name:>{side}}" + "".join(f"  {count:>{column}}" for count in row))
    return "\n".join(lines)
