"""The goals of the default model, and the command `valence-train card-table`: goal beside figure.

Reads what `valence-train evaluate --suite --json` writes. Knows nothing of models.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.config import ConfigError

TEACHER_MARGIN = 0.02
"""How much more often than the teacher's a test of behaviour may fail, as a share of its cases."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on one figure.

    Attributes:
        figure: a field of the set's results, with a dot between levels.
        least: the figure is to be at least the bound; else at most.
        stretch: a harder bound, for pride.
        of: the list that holds the set.
    """

    what: str
    set: str
    figure: str
    bound: float
    least: bool = True
    stretch: float | None = None
    of: str = "sets"


GOALS = (
    Goal("accuracy", "sst2/dev", "accuracy", 0.91, stretch=0.925),
    Goal("accuracy", "sst2/test", "accuracy", 0.91, stretch=0.925),
    Goal("accuracy", "imdb/test", "accuracy", 0.92),
    Goal("both of a pair right", "imdb_cad/paired_test", "pairs.both_right", 0.85),
    Goal("accuracy, domain never trained on", "blitzer/kitchen", "accuracy", 0.91, stretch=0.92),
    Goal("accuracy, domain never trained on", "cr/all", "accuracy", 0.88, stretch=0.90),
    Goal("expected calibration error, 15 bins", "sst2/test", "ece", 0.03, least=False),
    Goal("expected calibration error, 15 bins", "imdb/test", "ece", 0.02, least=False),
    Goal("accuracy lost", "imdb/test", "lost", 0.003, least=False, of="against"),
    Goal("accuracy lost", "all sets", "lost", 0.003, least=False, of="against"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("results", type=Path, help="what evaluate --suite --json wrote of the model")
    add("teacher", type=Path, nargs="?", help="the same of its teacher, for the tests of behaviour")
    add("--float32", type=Path, help="the same of its float32 form, where that was measured by itself")
    add("--out", type=Path, help="write the note to this file, for card or export --card (default: print it)")


def main(options: argparse.Namespace) -> int:
    """Writes the note and returns 0. Raises ConfigError."""
    teacher = None if options.teacher is None else _read(options.teacher)
    results = _read(options.results)
    if options.float32 is not None:
        results["against"] = against(results, _read(options.float32))
    note = card_table(results, teacher)
    if options.out is None:
        print(note, end="")
    else:
        options.out.write_text(note, encoding="utf-8")
    return 0


def card_table(results: dict[str, Any], teacher: dict[str, Any] | None = None) -> str:
    """A section of the model card: each goal with its figure, every set, every test of behaviour.

    A figure that the results lack is shown as not measured, which is not reached.
    """
    form = f"{results['engine']}/{results['precision']}"
    limits = f"texts cut at {results['max_tokens']} tokens, temperature {results['temperature']:.4g}"
    parts = [
        "## Measured on",
        f"Read by {form}, {limits}.",
        _table(("goal", "on", "bound", "figure", ""), [_row(goal, results) for goal in GOALS]),
        _table(
            (
                "set",
                "rows",
                "accuracy",
                "weighted F1",
                "ECE at 1 → now",
                "NLL",
                "in training rows (exact, normalised)",
            ),
            list(_set_rows(results)),
        ),
    ]
    if "checklist" in results:
        parts += ["### Behaviour (CheckList)", *_behaviour(results["checklist"], teacher)]
    return "\n\n".join(parts) + "\n"


def against(results: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What `evaluate --against` says of accuracy, from two results of one version on the same sets.

    Raises ConfigError when they are not: of two versions, or of sets that differ.
    """
    sets, others = ({one["set"]: one for one in both["sets"]} for both in (results, other))
    if results["model"] != other["model"]:
        raise ConfigError(f"results of {results['model']} and of {other['model']} tell no loss")
    rows = {name: one["rows"] for name, one in sets.items()}
    if rows != {name: one["rows"] for name, one in others.items()}:
        raise ConfigError(
            f"the results in {results['precision']} and in {other['precision']} are of other sets"
        )
    lost = {name: others[name]["accuracy"] - one["accuracy"] for name, one in sets.items()}
    pooled = sum(lost[name] * rows[name] for name in sets) / sum(rows.values())
    return {
        "precision": other["precision"],
        "sets": [{"set": name, "lost": value} for name, value in {**lost, "all sets": pooled}.items()],
    }


def _row(goal: Goal, results: dict[str, Any]) -> tuple[str, ...]:
    sign = "≥" if goal.least else "≤"
    bound = f"{sign} {goal.bound:g}" + (f", stretch {goal.stretch:g}" if goal.stretch else "")
    what = goal.what
    if goal.of == "against":
        what = f"{what} by {results['precision']} against float32"
    figure = _figure(goal, results)
    if figure is None:
        return what, goal.set, bound, "–", "not measured"
    return what, goal.set, bound, f"{figure:.4f}", _verdict(goal, figure)


def _figure(goal: Goal, results: dict[str, Any]) -> float | None:
    sets = results["sets"]
    if goal.of == "against":
        against = results.get("against", {})
        sets = against["sets"] if against.get("precision") == "float32" else []
    found: Any = next((one for one in sets if one["set"] == goal.set), None)
    for level in goal.figure.split("."):
        found = None if found is None else found[level]
    return None if found is None else float(found)


def _verdict(goal: Goal, figure: float) -> str:
    if not (figure >= goal.bound if goal.least else figure <= goal.bound):
        return "**missed**"
    return "reached, stretch too" if goal.stretch is not None and figure >= goal.stretch else "reached"


def _set_rows(results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for one in results["sets"]:
        shared = one["in_training_rows"]
        yield (
            one["set"],
            f"{one['rows']:,}" + (f" ({one['left_out']} without a text left out)" if one["left_out"] else ""),
            f"{one['accuracy']:.4f}",
            f"{one['weighted_f1']:.4f}",
            f"{one['ece_without_temperature']:.3f} → {one['ece']:.3f}",
            f"{one['nll']:.3f}",
            "not known" if shared is None else f"{shared['exact']}, {shared['normalised']}",
        )


def _behaviour(report: dict[str, Any], teacher: dict[str, Any] | None) -> list[str]:
    """The tests, each against the teacher's failure rate where that is known, and what is left out."""
    theirs = {
        (one["type"], one["test"]): one for one in (teacher or {}).get("checklist", {}).get("tests", [])
    }
    rows = []
    for one in report["tests"]:
        other = theirs.get((one["type"], one["test"]))
        rows.append(
            (
                f"{one['test']} ({one['capability']}, {one['type']})",
                f"{one['cases']:,}",
                _share(one["failure_rate"]),
                "not known" if other is None else _teachers(other, one["cases"]),
                "" if other is None else _against_teacher(one["failure_rate"], other["failure_rate"]),
            )
        )
    head = ("test", "cases", "failed", "teacher failed", f"at most the teacher's + {TEACHER_MARGIN:.0%}")
    parts = [_table(head, rows)]
    if report["left_out"]:
        gone = "; ".join(f"{one['test']} ({one['cases']:,}: {one['reason']})" for one in report["left_out"])
        parts.append(f"Left out: {gone}.")
    return parts


def _teachers(other: dict[str, Any], cases: int) -> str:
    """Its rate, and how many cases that is of where it was asked others."""
    share = _share(other["failure_rate"])
    return share if other["cases"] == cases else f"{share} of {other['cases']:,}"


def _share(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:.1%}"


def _against_teacher(rate: float | None, teachers: float | None) -> str:
    if rate is None or teachers is None:
        return "no case that can fail"
    return "reached" if rate <= teachers + TEACHER_MARGIN else "**missed**"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _read(path: Path) -> dict[str, Any]:
    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if "sets" not in results or "temperature" not in results:
            raise ConfigError(f"{path}: not what evaluate --json writes")
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return results
