"""Runs the CheckList sentiment suite on a classifier of two labels: how often each test of behaviour fails.

Ribeiro et al. 2020, "Beyond Accuracy: Behavioral Testing of NLP Models with CheckList". Knows nothing of how
a classifier is opened.

- MFT: a text whose label is beyond doubt. It fails when it gets the other one. A text that must not be called
  negative fails when it is.
- INV: a text and variants that mean the same. The group fails when a variant gets another label.
  (CheckList's own code forgives one whose probability moves by less than 0.1; here none is forgiven.)
- DIR: a text and variants that must not move the probability of a label one way. The group fails when a
  variant moves it there by more than 0.1. As in CheckList's `Expect.monotonic`, a group whose first text
  leaves no room for such a move cannot fail, and does not count.

Neutral texts say nothing of a model that has no label for them: they are left out, and named.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from training.calibrate import Chances, chances_of
from training.data import DataError, Example, table_rows
from training.evaluate import Classifier
from training.leaks import TrainedTexts, overlap

TOLERANCE = 0.1
NEUTRAL = "neutral texts: the model has no label for them"
NO_RULE = "no rule is known for this test"
# Expected labels of the file, and which of ours passes: "must not be negative" leaves positive.
_PASSES = {"eq_0": 0, "eq_2": 1, "not_0": 1}
_NEUTRAL = "eq_1"


class Direction(NamedTuple):
    """Where a probability must not go; of which label, 0 or 1, None: the one that the first text got."""

    label: int | None
    up: bool


DIRECTIONS = {
    "intensifiers": Direction(None, up=False),
    "reducers": Direction(None, up=True),
    '"used to" should reduce': Direction(None, up=True),
    "add positive phrases": Direction(1, up=False),
    "add negative phrases": Direction(1, up=True),
}


class Behaviour(NamedTuple):
    """One test by its name; `kind` is MFT, INV or DIR."""

    kind: str
    capability: str
    name: str


@dataclass(frozen=True, slots=True)
class Case:
    """What passes or fails as a whole: one text with its label, or a text and its variants."""

    texts: tuple[str, ...]
    label: int | None = None


@dataclass(frozen=True, slots=True)
class Checklist:
    """The cases of each test in the order of the files, and how many were left out, by test and reason."""

    cases: dict[Behaviour, list[Case]]
    left_out: dict[tuple[Behaviour, str], int]


def read_checklist(folder: Path, *, limit: int | None = None) -> Checklist:
    """Reads `mft.tsv.gz` and `perturbation.jsonl.gz`; at most `limit` cases of each test, drawn by one seed.

    Raises DataError.
    """
    found = Checklist({}, {})
    for where, row in table_rows(folder / "mft.tsv.gz"):
        if missing := {"text", "expect", "test", "capability"} - row.keys():
            raise DataError(f"{where}: no column {min(missing)!r}")
        test = Behaviour("MFT", row["capability"], row["test"])
        if row["expect"] == _NEUTRAL:
            _leave_out(found, test, NEUTRAL)
        elif row["expect"] in _PASSES:
            found.cases.setdefault(test, []).append(Case((row["text"],), _PASSES[row["expect"]]))
        else:
            raise DataError(f"{where}: the column 'expect' is none of {', '.join([*_PASSES, _NEUTRAL])}")
    for test, case in _groups(folder / "perturbation.jsonl.gz"):
        if test.kind == "DIR" and test.name not in DIRECTIONS:
            _leave_out(found, test, NO_RULE)
        else:
            found.cases.setdefault(test, []).append(case)
    if limit is not None:
        for test, cases in found.cases.items():
            chosen = np.random.default_rng(0).permutation(len(cases))[:limit]
            found.cases[test] = [cases[place] for place in sorted(chosen.tolist())]
    return found


def _leave_out(found: Checklist, test: Behaviour, reason: str) -> None:
    found.left_out[test, reason] = found.left_out.get((test, reason), 0) + 1


def _groups(path: Path) -> Iterator[tuple[Behaviour, Case]]:
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                row = json.loads(line)
                texts = tuple(map(str, row["texts"]))
                if row["type"] not in ("INV", "DIR") or len(texts) < 2:
                    raise DataError(f"{path}:{number}: no text with variants of type INV or DIR")
                yield Behaviour(row["type"], row["capability"], row["test"]), Case(texts)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}:{number}: not JSON lines of texts: {type(error).__name__}") from error


def run_checklist(
    classifier: Classifier, checklist: Checklist, *, trained: TrainedTexts | None = None
) -> dict[str, Any]:
    """The failure rate of each test, as JSON types, and what was left out and why.

    `cases` are those that could fail. `mean_change` is that of the probability of label 1 from the first text
    to a variant, without its sign. Each text is read once, however many tests it stands in.
    """
    texts = list(dict.fromkeys(t for cases in checklist.cases.values() for case in cases for t in case.texts))
    places = {text: place for place, text in enumerate(texts)}
    chances = chances_of(classifier.scores(texts, progress="checklist"))
    results = []
    for test, cases in checklist.cases.items():
        answers = [chances[[places[text] for text in case.texts]] for case in cases]
        verdicts = [_passes(test, case, answer) for case, answer in zip(cases, answers, strict=True)]
        count = sum(verdict is not None for verdict in verdicts)
        failures = sum(verdict is False for verdict in verdicts)
        changes = [] if test.kind == "MFT" else [np.abs(a[1:, 1] - a[0, 1]) for a in answers]
        results.append(
            {
                "type": test.kind,
                "capability": test.capability,
                "test": test.name,
                "cases": count,
                "failures": failures,
                "failure_rate": failures / count if count else None,
                "cannot_fail": len(cases) - count,
                "mean_change": float(np.concatenate(changes).mean()) if changes else None,
            }
        )
    shared = None if trained is None else overlap([Example(text, 0) for text in texts], trained)
    return {
        "tests": results,
        "left_out": [
            {"type": test.kind, "test": test.name, "cases": count, "reason": reason}
            for (test, reason), count in checklist.left_out.items()
        ],
        "texts": len(texts),
        "in_training_rows": None
        if shared is None
        else {"exact": shared.exact, "normalised": shared.normalised},
    }


def _passes(test: Behaviour, case: Case, chances: Chances) -> bool | None:
    """Whether a case passes, of probabilities float64[texts, 2]; None when it cannot fail."""
    best = chances.argmax(axis=1)
    if test.kind == "MFT":
        return bool(best[0] == case.label)
    if test.kind == "INV":
        return bool((best == best[0]).all())
    direction = DIRECTIONS[test.name]
    label = int(best[0]) if direction.label is None else direction.label
    own = chances[:, label] if direction.up else 1 - chances[:, label]
    if own[0] >= 1 - TOLERANCE:
        return None
    return bool((own[1:] - own[0] <= TOLERANCE).all())


def checklist_table(report: dict[str, Any]) -> str:
    """The report as text: a line for each test, then what was left out."""
    results: Sequence[dict[str, Any]] = report["tests"]
    width = max(len(result["test"]) for result in results)
    lines = [f"{'test':<{width}}  type  {'cases':>6}  failed    rate  mean change of p"]
    for result in results:
        rate, change = result["failure_rate"], result["mean_change"]
        lines.append(
            f"{result['test']:<{width}}  {result['type']:<4}  {result['cases']:>6}  {result['failures']:>6}"
            f"  {'-' if rate is None else format(rate, '.4f'):>6}"
            f"  {'' if change is None else format(change, '.4f')}".rstrip()
        )
    lines += [f"left out: {one['test']}: {one['cases']} cases, {one['reason']}" for one in report["left_out"]]
    if (shared := report["in_training_rows"]) is not None:
        counts = f"{shared['exact']} exact, {shared['normalised']} normalised"
        lines.append(f"{report['texts']} texts, in training rows: {counts}")
    return "\n".join(lines)
