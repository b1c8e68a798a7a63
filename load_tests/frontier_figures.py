"""The forms of a model that are compared, their accuracies from the files of `valence-train evaluate --json`,
and who is on the Pareto front.

Knows nothing of how speed is measured or of how anything is shown.
"""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)
Name = tuple[str, str]
"""Label of the model and precision: what a form is known by."""

POOLED = "all sets"
"""What `evaluate --against` calls the rows of all sets together."""


class FrontierError(Exception):
    """What was given cannot be compared; the message says why."""


@dataclass(frozen=True, slots=True)
class Score:
    """Accuracy on a labelled set of so many rows."""

    accuracy: float
    rows: int


@dataclass(frozen=True, slots=True)
class Speed:
    """Texts by CPU second of the least and of the median round; `tokens` of a text on average."""

    best_texts_per_s: float
    median_texts_per_s: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Form:
    """A model in one precision. What was not measured is not there.

    Attributes:
        label: what the model is called in picture and table.
        version: `<name> <number>` in its store.
        bytes: of the ONNX file.
        scores: by set.
        speeds: by kind of text.
    """

    label: str
    precision: str
    version: str
    bytes: int
    scores: Mapping[str, Score] = field(default_factory=dict)
    speeds: Mapping[str, Speed] = field(default_factory=dict)

    @property
    def name(self) -> Name:
        """What it is known by."""
        return self.label, self.precision

    def accuracy(self, sets: Sequence[str]) -> float | None:
        """The mean over the sets, each with the same weight; None when one was not measured."""
        if not sets or any(one not in self.scores for one in sets):
            return None
        return sum(self.scores[one].accuracy for one in sets) / len(sets)

    def texts_per_s(self, kind: str) -> float | None:
        """Of the least round; None when it was not measured."""
        return self.speeds[kind].best_texts_per_s if kind in self.speeds else None

    @property
    def megabytes(self) -> float:
        """Of 10⁶ bytes."""
        return self.bytes / 1e6


@dataclass(frozen=True, slots=True)
class Result:
    """What one file of results says of one form, and who read the texts."""

    name: Name
    scores: Mapping[str, Score]
    about: Mapping[str, Any]


def read_results(file: Path, label: str | None, labels: Mapping[str, Sequence[str]]) -> list[Result]:
    """The forms that a file speaks of: the one that was measured, and the one it was compared with.

    Args:
        label: of the model; None to find it by the version that the file names, `<name>/<number>`.
        labels: of the models, by that.

    Raises:
        FrontierError: it is not such a file, or of none or several of the models.
    """
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        about = {key: report.get(key) for key in ("model", "engine", "precision", "max_tokens")}
        found = {report["precision"]: _scores(report["sets"], "accuracy")}
        if (other := report.get("against")) is not None:
            found[other["precision"]] = _scores(other["sets"], "accuracy_of_other")
        model = str(report["model"])
    except OSError as error:
        raise FrontierError(f"{file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FrontierError(f"{file}: not a file of valence-train evaluate --json: {error!r}") from error
    if label is None:
        fitting = labels.get(model, [])
        if len(fitting) != 1:
            raise FrontierError(
                f"{file}: results of {model!r}, which {len(fitting)} of the versions are: "
                "name the model, FILE=LABEL"
            )
        label = fitting[0]
    elif label not in (known := sorted({one for several in labels.values() for one in several})):
        raise FrontierError(f"{file}: no version is called {label!r}; there are {', '.join(known)}")
    chosen = label
    return [
        Result((chosen, precision), scores, about | {"precision": precision, "file": file.name})
        for precision, scores in found.items()
    ]


def _scores(sets: Sequence[Mapping[str, Any]], column: str) -> dict[str, Score]:
    return {one["set"]: Score(float(one[column]), int(one["rows"])) for one in sets if one["set"] != POOLED}


def scores_by_form(results: Sequence[Result]) -> dict[Name, dict[str, Score]]:
    """All results of each form. FrontierError when two do not agree."""
    merged: dict[Name, dict[str, Score]] = {}
    for result in results:
        known = merged.setdefault(result.name, {})
        for name, score in result.scores.items():
            if known.setdefault(name, score) != score:
                form = " in ".join(result.name)
                raise FrontierError(f"{form}: two results on {name} differ: {known[name]} and {score}")
    return merged


def shared_sets(forms: Sequence[Form], wanted: Sequence[str] = ()) -> list[str]:
    """The sets that the mean is over: those that are wanted, or all that every form with results has.

    FrontierError for a wanted set that no form has.
    """
    measured = [form.scores for form in forms if form.scores]
    if unknown := [one for one in wanted if not any(one in scores for scores in measured)]:
        raise FrontierError(f"no results on {', '.join(unknown)}")
    if wanted:
        return list(wanted)
    return [one for one in measured[0] if all(one in scores for scores in measured)] if measured else []


def pareto(points: Mapping[Key, tuple[float, float]]) -> list[Key]:
    """The points that no other beats: none is as good in both numbers and better in one. More is better.

    Ordered by the first number, the least first; of equal points all are members.
    """
    ordered = sorted(points, key=lambda key: (-points[key][0], -points[key][1]))
    members: list[Key] = []
    best = -float("inf")
    for key in ordered:
        if points[key][1] > best or (members and points[key] == points[members[-1]]):
            members.append(key)
            best = points[key][1]
    return members[::-1]


def fastest_front(forms: Sequence[Form], sets: Sequence[str], kind: str) -> list[Name]:
    """The front of accuracy over speed, the slowest member first. What lacks a figure is not in it."""
    return pareto(
        {
            form.name: (speed, accuracy)
            for form in forms
            if (accuracy := form.accuracy(sets)) is not None and (speed := form.texts_per_s(kind)) is not None
        }
    )


def smallest_front(forms: Sequence[Form], sets: Sequence[str]) -> list[Name]:
    """The front of accuracy over size, the largest member first."""
    return pareto(
        {
            form.name: (-float(form.bytes), accuracy)
            for form in forms
            if (accuracy := form.accuracy(sets)) is not None
        }
    )


def standard_error(form: Form, sets: Sequence[str]) -> float:
    """Of the mean accuracy: √Σ p (1 − p) / n over the number of sets, all of which the form has."""
    variances = [one.accuracy * (1 - one.accuracy) / one.rows for one in (form.scores[name] for name in sets)]
    return float(sum(variances) ** 0.5 / len(sets))
