"""The command `valence-train evaluate`: opens a classifier, asks it, and tells what its answers are worth.

Knows the order of the steps; opening, reading and scoring are others' work.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from training.calibrate import Chances
from training.checklist import checklist_table, read_checklist, run_checklist
from training.classifiers import Reader, open_classifier
from training.config import ConfigError, write_json
from training.curves import draw_reliability
from training.data import DataError
from training.evaluate import (
    Answers,
    LabelledSet,
    Sets,
    ask,
    compare,
    comparison_table,
    evaluate,
    read_sets,
    table,
)
from training.leaks import TrainedTexts
from training.runs import trained_texts
from training.suite import CHECKLIST, LABELS, read_suite


def main(options: argparse.Namespace) -> int:
    """Measures, prints and writes. Returns 0. Raises ConfigError or DataError."""
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    classifier = _open(options, options.precision)
    other = None if options.against is None else _other(options, classifier)
    trained = _trained_texts(options)
    sets = _sets(options, classifier)
    checklist = None
    if options.suite is not None:
        checklist = read_checklist(options.suite / CHECKLIST, limit=options.checklist_rows)
    report: dict[str, Any] = {
        "model": _name(options.model),
        **classifier.about(),
        "labels": list(classifier.labels),
        "temperature": classifier.temperature,
        "sets": [],
    }
    answers: dict[str, Chances] = {}
    for name, one in sets.items():
        own = ask(classifier, {name: one})
        answers |= own
        report["sets"] += evaluate({name: one}, own, temperature=classifier.temperature, trained=trained)
        _keep(options, report)
    print(table(report["sets"], classifier.labels))
    if options.diagrams is not None:
        _draw(options.diagrams, sets, answers, classifier.temperature)
    if checklist is not None:
        report["checklist"] = run_checklist(classifier, checklist, trained=trained)
        print(f"\n{checklist_table(report['checklist'])}")
        _keep(options, report)
    if other is not None:
        precision = other.about()["precision"]
        compared = compare(sets, answers, ask(other, sets))
        report["against"] = {"precision": precision, "sets": compared}
        print(f"\n{comparison_table(compared, report['precision'], precision)}")
        _keep(options, report)
    return 0


def _name(model: Path) -> str:
    """`sentiment/2` of a version, else the name of the folder; where it lies says nothing elsewhere."""
    path = model.resolve()
    return f"{path.parent.name}/{path.name}" if (path / "manifest.json").is_file() else path.name


def _keep(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Writes what is known so far: the rest may take an hour."""
    if options.json is not None:
        write_json(options.json, report)


def _open(options: argparse.Namespace, precision: str) -> Reader:
    return open_classifier(options.model, threads=options.threads, engine=options.engine, precision=precision)


def _sets(options: argparse.Namespace, classifier: Reader) -> Sets:
    count = max(2, len(classifier.labels))
    if options.suite is None:
        given = read_sets(options.data, labels=count)
        return {name: LabelledSet(rows) for name, rows in given.items()}
    if count != LABELS:
        raise ConfigError(f"--suite is for two labels, {options.model} has {count}; see --data")
    return read_suite(options.suite, quick=options.quick)


def _other(options: argparse.Namespace, classifier: Reader) -> Reader:
    other = _open(options, options.against)
    if other.about() == classifier.about():
        raise ConfigError(f"--against {options.against}: the model is measured in that already")
    return other


def _draw(folder: Path, sets: Sets, answers: Answers, temperature: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in sets:
        if name.split("/")[-1].startswith("test"):
            labels = [example.label for example in sets[name].examples]
            path = folder / f"reliability.{name.replace('/', '.')}.png"
            draw_reliability(answers[name], labels, path, temperature=temperature, title=name)
            print(f"{path} is drawn")


def _trained_texts(options: argparse.Namespace) -> TrainedTexts | None:
    """The texts that a run was trained on; None when no run is named or its data is gone."""
    run: Path = options.trained_on or options.model
    if options.trained_on is None and not (run / "metrics.json").is_file():
        return None
    try:
        return TrainedTexts.of(trained_texts(run))
    except DataError as error:
        print(f"valence-train: overlaps are not counted: {error}", file=sys.stderr)
        return None
