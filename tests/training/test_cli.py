"""The script: its commands do what they say, refusals are told on standard error with exit code 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import make_version
from tests.training.conftest import FinishedRun
from tests.training.test_checklist import write_checklist
from tests.training.test_suite import write_suite
from tests.training.tiny import DEV_ROWS, ROWS, write_data, write_rows
from training.calibrate import Chances
from training.cli import main
from training.evaluate import Classifier, Sets, ask
from training.own import load_own
from training.suite import SUITE


def fit_arguments(base: Path, data: Path, out: Path) -> list[str]:
    return [
        *("fit", "--base", str(base), "--data", str(data), "--out", str(out), "--threads", "1"),
        *("--lr", "1e-3", "--epochs", "1", "--batch-items", "4", "--max-tokens", "32"),
    ]


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys, training.cli\n"
        "try: training.cli.main(['--help'])\n"
        "except SystemExit: print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(command in done.stdout for command in ("fit", "evaluate", "export"))
    assert done.stdout.splitlines()[-1] == "[]"


def test_fit_makes_a_run_and_the_same_command_finds_it_done(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = fit_arguments(tiny_base, write_data(tmp_path / "data"), tmp_path / "run")
    assert main(arguments) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text(encoding="utf-8"))
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("best epoch 1: ")
    assert f"accuracy {metrics['dev']['accuracy']:.4f}" in said
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_fit_from_scratch_takes_the_size_that_is_given(tiny_base: Path, tmp_path: Path) -> None:
    size = ["--layers", "1", "--width", "16", "--heads", "2", "--positions", "sinusoidal"]
    arguments = fit_arguments(tiny_base, write_data(tmp_path / "data"), tmp_path / "run")
    assert main([*arguments, "--encoder", "own", "--from-scratch", *size]) == 0
    model = load_own(tmp_path / "run" / "model")
    assert (model.network.config.layers, model.network.config.width, model.network.config.heads) == (1, 16, 2)
    assert model.network.config.positions == "sinusoidal"
    assert model.network.config.norm_first


def test_a_run_is_found_again_from_another_folder(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are kept whole, so `data` and `../data` name the same run."""
    write_data(tmp_path / "data")
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(fit_arguments(tiny_base, Path("data"), Path("run"))) == 0
    monkeypatch.chdir(tmp_path / "inner")
    assert main(fit_arguments(tiny_base, Path("../data"), Path("../run"))) == 0


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (["--lr", "0.5"], "learning_rate: 0.5 is outside"),
        (["--labels", "one"], "labels: at least two"),
        (["--labels", "bad,,good"], "labels: a name is blank"),
        (["--dev", "nowhere.tsv"], "nowhere.tsv: there is no such file"),
        (["--base", "./nowhere"], "./nowhere: there is no such folder"),
        (["--encoder", "own", "--layers", "2"], "--layers: the base says so"),
        (["--from-scratch"], "--from-scratch needs --encoder own"),
        (["--encoder", "own", "--from-scratch", "--heads", "3"], "width: 128 is no even share for 3 heads"),
    ],
)
def test_fit_refuses_nonsense_in_one_line(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], reason: str
) -> None:
    arguments = fit_arguments(tiny_base, write_data(tmp_path / "data"), tmp_path / "run")
    assert main([*arguments, *extra]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("valence-train: error: ")
    assert reason in said[-1]


def test_a_bad_row_is_told_with_file_and_line(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_data(tmp_path / "data", train=[*ROWS, ("good", 4)])
    assert main(fit_arguments(tiny_base, data, tmp_path / "run")) == 2
    assert f"{data / 'train.tsv'}:{len(ROWS) + 2}: label 4" in capsys.readouterr().err


def test_evaluate_prints_a_table_and_writes_json(
    finished_run: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_rows(tmp_path / "other" / "all.tsv", [*ROWS[:2], ("A  Great Movie", 1)])
    file = tmp_path / "scores.json"
    data = ["--data", str(finished_run.data), str(other)]
    assert main(["evaluate", str(finished_run.folder), *data, "--json", str(file), "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["kind"] == "run"
    assert report["labels"] == ["negative", "positive"]
    assert [result["set"] for result in report["sets"]] == ["data/dev", "other/all"]
    for result in report["sets"]:
        assert result["set"] in printed
        assert f"{result['accuracy']:.4f}" in printed
    assert report["sets"][0]["rows"] == len(DEV_ROWS)
    assert report["sets"][0]["in_training_rows"] == {"exact": 0, "normalised": 0}
    assert report["sets"][1]["in_training_rows"]["exact"] == 2


def test_evaluate_reads_a_version_and_counts_overlaps_with_the_run_that_is_named(
    finished_run: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = make_version(tmp_path)
    data = write_rows(tmp_path / "films" / "all.tsv", ROWS)
    arguments = ["evaluate", str(version), "--data", str(data), "--threads", "1"]
    assert main(arguments) == 0
    assert "not known" in capsys.readouterr().out
    assert (
        main([*arguments, "--trained-on", str(finished_run.folder), "--json", str(tmp_path / "x.json")]) == 0
    )
    report = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert report["engine"] == "onnx"
    assert report["sets"][0]["in_training_rows"]["exact"] == len(ROWS)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all data sets, a few rows each."""
    folder = write_suite(tmp_path_factory.mktemp("suite"))
    write_checklist(
        folder / "checklist",
        [f"{text}\t{2 * label}\teq_{2 * label}\twords\tVocabulary\n" for text, label in ROWS],
        [("INV", "typos", ["a good film", "a godo film"]), ("INV", "typos", ["bad", "bda"])],
    )
    return folder


def test_evaluate_measures_the_whole_suite_in_one_command(
    suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = make_version(tmp_path, precisions=("float32", "int8"), temperature=2.0)
    file, diagrams = tmp_path / "new" / "scores.json", tmp_path / "diagrams"
    more = ["--json", str(file), "--diagrams", str(diagrams), "--threads", "2", "--checklist-rows", "5"]
    words = ["evaluate", str(version), "--suite", str(suite), "--precision", "int8", "--against", "float32"]
    assert main([*words, "--quick", *more]) == 0
    said = capsys.readouterr()
    report = json.loads(file.read_text(encoding="utf-8"))
    assert (report["model"], report["precision"], report["temperature"]) == ("sentiment/1", "int8", 2.0)
    names = [one["set"] for one in report["sets"]]
    assert len(names) == len(SUITE)
    assert "imdb/test_subset1000" in names
    assert [one["set"] for one in report["against"]["sets"]] == [*names, "all sets"]
    assert report["against"]["precision"] == "float32"
    assert {one["test"]: one["cases"] for one in report["checklist"]["tests"]} == {"words": 5, "typos": 2}
    assert {path.name for path in diagrams.iterdir()} == {
        "reliability.sst2.test.png",
        "reliability.imdb.test_subset1000.png",
    }
    for shown in ("sst2/dev", "all sets", "typos", "both of a pair right"):
        assert shown in said.out
    assert "checklist: 100%" in said.err
    assert main(["card-table", str(file), str(file)]) == 0
    assert "| typos (Vocabulary, INV) | 2 |" in capsys.readouterr().out


def test_evaluate_keeps_what_it_knows_when_it_is_stopped(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(classifier: Classifier, sets: Sets) -> dict[str, Chances]:
        if "imdb/test" in sets:
            raise KeyboardInterrupt
        return ask(classifier, sets)

    # What Ctrl-C does in the third set.
    monkeypatch.setattr("training.measure.ask", stopped)
    file = tmp_path / "scores.json"
    words = ["evaluate", str(make_version(tmp_path)), "--suite", str(suite), "--threads", "1"]
    assert main([*words, "--json", str(file)]) == 130
    known = [one["set"] for one in json.loads(file.read_text(encoding="utf-8"))["sets"]]
    assert known == ["sst2/dev", "sst2/test"]
    assert capsys.readouterr().err.splitlines()[-1].endswith("stopped; --json has what was measured")


def test_evaluate_refuses_a_suite_and_a_precision_that_do_not_fit(
    suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three = make_version(tmp_path / "three", labels=("bad", "plain", "good"))
    assert main(["evaluate", str(three), "--suite", str(suite), "--threads", "1"]) == 2
    assert "--suite is for two labels" in capsys.readouterr().err
    version = make_version(tmp_path / "two")
    words = ["evaluate", str(version), "--suite", str(suite), "--threads", "1"]
    assert main([*words, "--against", "float32"]) == 2
    assert "--against float32: the model is measured in that already" in capsys.readouterr().err
    assert main([*words, "--against", "int8"]) == 2
    assert "int8" in capsys.readouterr().err


def test_evaluate_refuses_what_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows(tmp_path / "dev.tsv", ROWS)
    assert main(["evaluate", str(tmp_path / "nowhere"), "--data", str(data)]) == 2
    assert "neither a finished run, nor a version" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["fit"], ["evaluate", "run"], ["card"], ["card-table"], ["bake"]])
def test_a_command_that_is_not_whole_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: valence-train" in capsys.readouterr().err
