"""The note for the model card puts goal beside figure, and says what is missed or was not measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from training.cli import main
from training.config import ConfigError
from training.goals import GOALS, against, card_table


def one_set(name: str, **figures: Any) -> dict[str, Any]:
    return {
        "set": name,
        "rows": 1000,
        "accuracy": 0.95,
        "weighted_f1": 0.95,
        "ece": 0.01,
        "ece_without_temperature": 0.05,
        "nll": 0.2,
        "pairs": None,
        "left_out": 0,
        "in_training_rows": {"exact": 0, "normalised": 3},
        **figures,
    }


def behaviour(name: str, rate: float | None) -> dict[str, Any]:
    return {"type": "MFT", "capability": "Negation", "test": name, "cases": 100, "failure_rate": rate}


def results(*sets: dict[str, Any], **more: Any) -> dict[str, Any]:
    about = {
        "model": "sentiment/2",
        "engine": "onnx",
        "precision": "int8",
        "max_tokens": 512,
        "temperature": 1.5,
    }
    return {**about, "sets": list(sets), **more}


def goal_rows(note: str) -> list[list[str]]:
    """The cells of the first table."""
    lines = note.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("| goal"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_every_goal_has_a_row_also_when_nothing_was_measured() -> None:
    rows = goal_rows(card_table(results()))
    assert len(rows) == len(GOALS)
    assert {row[4] for row in rows} == {"not measured"}


def test_figures_are_held_to_the_goals() -> None:
    compared = {
        "precision": "float32",
        "sets": [{"set": "imdb/test", "lost": 0.004}, {"set": "all sets", "lost": -0.001}],
    }
    rows = goal_rows(
        card_table(
            results(
                one_set("sst2/dev", accuracy=0.91),
                one_set("sst2/test", accuracy=0.926, ece=0.031),
                one_set("imdb/test", accuracy=0.9199, ece=0.02),
                one_set("imdb_cad/paired_test", pairs={"pairs": 488, "both_right": 0.9}),
                against=compared,
            )
        )
    )
    found = {(row[0], row[1]): (row[3], row[4]) for row in rows}
    assert found["accuracy", "sst2/dev"] == ("0.9100", "reached")
    assert found["accuracy", "sst2/test"] == ("0.9260", "reached, stretch too")
    assert found["accuracy", "imdb/test"] == ("0.9199", "**missed**")
    assert found["both of a pair right", "imdb_cad/paired_test"] == ("0.9000", "reached")
    assert found["accuracy, domain never trained on", "cr/all"] == ("–", "not measured")
    assert found["expected calibration error, 15 bins", "sst2/test"] == ("0.0310", "**missed**")
    assert found["expected calibration error, 15 bins", "imdb/test"] == ("0.0200", "reached")
    assert found["accuracy lost by int8 against float32", "imdb/test"] == ("0.0040", "**missed**")
    assert found["accuracy lost by int8 against float32", "all sets"] == ("-0.0010", "reached")


def test_every_set_is_shown_with_what_stands_in_training() -> None:
    note = card_table(results(one_set("cr/all", left_out=1)))
    assert (
        "| cr/all | 1,000 (1 without a text left out) | 0.9500 | 0.9500 | 0.050 → 0.010 | 0.200 | 0, 3 |"
        in note
    )


def test_behaviour_stands_beside_the_teachers() -> None:
    own = {
        "tests": [
            behaviour("plain", 0.10),
            behaviour("hard", 0.5),
            behaviour("new", 0.1),
            behaviour("x", None),
        ],
        "left_out": [{"type": "MFT", "test": "neutral words", "cases": 13, "reason": "no label for them"}],
    }
    theirs = {
        "tests": [behaviour("plain", 0.08) | {"cases": 1_050}, behaviour("hard", 0.4), behaviour("x", 0.0)],
        "left_out": [],
    }
    note = card_table(results(checklist=own), results(checklist=theirs))
    assert "| plain (Negation, MFT) | 100 | 10.0% | 8.0% of 1,050 | reached |" in note
    assert "| hard (Negation, MFT) | 100 | 50.0% | 40.0% | **missed** |" in note
    assert "| new (Negation, MFT) | 100 | 10.0% | not known |  |" in note
    assert "| x (Negation, MFT) | 100 | – | 0.0% | no case that can fail |" in note
    assert "Left out: neutral words (13: no label for them)." in note


def test_the_command_prints_or_writes_the_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(results(one_set("cr/all"))), encoding="utf-8")
    assert main(["card-table", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("## Measured on\n")
    assert main(["card-table", str(file), str(file), "--out", str(tmp_path / "note.md")]) == 0
    assert (tmp_path / "note.md").read_text(encoding="utf-8") == printed


def test_two_results_of_a_version_tell_what_a_form_loses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {}
    for precision, accuracies in (("int8", (0.90, 0.80)), ("float32", (0.91, 0.7975))):
        sets = [
            one_set("imdb/test", accuracy=accuracies[0], rows=100),
            one_set("cr/all", accuracy=accuracies[1], rows=300),
        ]
        files[precision] = tmp_path / f"{precision}.json"
        files[precision].write_text(json.dumps(results(*sets, precision=precision)), encoding="utf-8")
    assert main(["card-table", str(files["int8"]), "--float32", str(files["float32"])]) == 0
    found = {(row[0], row[1]): (row[3], row[4]) for row in goal_rows(capsys.readouterr().out)}
    assert found["accuracy lost by int8 against float32", "imdb/test"] == ("0.0100", "**missed**")
    # (100 · 0.01 − 300 · 0.0025) / 400
    assert found["accuracy lost by int8 against float32", "all sets"] == ("0.0006", "reached")


@pytest.mark.parametrize(
    ("other", "reason"),
    [({"model": "x/9"}, "tell no loss"), ({"sets": [one_set("cr/all")]}, "of other sets")],
)
def test_results_of_something_else_tell_no_loss(other: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        against(results(one_set("imdb/test")), results(one_set("imdb/test")) | other)


@pytest.mark.parametrize("content", ["{", "[]", "{}", None])
def test_what_evaluate_did_not_write_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    file = tmp_path / "results.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    assert main(["card-table", str(file)]) == 2
    assert str(file) in capsys.readouterr().err
