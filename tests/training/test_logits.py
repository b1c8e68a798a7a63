"""A teacher is asked about every text, once; it is stopped and goes on; other texts are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from service.core import FloatArray, TokenBatch
from tests.models import make_version
from tests.training.conftest import FinishedRun
from tests.training.tiny import DEV_ROWS, TRAIN_ROWS, write_rows
from training import classifiers
from training.classifiers import TorchClassifier
from training.cli import main
from training.config import ConfigError
from training.data import DataError
from training.logits import ask
from training.teacher import TeacherLogits, read_teacher, text_hashes, write_teacher

PIECES = ("very good", "so bad", "a time", "good " * 90)


@pytest.fixture
def mix(tmp_path: Path) -> Path:
    folder = tmp_path / "mix"
    write_rows(folder / "train.tsv", TRAIN_ROWS)
    write_rows(folder / "dev.tsv", DEV_ROWS)
    lines = ["text\tsource", *(f"{text.strip()}\tpieces/all" for text in PIECES)]
    (folder / "unlabelled.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


PLAIN = TorchClassifier.run


class ProcessEndError(Exception):
    """Stands for the end of the process."""


class StopAfter:
    """Reads as a run is read, notes what, and ends the process at a call."""

    def __init__(self, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[list[int]] = []
        self.calls = calls

        def run(one: TorchClassifier, batch: TokenBatch) -> FloatArray:
            if self.calls == 0:
                raise ProcessEndError
            self.calls -= 1
            self.batches.append(batch.lengths.tolist())
            return PLAIN(one, batch)

        monkeypatch.setattr(TorchClassifier, "run", run)

    def texts(self) -> int:
        return sum(map(len, self.batches))


def test_each_row_has_the_logits_of_its_text(finished_run: FinishedRun, mix: Path, tmp_path: Path) -> None:
    """In the order of the rows, whatever stood beside it in its batch."""
    out = tmp_path / "said" / "teacher.npz"
    teacher = ask(finished_run.folder, mix, out, threads=2)
    kept = read_teacher(out)
    assert kept.about == teacher.about
    reader = TorchClassifier(finished_run.folder / "model", threads=1)
    for name, texts in (("train.tsv", [text for text, _ in TRAIN_ROWS]), ("unlabelled.tsv", PIECES)):
        assert kept.rows[name].dtype == np.float16
        alone = np.concatenate([reader.logits([text]) for text in texts])
        np.testing.assert_allclose(kept.rows[name], alone, atol=2e-3)
    assert [path.name for path in out.parent.iterdir()] == ["teacher.npz"]


def test_the_file_says_what_was_read_and_by_whom(
    finished_run: FinishedRun, mix: Path, tmp_path: Path
) -> None:
    about = ask(finished_run.folder, mix, tmp_path / "t.npz").about
    assert about["sha256"] == text_hashes(mix)
    assert list(about["sha256"]) == ["train.tsv", "unlabelled.tsv"]
    assert about["labels"] == ["negative", "positive"]
    assert (about["model"], about["base"]) == (finished_run.folder.name, "tiny-bert")
    assert (about["engine"], about["precision"], about["max_tokens"]) == ("pytorch", "float32", 64)


def test_a_version_is_asked_with_its_own_engine(mix: Path, tmp_path: Path) -> None:
    version = make_version(tmp_path)
    (mix / "unlabelled.tsv").unlink()
    teacher = ask(version, mix, tmp_path / "t.npz")
    manifest = json.loads((version / "manifest.json").read_text(encoding="utf-8"))
    assert teacher.about["base_licence"] == manifest["base_model"]["licence"]
    assert teacher.about["engine"] == "onnx"
    assert list(teacher.rows) == ["train.tsv"]
    assert teacher.rows["train.tsv"].shape == (len(TRAIN_ROWS), 2)


def test_what_was_stopped_goes_on_and_reads_nothing_twice(
    finished_run: FinishedRun, mix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ask(finished_run.folder, mix, tmp_path / "whole.npz")
    monkeypatch.setattr(classifiers, "BATCH_TOKENS", 64)
    out = tmp_path / "t.npz"
    first = StopAfter(3, monkeypatch)
    with pytest.raises(ProcessEndError):
        ask(finished_run.folder, mix, out, save_every_s=0)
    assert not out.exists()
    second = StopAfter(-1, monkeypatch)
    resumed = ask(finished_run.folder, mix, out)
    assert 0 < first.texts() < len(TRAIN_ROWS) + len(PIECES)
    assert first.texts() + second.texts() == len(TRAIN_ROWS) + len(PIECES)
    for name, rows in whole.rows.items():
        np.testing.assert_allclose(resumed.rows[name], rows, atol=2e-3)
    assert sorted(path.name for path in tmp_path.glob("t.npz*")) == ["t.npz"]


def test_a_whole_file_is_left_as_it_is_and_never_overwritten(
    finished_run: FinishedRun, mix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "t.npz"
    ask(finished_run.folder, mix, out)
    before = out.read_bytes()
    reader = StopAfter(0, monkeypatch)
    ask(finished_run.folder, mix, out)
    assert reader.batches == []
    write_rows(mix / "train.tsv", TRAIN_ROWS[1:])
    with pytest.raises(ConfigError, match=r"t\.npz: it is there, of another model or other texts: sha256"):
        ask(finished_run.folder, mix, out)
    assert out.read_bytes() == before


def test_texts_of_like_length_share_a_batch_within_the_budget(
    finished_run: FinishedRun, mix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classifiers, "BATCH_TOKENS", 64)
    reader = StopAfter(-1, monkeypatch)
    ask(finished_run.folder, mix, tmp_path / "t.npz")
    assert reader.batches[0] == [64]
    assert max(map(len, reader.batches)) > 5
    assert all(len(batch) == 1 or len(batch) * max(batch) <= 64 for batch in reader.batches)


def test_the_same_answers_are_the_same_bytes(tmp_path: Path) -> None:
    teacher = TeacherLogits(
        {"labels": ["a", "b"], "sha256": {"train.tsv": "0"}}, {"train.tsv": np.ones((3, 2), np.float16)}
    )
    for name in ("one.npz", "two.npz"):
        write_teacher(tmp_path / name, teacher)
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"no zip at all"])
def test_a_file_that_is_no_teacher_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.npz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"t\.npz: not the logits of a teacher"):
        read_teacher(path)


def test_a_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    about = {"labels": ["a", "b"], "sha256": {"train.tsv": "0"}}
    write_teacher(path, TeacherLogits(about, {"train.tsv": np.ones((3, 5), np.float16)}))
    with pytest.raises(ConfigError, match="a shape or a type is wrong"):
        read_teacher(path)
    write_teacher(path, TeacherLogits(about, {}))
    with pytest.raises(ConfigError, match="not the logits of a teacher"):
        read_teacher(path)


def test_a_teacher_that_says_nan_is_told(
    finished_run: FinishedRun, mix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        TorchClassifier, "run", lambda _, batch: np.full((len(batch.lengths), 2), np.nan, dtype=np.float32)
    )
    with pytest.raises(ConfigError, match="NaN"):
        ask(finished_run.folder, mix, tmp_path / "t.npz")


def test_a_folder_without_texts_is_refused(finished_run: FinishedRun, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither train\.tsv nor unlabelled\.tsv"):
        ask(finished_run.folder, tmp_path, tmp_path / "t.npz")


def test_the_command_tells_what_it_wrote(
    finished_run: FinishedRun, mix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["logits", str(finished_run.folder), "--data", str(mix), "--out", str(tmp_path / "t.npz")]
    assert main([*arguments, "--threads", "1"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert f"{len(TRAIN_ROWS)} rows of train.tsv and {len(PIECES)} rows of unlabelled.tsv" in said
    assert json.loads(str(np.load(tmp_path / "t.npz")["about"]))["max_tokens"] == 64
