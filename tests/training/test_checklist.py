"""Each kind of test of behaviour passes and fails where it should, on files like the real ones."""

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training.calibrate import Chances
from training.checklist import checklist_table, read_checklist, run_checklist
from training.data import DataError
from training.leaks import TrainedTexts

MFT_HEAD = "text\tlabel\texpect\ttest\tcapability\n"


class Oracle:
    """A classifier whose probability of "positive" a test decides, text by text."""

    labels: tuple[str, ...] = ("negative", "positive")
    temperature = 1.0

    def __init__(self, positive: Mapping[str, float]) -> None:
        self.positive = positive
        self.asked: list[str] = []
        self.bars: list[str | None] = []

    def scores(self, texts: Sequence[str], *, progress: str | None = None) -> Chances:
        """What the test said of each text."""
        self.asked += texts
        self.bars.append(progress)
        own = np.array([self.positive[text] for text in texts])
        return np.stack([1 - own, own], axis=1)


def write_checklist(
    folder: Path, mft: Sequence[str] = (), groups: Sequence[tuple[str, str, list[str]]] = ()
) -> Path:
    lines = [
        json.dumps({"type": kind, "test": test, "capability": "Vocabulary", "texts": texts})
        for kind, test, texts in groups
    ]
    folder.mkdir(exist_ok=True)
    (folder / "mft.tsv.gz").write_bytes(gzip.compress((MFT_HEAD + "".join(mft)).encode()))
    (folder / "perturbation.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return folder


def results_of(folder: Path, positive: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    report = run_checklist(Oracle(positive), read_checklist(folder))
    return {one["test"]: one for one in report["tests"]}


def test_a_plain_text_fails_with_the_other_label_and_neutral_ones_are_left_out(tmp_path: Path) -> None:
    folder = write_checklist(
        tmp_path,
        [
            "great\t2\teq_2\twords\tVocabulary\n",
            "awful\t0\teq_0\twords\tVocabulary\n",
            "not great\t0\teq_0\tnegation\tNegation\n",
            "not awful\t\tnot_0\tnegation\tNegation\n",
            "british\t1\teq_1\tneutral words\tVocabulary\n",
            "it is not british\t1\teq_1\tnegation\tNegation\n",
        ],
    )
    positive = {"great": 0.9, "awful": 0.2, "not great": 0.7, "not awful": 0.4}
    report = run_checklist(Oracle(positive), read_checklist(folder))
    found = {one["test"]: (one["cases"], one["failures"], one["failure_rate"]) for one in report["tests"]}
    assert found == {"words": (2, 0, 0.0), "negation": (2, 2, 1.0)}
    assert {(one["test"], one["cases"]) for one in report["left_out"]} == {
        ("neutral words", 1),
        ("negation", 1),
    }
    assert all("neutral" in one["reason"] for one in report["left_out"])
    assert report["tests"][0]["mean_change"] is None


def test_a_variant_that_gets_another_label_fails_its_group_once(tmp_path: Path) -> None:
    folder = write_checklist(
        tmp_path,
        groups=[
            ("INV", "typos", ["fine", "fnie", "fien"]),
            ("INV", "typos", ["bad", "bda"]),
        ],
    )
    positive = {"fine": 0.55, "fnie": 0.45, "fien": 0.4, "bad": 0.1, "bda": 0.3}
    result = results_of(folder, positive)["typos"]
    assert (result["cases"], result["failures"], result["failure_rate"]) == (2, 1, 0.5)
    assert result["mean_change"] == pytest.approx((0.1 + 0.15 + 0.2) / 3)


@pytest.mark.parametrize(
    ("test", "first", "variant", "passes"),
    [
        # The label that the first text got must not lose: here positive, then negative.
        ("intensifiers", 0.8, 0.71, True),
        ("intensifiers", 0.8, 0.69, False),
        ("intensifiers", 0.8, 0.99, True),
        ("intensifiers", 0.3, 0.45, False),
        # It must not gain.
        ("reducers", 0.6, 0.69, True),
        ("reducers", 0.6, 0.71, False),
        ("reducers", 0.3, 0.1, False),
        ('"used to" should reduce', 0.6, 0.75, False),
        ('"used to" should reduce', 0.6, 0.2, True),
        # The probability of positive, whatever the label was.
        ("add positive phrases", 0.3, 0.19, False),
        ("add positive phrases", 0.3, 0.9, True),
        ("add negative phrases", 0.3, 0.41, False),
        ("add negative phrases", 0.3, 0.05, True),
        # No room to go wrong.
        ("intensifiers", 0.51, 0.0, False),
        ("reducers", 0.95, 0.99, None),
        ("reducers", 0.05, 0.01, None),
        ("add positive phrases", 0.08, 0.0, None),
        ("add negative phrases", 0.93, 1.0, None),
    ],
)
def test_a_probability_must_not_go_the_wrong_way(
    tmp_path: Path, test: str, first: float, variant: float, passes: bool | None
) -> None:
    folder = write_checklist(tmp_path, groups=[("DIR", test, ["a", "b"])])
    result = results_of(folder, {"a": first, "b": variant})[test]
    if passes is None:
        assert (result["cases"], result["cannot_fail"], result["failure_rate"]) == (0, 1, None)
    else:
        assert (result["cases"], result["failures"]) == (1, int(not passes))


def test_a_direction_without_a_rule_is_left_out_with_the_reason(tmp_path: Path) -> None:
    folder = write_checklist(tmp_path, groups=[("DIR", "shouting", ["a", "A"]), ("INV", "case", ["a", "A"])])
    report = run_checklist(Oracle({"a": 0.6, "A": 0.7}), read_checklist(folder))
    assert [one["test"] for one in report["tests"]] == ["case"]
    (left_out,) = report["left_out"]
    assert (left_out["test"], left_out["reason"]) == ("shouting", "no rule is known for this test")


def test_a_text_is_read_once_and_its_overlap_is_counted(tmp_path: Path) -> None:
    folder = write_checklist(
        tmp_path,
        ["good\t2\teq_2\twords\tVocabulary\n"],
        [("INV", "names", ["good", "fine"]), ("INV", "places", ["fine", "good"])],
    )
    oracle = Oracle({"good": 0.9, "fine": 0.8})
    report = run_checklist(oracle, read_checklist(folder), trained=TrainedTexts.of(["Good"]))
    assert sorted(oracle.asked) == ["fine", "good"]
    assert oracle.bars == ["checklist"]
    assert (report["texts"], report["in_training_rows"]) == (2, {"exact": 0, "normalised": 1})
    assert "2 texts, in training rows: 0 exact, 1 normalised" in checklist_table(report)


def test_a_sample_is_drawn_by_one_seed_from_each_test(tmp_path: Path) -> None:
    rows = [f"text {number}\t2\teq_2\t{test}\tVocabulary\n" for test in ("a", "b") for number in range(50)]
    folder = write_checklist(tmp_path, [*rows, "alone\t2\teq_2\tc\tVocabulary\n"])
    one, again = (read_checklist(folder, limit=7).cases for _ in range(2))
    assert one == again
    assert {test.name: len(cases) for test, cases in one.items()} == {"a": 7, "b": 7, "c": 1}


def test_the_table_shows_each_test_and_what_is_left_out(tmp_path: Path) -> None:
    folder = write_checklist(
        tmp_path,
        ["good\t2\teq_2\twords\tVocabulary\n", "grey\t1\teq_1\tneutral\tVocabulary\n"],
        [("INV", "typos", ["good", "godo"]), ("DIR", "reducers", ["good", "godo"])],
    )
    lines = checklist_table(run_checklist(Oracle({"good": 0.95, "godo": 0.05}), read_checklist(folder)))
    words, typos, reducers, left_out = (line.split() for line in lines.splitlines()[1:])
    assert words == ["words", "MFT", "1", "0", "0.0000"]
    assert typos == ["typos", "INV", "1", "1", "1.0000", "0.9000"]
    assert reducers == ["reducers", "DIR", "0", "0", "-", "0.9000"]
    assert left_out[:3] == ["left", "out:", "neutral:"]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"type": "INV", "test": "typos", "capability": "Robustness"}',
        '{"type": "MFT", "test": "typos", "capability": "Robustness", "texts": ["a", "b"]}',
        '{"type": "INV", "test": "typos", "capability": "Robustness", "texts": ["a"]}',
    ],
)
def test_a_line_that_is_no_group_is_refused(tmp_path: Path, line: str) -> None:
    folder = write_checklist(tmp_path)
    (folder / "perturbation.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    with pytest.raises(DataError, match=r"perturbation\.jsonl\.gz:1: "):
        read_checklist(folder)


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = write_checklist(tmp_path, ["good\t2\teq_9\twords\tVocabulary\n"])
    with pytest.raises(DataError, match=r"mft\.tsv\.gz:2: the column 'expect'"):
        read_checklist(folder)
    (folder / "mft.tsv.gz").write_bytes(gzip.compress(b"text\tlabel\ngood\t2\n"))
    with pytest.raises(DataError, match="no column 'capability'"):
        read_checklist(folder)
    with pytest.raises(DataError):
        read_checklist(tmp_path / "nowhere")


@pytest.mark.skipif(
    "VALENCE_DATA" not in os.environ, reason="VALENCE_DATA, the folder of data sets, is not set"
)
def test_the_real_files_have_the_cases_that_are_known() -> None:
    found = read_checklist(Path(os.environ["VALENCE_DATA"]) / "checklist")
    by_kind = {
        kind: sum(len(cases) for test, cases in found.cases.items() if test.kind == kind)
        for kind in ("MFT", "INV", "DIR")
    }
    assert by_kind == {"MFT": 68_912 - 13_205, "INV": 17_508 - 9368, "DIR": 9368}
    assert sum(found.left_out.values()) == 13_205
