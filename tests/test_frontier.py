"""The frontier: real versions in the real engine, and results as `valence-train evaluate` writes them."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from load_tests.frontier import frontier, main, open_named, server_batches
from load_tests.frontier_figures import (
    Form,
    FrontierError,
    Score,
    Speed,
    pareto,
    read_results,
    scores_by_form,
    shared_sets,
    standard_error,
)
from load_tests.frontier_page import LONG, SENTENCES, Frontier, draw, page
from load_tests.verdict import EXIT_CANNOT_RUN, EXIT_MET
from service.core import Encoding
from service.engines import pad
from service.settings import Settings
from tests.models import make_version
from training.cli import main as valence_train

PNG = b"\x89PNG\r\n\x1a\n"
QUICK = ["--sentences", "5", "--reviews", "2", "--rounds", "1"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Version 1 of two models, each in float32 and int8."""
    for name in ("plain", "teacher"):
        make_version(tmp_path / "store", name, max_tokens=256, precisions=("float32", "int8"))
    return tmp_path / "store"


def write_results(file: Path, accuracy: dict[str, float], **more: Any) -> Path:
    """As `evaluate --json` does: what the frontier reads of it."""
    sets = [{"set": name, "rows": 100, "accuracy": value} for name, value in accuracy.items()]
    file.write_text(json.dumps({"model": "a/1", "engine": "onnx", "precision": "int8", "sets": sets} | more))
    return file


def form(
    label: str,
    accuracy: float | None,
    *,
    speed: float | None = None,
    bytes_: int = 10,
    precision: str = "int8",
) -> Form:
    scores = {} if accuracy is None else {"a": Score(accuracy, 100)}
    speeds = {} if speed is None else {SENTENCES: Speed(speed, speed, 20.0)}
    return Form(label, precision, f"{label} 1", bytes_, scores, speeds)


ABOUT = {"rounds": 1, "texts": "5 sentences", "machine": "one", "libraries": "two", "command": "three"}


def test_nobody_on_the_front_is_beaten_and_everybody_else_is() -> None:
    points = {
        "slow and best": (1.0, 0.95),
        "fast and poor": (9.0, 0.80),
        "middle": (4.0, 0.90),
        "beaten in both": (3.0, 0.85),
        "as good and slower": (2.0, 0.90),
        "as fast and worse": (9.0, 0.70),
    }
    assert pareto(points) == ["slow and best", "middle", "fast and poor"]


def test_equals_share_their_place_and_no_points_make_no_front() -> None:
    assert sorted(pareto({"a": (1.0, 0.9), "b": (1.0, 0.9), "c": (0.5, 0.9)})) == ["a", "b"]
    assert pareto({}) == []


def test_the_fronts_are_of_speed_and_of_size_and_what_lacks_a_figure_is_on_none() -> None:
    forms = [
        form("teacher", 0.95, speed=10, bytes_=400),
        form("small", 0.90, speed=200, bytes_=20),
        form("as good, larger, faster", 0.90, speed=300, bytes_=40),
        form("not measured", None, speed=900, bytes_=1),
        form("does not run", 0.99, bytes_=900),
    ]
    made = Frontier(forms, ["a"], ABOUT)
    assert made.fastest() == [("teacher", "int8"), ("as good, larger, faster", "int8")]
    assert made.smallest() == [("does not run", "int8"), ("teacher", "int8"), ("small", "int8")]
    assert made.fastest(LONG) == []
    assert [made.fronts_of(one) for one in forms] == [
        [SENTENCES, "size"],
        ["size"],
        [SENTENCES],
        [],
        ["size"],
    ]


def test_the_table_has_the_best_first_and_a_dash_for_what_is_not_known() -> None:
    made = Frontier([form("none", None), form("low", 0.7, speed=5), form("high", 0.9)], ["a"], ABOUT, "Why.")
    text = page(made)
    rows = [line.split(" | ") for line in text.splitlines() if " | int8 | " in line]
    assert [row[0] for row in rows] == ["| high", "| low", "| none"]
    assert [row[2] for row in rows] == ["0.9000", "0.7000", "–"]
    assert [row[7] for row in rows] == ["–", "5", "–"]
    assert text.endswith("\n\nWhy.\n")


def test_the_mean_gives_each_set_the_same_weight() -> None:
    one = Form("x", "int8", "x 1", 1, {"a": Score(0.8, 100), "b": Score(0.9, 900)})
    assert one.accuracy(["a", "b"]) == pytest.approx(0.85)
    assert one.accuracy(["a", "c"]) is None
    assert one.accuracy([]) is None
    # √(0.8 · 0.2 / 100 + 0.9 · 0.1 / 900) / 2
    assert standard_error(one, ["a", "b"]) == pytest.approx((0.0016 + 0.0001) ** 0.5 / 2)


def test_by_default_the_mean_is_over_what_all_results_share() -> None:
    two = Form("x", "int8", "x 1", 1, {"a": Score(0.8, 100), "b": Score(0.9, 100)})
    forms = [two, form("y", 0.9), form("z", None)]
    assert shared_sets(forms) == ["a"]
    assert shared_sets(forms, ["b", "a"]) == ["b", "a"]
    assert shared_sets([form("z", None)]) == []
    with pytest.raises(FrontierError, match="no results on c"):
        shared_sets(forms, ["a", "c"])


def test_a_file_of_results_speaks_of_both_precisions(tmp_path: Path) -> None:
    other = [{"set": name, "rows": 100, "accuracy_of_other": 0.75} for name in ("a", "all sets")]
    against = {"precision": "float32", "sets": other}
    file = write_results(tmp_path / "r.json", {"a": 0.5}, against=against)
    results = read_results(file, None, {"a/1": ["plain"]})
    assert scores_by_form(results) == {
        ("plain", "int8"): {"a": Score(0.5, 100)},
        ("plain", "float32"): {"a": Score(0.75, 100)},
    }


def test_two_results_of_a_form_are_joined_and_must_agree(tmp_path: Path) -> None:
    files = [
        write_results(tmp_path / "1.json", {"a": 0.5}),
        write_results(tmp_path / "2.json", {"a": 0.5, "b": 0.6}),
        write_results(tmp_path / "3.json", {"b": 0.7}),
    ]
    results = [one for file in files for one in read_results(file, "x", {"a/1": ["x", "y"]})]
    assert set(scores_by_form(results[:2])["x", "int8"]) == {"a", "b"}
    with pytest.raises(FrontierError, match="x in int8: two results on b differ"):
        scores_by_form(results)


@pytest.mark.parametrize(
    ("content", "label", "reason"),
    [
        ("{}", None, "not a file of valence-train evaluate"),
        ("[]", None, "not a file of valence-train evaluate"),
        ("no JSON", None, "not a file of valence-train evaluate"),
        (
            '{"model": "a/7", "precision": "int8", "sets": []}',
            None,
            "'a/7', which 0 of the versions are",
        ),
        (
            '{"model": "a/1", "precision": "int8", "sets": []}',
            None,
            "which 2 of the versions are: name the model",
        ),
        (
            '{"model": "a/1", "precision": "int8", "sets": []}',
            "z",
            "no version is called 'z'; there are x, y",
        ),
    ],
)
def test_results_that_fit_nothing_are_refused(
    tmp_path: Path, content: str, label: str | None, reason: str
) -> None:
    file = tmp_path / "r.json"
    file.write_text(content)
    with pytest.raises(FrontierError, match=reason):
        read_results(file, label, {"a/1": ["x", "y"]})


def test_every_text_is_in_one_batch_that_a_server_would_make() -> None:
    lengths = [30, 5, 31, 90, 6, 30, 200, 201, 199] * 9
    batches = server_batches([Encoding([1] * length) for length in lengths])
    assert sorted(int(length) for batch in batches for length in batch.lengths) == sorted(lengths)
    limits = Settings.model_construct()
    assert max(map(len, batches)) > 4
    for batch in batches:
        ids, mask = pad(batch, 0)
        assert len(batch) == 1 or ids.size <= limits.max_batch_tokens
        assert ids.size - int(mask.sum()) <= limits.max_padding_tokens * len(batch)


def test_versions_are_called_as_they_are_named(store: Path) -> None:
    named = open_named([f"{store}/plain/1", f"{store}/teacher/1=the teacher"])
    assert [one.label for one in named] == ["plain 1", "the teacher"]
    sizes = [(one.precision, one.bytes) for one in named[0].forms()]
    files = {"float32": "model.onnx", "int8": "model.int8.onnx"}
    assert sizes == [(p, (store / "plain/1" / file).stat().st_size) for p, file in files.items()]
    with pytest.raises(FrontierError, match="two versions are called same"):
        open_named([f"{store}/plain/1=same", f"{store}/teacher/1=same"])


def test_real_versions_and_real_results_make_a_picture_a_table_and_figures(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "dev.tsv"
    rows.write_text("text\tlabel\na good film\t1\nawful\t0\nloved it\t1\na great waste\t1\n")
    for name, more in (("plain", ["--against", "float32"]), ("teacher", [])):
        command = ["evaluate", f"{store}/{name}/1", "--data", str(rows), "--threads", "1"]
        assert (
            valence_train([*command, "--precision", "int8", "--json", f"{tmp_path}/{name}.json", *more]) == 0
        )
    measured = json.loads((tmp_path / "plain.json").read_text())["sets"][0]
    capsys.readouterr()
    out = tmp_path / "frontier"
    versions = [f"{store}/plain/1=plain", f"{store}/teacher/1=teacher"]
    # The first says itself whose results they are.
    results = [f"{tmp_path}/plain.json", f"{tmp_path}/teacher.json=teacher"]
    assert main([*versions, "--results", *results, *QUICK, "--out", str(out)]) == EXIT_MET
    picture = (out / "frontier.png").read_bytes()
    assert picture.startswith(PNG)
    assert len(picture) < 80_000
    record = json.loads((out / "frontier.json").read_text())
    assert record["sets"] == [measured["set"]]
    assert str(tmp_path) not in json.dumps(record)
    assert "plain/1=plain teacher/1=teacher --results plain.json teacher.json=teacher" in record["command"]
    forms = {(one["label"], one["precision"]): one for one in record["forms"]}
    assert len(forms) == 4
    for one in forms.values():
        assert {kind: speed["best_texts_per_s"] > 0 for kind, speed in one["speeds"].items()} == {
            SENTENCES: True,
            LONG: True,
        }
        assert one["speeds"][LONG]["tokens"] > one["speeds"][SENTENCES]["tokens"]
    assert forms["plain", "int8"]["mean_accuracy"] == measured["accuracy"]
    assert forms["plain", "float32"]["mean_accuracy"] is not None
    assert forms["teacher", "float32"]["mean_accuracy"] is None  # nobody has measured it
    assert forms["teacher", "float32"]["on_the_front_of"] == []
    assert (out / "frontier.md").read_text() == capsys.readouterr().out


def test_without_results_and_rounds_there_are_sizes_alone(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "frontier"
    assert main([f"{store}/plain/1", "--rounds", "0", "--out", str(out)]) == EXIT_MET
    forms = json.loads((out / "frontier.json").read_text())["forms"]
    assert [(one["mean_accuracy"], one["speeds"]) for one in forms] == [(None, {})] * 2
    assert "| plain 1 | float32 | – | – | – | – | – | – | – | 0.1 | – |" in (out / "frontier.md").read_text()


def test_an_unknown_version_or_result_is_refused_and_nothing_is_written(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "frontier"
    stray = write_results(tmp_path / "stray.json", {"a": 0.5}, model="a/7")
    for given, reason in (
        ([f"{store}/plain/3"], "version 3 is not there; there are 1"),
        ([f"{store}/plain/1", "--results", str(stray)], "'a/7', which 0 of the versions are"),
        ([f"{store}/plain/1", "--results", f"{tmp_path}/gone.json"], "gone.json: No such file"),
        ([f"{store}/plain/1", "--note", f"{tmp_path}/gone.md"], "gone.md: No such file"),
    ):
        assert main([*given, *QUICK, "--out", str(out)]) == EXIT_CANNOT_RUN
        assert reason in capsys.readouterr().err
    assert not out.exists()


def test_results_in_a_precision_that_has_no_file_are_left_out_aloud(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_results(tmp_path / "r.json", {"a": 0.5}, model="plain/1", precision="bfloat16")
    options = Namespace(
        versions=[f"{store}/plain/1"],
        results=[str(file)],
        sets=[],
        note=None,
        sentences=5,
        reviews=2,
        rounds=0,
        out=tmp_path,
    )
    made = frontier(options)
    assert [one.scores for one in made.forms] == [{}, {}]
    assert "plain 1 in bfloat16 is no ONNX file in float32 or int8" in capsys.readouterr().out


def test_a_picture_of_many_forms_stays_small(tmp_path: Path) -> None:
    forms = [
        form(
            f"a model of some name {n}",
            0.9 + n / 100 - (p == "int8") / 1000,
            speed=300 / (n + 1) * (1 + (p == "int8")),
            bytes_=(n + 1) * 40_000_000 // (1 + (p == "int8")),
            precision=p,
        )
        for n in range(5)
        for p in ("float32", "int8")
    ]
    draw(Frontier(forms, ["a"], ABOUT), tmp_path / "many.png")
    assert (tmp_path / "many.png").stat().st_size < 80_000
