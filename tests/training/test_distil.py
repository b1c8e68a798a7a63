"""A student learns what its teacher says; the loss is the formula; a teacher of other texts is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.training.test_train import ProcessEndError, StopAt, assert_same_weights, share_right
from tests.training.tiny import DEV_ROWS, TRAIN_ROWS, tiny_config, write_data, write_rows
from training.cli import main
from training.config import ConfigError, FitConfig
from training.data import NO_LABEL, DataError, texts_of
from training.distil import distil_loss
from training.runs import trained_texts
from training.teacher import TeacherLogits, text_hashes, write_teacher
from training.train import fit

SURE = 4.0


def teach(folder: Path, path: Path, *, knows: dict[str, int] | None = None, **about: Any) -> Path:
    """A file of logits: each text gets the label that `knows` says, that of its row else."""
    labels = dict(TRAIN_ROWS + DEV_ROWS) | (knows or {})
    hashes = text_hashes(folder)
    rows = {
        name: np.array(
            [[-SURE, SURE] if labels[text] else [SURE, -SURE] for text in texts_of(folder / name)], np.float16
        )
        for name in hashes
    }
    kept = {"labels": ["negative", "positive"], "model": "t", "base": "big", "sha256": hashes, **about}
    write_teacher(path, TeacherLogits(kept, rows))
    return path


def write_texts(path: Path, texts: list[str]) -> None:
    lines = ["text\tsource", *(f"{text}\tpieces/all" for text in texts)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def taught(base: Path, data: Path, teacher: Path, **changes: Any) -> FitConfig:
    return tiny_config(
        base, data, **{"teacher": str(teacher), "soft_weight": 0.8, "soft_temperature": 2.0, **changes}
    )


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(logits)
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


@pytest.mark.parametrize(("weight", "temperature"), [(0.8, 2.0), (0.3, 1.0), (1.0, 5.0)])
def test_the_loss_is_the_formula_computed_by_hand(weight: float, temperature: float) -> None:
    student = np.array([[0.5, -1.0, 0.0], [2.0, 0.1, 0.3], [-0.2, 0.4, 1.5]])
    teacher = np.array([[3.0, -2.0, 0.2], [-1.0, 1.0, 0.5], [0.0, 0.0, 4.0]])
    labels = [0, 2, NO_LABEL]
    expected = []
    for said, learnt, label in zip(teacher, student, labels, strict=True):
        p, q = softmax(said / temperature), softmax(learnt / temperature)
        soft = temperature**2 * (p * np.log(p / q)).sum()
        hard = 0.0 if label == NO_LABEL else -np.log(softmax(learnt)[label])
        expected.append(soft if label == NO_LABEL else weight * soft + (1 - weight) * hard)
    loss = distil_loss(
        torch.tensor(student),
        torch.tensor(teacher),
        torch.tensor(labels),
        weight=weight,
        temperature=temperature,
    )
    assert loss.item() == pytest.approx(np.mean(expected), rel=1e-9)


def test_a_student_of_the_teacher_alone_learns_its_labels_where_the_rows_are_wrong(
    tiny_base: Path, tmp_path: Path
) -> None:
    data = write_data(tmp_path / "data", train=[(text, 1 - label) for text, label in TRAIN_ROWS])
    write_rows(data / "dev.tsv", [(text, label) for text, label in DEV_ROWS])
    teacher = teach(data, tmp_path / "t.npz")
    config = taught(tiny_base, data, teacher, soft_weight=1.0, epochs=12, batch_items=8)
    fit(config, tmp_path / "run", threads=1)
    assert share_right(tmp_path / "run", TRAIN_ROWS) > 0.9
    fit(tiny_config(tiny_base, data, epochs=12, batch_items=8), tmp_path / "plain", threads=1)
    assert share_right(tmp_path / "plain", TRAIN_ROWS) < 0.6


def test_texts_without_a_label_teach_too_and_are_counted(tiny_base: Path, tmp_path: Path) -> None:
    """Two rows with labels say nothing of the other words; the teacher does, of texts without a label."""
    few = [TRAIN_ROWS[0], TRAIN_ROWS[-1]]
    data = write_data(tmp_path / "data", train=few)
    texts = [text for text, _ in TRAIN_ROWS[1:-1]]
    write_texts(data / "unlabelled.tsv", [*texts, texts[0].upper(), few[0][0], DEV_ROWS[0][0]])
    teacher = teach(data, tmp_path / "t.npz", knows={texts[0].upper(): 1})
    config = taught(tiny_base, data, teacher, epochs=12, batch_items=8)
    metrics = fit(config, tmp_path / "run", threads=1)
    assert metrics["dev"]["accuracy"] > 0.8
    assert metrics["distillation"]["unlabelled"] == {"rows_read": len(texts) + 3, "rows_kept": len(texts)}
    assert metrics["distillation"]["teacher"]["base"] == "big"
    assert metrics["training_rows"]["rows_kept"] == 2
    assert metrics["epochs"][0]["step"] == -(-(len(texts) + 2) // 8)
    assert trained_texts(tmp_path / "run") == {text for text, _ in TRAIN_ROWS}


def test_without_a_teacher_unlabelled_texts_are_not_read(tiny_base: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    write_texts(data / "unlabelled.tsv", ["very good"])
    metrics = fit(tiny_config(tiny_base, data, epochs=1), tmp_path / "run", threads=1)
    assert metrics["distillation"] is None
    assert [file["name"] for file in metrics["files"]] == ["data/dev.tsv", "data/train.tsv"]


def test_an_interrupted_run_with_a_teacher_ends_like_one_that_was_not(
    tiny_base: Path, tmp_path: Path
) -> None:
    data = write_data(tmp_path / "data")
    write_texts(data / "unlabelled.tsv", [text for text, _ in TRAIN_ROWS[20:26]])
    config = taught(tiny_base, data, teach(data, tmp_path / "t.npz"), epochs=2, save_steps=2)
    fit(config, tmp_path / "whole", threads=1)
    with pytest.raises(ProcessEndError):
        fit(config, tmp_path / "run", threads=1, callbacks=[StopAt(3)])
    assert fit(config, tmp_path / "run", threads=1)["resumed_from"] == "checkpoint-2"
    assert_same_weights(tmp_path / "whole", tmp_path / "run")


def test_another_teacher_is_another_run(tiny_base: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    config = taught(tiny_base, data, teach(data, tmp_path / "t.npz"), epochs=1)
    fit(config, tmp_path / "run", threads=1)
    with pytest.raises(ConfigError, match=r"soft_weight: was 0\.8, now 0\.5$"):
        fit(replace(config, soft_weight=0.5), tmp_path / "run", threads=1)
    teach(data, tmp_path / "t.npz", model="another")
    with pytest.raises(ConfigError, match=r"t\.npz: was \w{12}, now \w{12}$"):
        fit(config, tmp_path / "run", threads=1)


def test_a_teacher_of_other_texts_labels_or_fewer_rows_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    teacher = teach(data, tmp_path / "t.npz")
    config = taught(tiny_base, data, teacher)

    def refused(error: type[Exception], reason: str) -> None:
        with pytest.raises(error, match=reason):
            fit(config, tmp_path / "run", threads=1)
        assert not (tmp_path / "run").exists()

    write_texts(data / "unlabelled.tsv", ["very good"])
    refused(DataError, r"unlabelled\.tsv: not the file that the teacher t has read")
    teach(data, teacher, knows={"very good": 1})
    (data / "unlabelled.tsv").unlink()
    refused(DataError, r"unlabelled\.tsv: not the file that the teacher t has read")
    teach(data, teacher, labels=["bad", "good"])
    refused(ConfigError, "its labels are bad, good, not negative, positive")
    hashes = text_hashes(data)
    about = {"labels": ["negative", "positive"], "model": "t", "sha256": hashes}
    said = np.ones((11, 2), np.float16)
    write_teacher(teacher, TeacherLogits(about, {"train.tsv": said}))
    refused(DataError, r"train\.tsv: 12 rows, and the teacher says 11")
    said = np.ones((12, 2), np.float16)
    said[4] = np.nan
    write_teacher(teacher, TeacherLogits(about, {"train.tsv": said}))
    refused(DataError, r"train\.tsv: of row 5 the teacher says nothing")
    teacher.unlink()
    refused(DataError, r"t\.npz: cannot be read: No such file")


def test_a_training_file_that_the_teacher_has_not_read_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    teacher = teach(data, tmp_path / "t.npz")
    write_rows(data / "train_more.tsv", [("a text of its own", 1)])
    with pytest.raises(DataError, match=r"train_more\.tsv: not a file that the teacher t has read"):
        fit(taught(tiny_base, data, teacher), tmp_path / "run", threads=1)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (["--soft-weight", "0.5"], "soft_weight: there is no teacher"),
        (["--soft-temperature", "2"], "soft_temperature: there is no teacher"),
        (["--teacher", "{t}", "--soft-weight", "0"], "soft_weight: 0.0 is outside 0 to 1"),
        (["--teacher", "{t}", "--soft-weight", "1.5"], "soft_weight: 1.5 is outside 0 to 1"),
        (["--teacher", "{t}", "--soft-temperature", "0"], "soft_temperature: 0.0 is outside 0.1 to 100"),
        (["--teacher", "{t}", "--data", "{d}", "{d}"], "teacher: it has read one folder"),
        (["--teacher", "{d}/train.tsv"], "train.tsv: not the logits of a teacher"),
    ],
)
def test_nonsense_is_refused(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], reason: str
) -> None:
    data = write_data(tmp_path / "data")
    teacher = teach(data, tmp_path / "t.npz")
    arguments = ["fit", "--base", str(tiny_base), "--data", str(data), "--out", str(tmp_path / "run")]
    assert main([*arguments, *(one.format(t=teacher, d=data) for one in extra)]) == 2
    assert reason in capsys.readouterr().err


def test_the_command_takes_weight_and_temperature_as_chosen_or_as_usual(
    tiny_base: Path, tmp_path: Path
) -> None:
    data = write_data(tmp_path / "data")
    teacher = teach(data, tmp_path / "t.npz")
    common = ["fit", "--base", str(tiny_base), "--data", str(data), "--epochs", "1", "--threads", "1"]
    common += ["--max-tokens", "32"]
    for name, extra in (("usual", []), ("chosen", ["--soft-weight", "1", "--soft-temperature", "3"])):
        assert main([*common, "--out", str(tmp_path / name), "--teacher", str(teacher), *extra]) == 0
    usual, chosen = (
        json.loads((tmp_path / name / "config.json").read_text(encoding="utf-8"))
        for name in ("usual", "chosen")
    )
    assert (usual["soft_weight"], usual["soft_temperature"]) == (0.8, 2.0)
    assert (chosen["soft_weight"], chosen["soft_temperature"]) == (1.0, 3.0)
