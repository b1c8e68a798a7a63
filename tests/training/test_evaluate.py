"""Scores against scikit-learn's, sets from files, a run read by PyTorch, a version read by the service."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score

from tests.models import bert_tokenizer, make_version, make_weights
from tests.training.conftest import FinishedRun
from tests.training.tiny import DEV_ROWS, ROWS, TRAIN_ROWS, write_rows
from training.classifiers import open_classifier
from training.config import ConfigError
from training.data import DataError, Example
from training.evaluate import evaluate, read_sets, score, table


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("labels", [2, 3, 5])
def test_scores_are_those_of_scikit_learn(labels: int, seed: int) -> None:
    random = np.random.default_rng((labels, seed))
    truth = random.integers(0, labels, 200).tolist()
    guess = [label if random.random() < 0.7 else int(random.integers(labels)) for label in truth]
    scores = score(truth, guess, count=labels)
    assert scores.rows == 200
    assert scores.accuracy == pytest.approx(accuracy_score(truth, guess))
    assert scores.weighted_f1 == pytest.approx(f1_score(truth, guess, average="weighted"))
    assert scores.confusion == confusion_matrix(truth, guess, labels=range(labels)).tolist()


def test_a_label_that_never_occurs_weighs_nothing() -> None:
    scores = score([0, 0, 1], [0, 0, 1], count=3)
    assert (scores.accuracy, scores.weighted_f1) == (1.0, 1.0)
    assert scores.confusion == [[2, 0, 0], [0, 1, 0], [0, 0, 0]]


def test_one_label_for_all_is_not_rewarded_by_f1() -> None:
    """3 of 4 right by always saying 1: F1 of label 1 is 6/7, of label 0 it is 0."""
    scores = score([1, 1, 1, 0], [1, 1, 1, 1], count=2)
    assert scores.accuracy == 0.75
    assert scores.weighted_f1 == pytest.approx(0.75 * 6 / 7)


@pytest.mark.parametrize(
    ("truth", "guess"), [([], []), ([0], [0, 1]), ([2], [0]), ([0], [2]), ([-1], [0]), ([0], [-1])]
)
def test_what_cannot_be_scored_is_refused(truth: list[int], guess: list[int]) -> None:
    with pytest.raises(ValueError, match=r"rows|predictions|outside"):
        score(truth, guess, count=2)


def test_a_folder_gives_its_sets_without_what_trains(tmp_path: Path) -> None:
    for name in ("train.tsv", "dev.tsv", "test.tsv.gz"):
        write_rows(tmp_path / "films" / name, [(name, 1)])
    assert read_sets([tmp_path / "films"], labels=2) == {
        "films/dev": [Example("dev.tsv", 1)],
        "films/test": [Example("test.tsv.gz", 1)],
    }


def test_a_file_that_is_named_is_measured_whatever_it_is(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "films" / "train.tsv", ROWS)
    assert len(read_sets([path], labels=2)["films/train"]) == len(ROWS)
    with pytest.raises(DataError, match="only training files"):
        read_sets([path.parent], labels=2)


def test_a_label_that_the_model_lacks_is_refused_with_file_and_line(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "dev.tsv", [("fine", 1), ("so so", 2)])
    with pytest.raises(DataError, match=f"^{path}:3: label 2 is outside 0 to 1"):
        read_sets([path], labels=2)


def test_two_files_of_one_name_stay_two_sets(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "a" / "films" / "dev.tsv", ROWS[:3])
    two = write_rows(tmp_path / "b" / "films" / "dev.tsv", ROWS[3:5])
    sets = read_sets([one, two], labels=2)
    assert sorted(len(rows) for rows in sets.values()) == [2, 3]


def test_a_run_answers_what_it_was_measured_with(finished_run: FinishedRun) -> None:
    classifier = open_classifier(finished_run.folder, threads=1)
    sets = read_sets([finished_run.data], labels=2)
    (result,) = evaluate(classifier, sets, trained=frozenset(text for text, _ in TRAIN_ROWS))
    assert result["set"] == "data/dev"
    assert result["accuracy"] == finished_run.metrics["dev"]["accuracy"]
    assert result["weighted_f1"] == finished_run.metrics["dev"]["weighted_f1"]
    assert result["in_training_rows"] == {"exact": 0, "normalised": 0}
    assert classifier.about() == {
        "kind": "run",
        "engine": "pytorch",
        "precision": "float32",
        "max_tokens": 64,
    }


def test_answers_keep_the_order_of_the_texts_and_a_long_text_is_cut(finished_run: FinishedRun) -> None:
    classifier = open_classifier(finished_run.folder, threads=1)
    texts = [text for text, _ in TRAIN_ROWS] + ["a great movie " * 200]
    together = classifier.classify(texts)
    assert together == [classifier.classify([text])[0] for text in texts]
    assert len(set(together)) == 2


def test_the_folder_of_any_fine_tuned_model_is_read(finished_run: FinishedRun) -> None:
    texts = [text for text, _ in DEV_ROWS]
    inside = open_classifier(finished_run.folder / "model", threads=1)
    assert inside.classify(texts) == open_classifier(finished_run.folder, threads=1).classify(texts)


def test_a_version_is_read_by_the_service(tmp_path: Path) -> None:
    folder = make_version(tmp_path, labels=("bad", "good"))
    classifier = open_classifier(folder, threads=1)
    texts = [text for text, _ in TRAIN_ROWS]
    tokenizer = bert_tokenizer()
    weights = make_weights(tokenizer, 2)
    expected = [int(np.argmax(weights.logits(tokenizer.encode(text).ids))) for text in texts]
    assert classifier.labels == ("bad", "good")
    assert classifier.classify(texts) == expected
    assert classifier.about() == {
        "kind": "version",
        "engine": "onnx",
        "precision": "float32",
        "max_tokens": 64,
    }


def test_the_precision_of_a_version_may_be_chosen(tmp_path: Path) -> None:
    folder = make_version(tmp_path, precisions=("float32", "int8"))
    for precision in ("float32", "int8"):
        classifier = open_classifier(folder, threads=1, precision=precision)
        assert classifier.about()["precision"] == precision
    with pytest.raises(ConfigError, match="float16"):
        open_classifier(folder, threads=1, precision="float16")


def test_a_damaged_version_is_refused(tmp_path: Path) -> None:
    folder = make_version(tmp_path)
    (folder / "model.onnx").write_bytes((folder / "model.onnx").read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"the version cannot be opened: .*model\.onnx"):
        open_classifier(folder, threads=1)


def test_a_text_that_the_service_refuses_is_named_without_its_content(tmp_path: Path) -> None:
    classifier = open_classifier(make_version(tmp_path), threads=1)
    with pytest.raises(ConfigError, match="the service refuses a text"):
        classifier.classify(["good", "\u200b\u200b"])


@pytest.mark.parametrize("what", ["nothing", "data", "encoder", "unfinished run"])
def test_what_is_no_classifier_is_refused(
    tmp_path: Path, tiny_base: Path, finished_run: FinishedRun, what: str
) -> None:
    (tmp_path / "config.json").write_bytes((finished_run.folder / "config.json").read_bytes())
    path = {
        "nothing": tmp_path / "nowhere",
        "data": finished_run.data,
        "encoder": tiny_base,
        "unfinished run": tmp_path,
    }[what]
    with pytest.raises(ConfigError, match=str(path)):
        open_classifier(path, threads=1)


def test_the_table_names_each_set_and_each_label(finished_run: FinishedRun) -> None:
    classifier = open_classifier(finished_run.folder, threads=1)
    sets = {
        "films/dev": [Example("a great movie", 1)],
        "books/test": [Example("very bad", 0), Example("a good time", 1)],
    }
    results = evaluate(classifier, sets)
    text = table(results, ("negative", "positive"))
    lines = text.splitlines()
    films = next(line for line in lines if line.startswith("films/dev "))
    assert films.split() == [
        "films/dev",
        "1",
        f"{results[0]['accuracy']:.4f}",
        f"{results[0]['weighted_f1']:.4f}",
        "not",
        "known",
    ]
    assert sum(line.strip().startswith("negative") and "positive" not in line for line in lines) == 2
    assert sum(line.split() == ["negative", "positive"] for line in lines) == 2
