"""Scores against scikit-learn's, sets from files, a run read by PyTorch, a version read by the service."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score

from service.classifier import activate
from tests.models import bert_tokenizer, make_version, make_weights
from tests.training.conftest import FinishedRun
from tests.training.tiny import DEV_ROWS, ROWS, TRAIN_ROWS, write_rows
from training.classifiers import BATCH_TOKENS, batches, open_classifier
from training.config import ConfigError
from training.data import DataError, Example
from training.evaluate import (
    LabelledSet,
    ask,
    compare,
    comparison_table,
    evaluate,
    read_sets,
    score,
    table,
)
from training.leaks import TrainedTexts


def labelled(*rows: tuple[str, int], pairs: Sequence[str] | None = None) -> LabelledSet:
    return LabelledSet([Example(text, label) for text, label in rows], pairs=pairs)


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
    sets = {name: LabelledSet(rows) for name, rows in read_sets([finished_run.data], labels=2).items()}
    trained = TrainedTexts.of(text for text, _ in TRAIN_ROWS)
    (result,) = evaluate(sets, ask(classifier, sets), trained=trained)
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
    together = classifier.scores(texts)
    alone = np.concatenate([classifier.scores([text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert set(together.argmax(axis=1)) == {0, 1}


def test_the_folder_of_any_fine_tuned_model_is_read(finished_run: FinishedRun) -> None:
    texts = [text for text, _ in DEV_ROWS]
    inside = open_classifier(finished_run.folder / "model", threads=1)
    outside = open_classifier(finished_run.folder, threads=1)
    np.testing.assert_array_equal(inside.scores(texts), outside.scores(texts))


def test_a_version_is_read_by_the_service(tmp_path: Path) -> None:
    """The temperature of the manifest is in the probabilities, as it is in those that are served."""
    folder = make_version(tmp_path, labels=("bad", "good"), temperature=2.5)
    classifier = open_classifier(folder, threads=1)
    texts = [text for text, _ in TRAIN_ROWS]
    tokenizer = bert_tokenizer()
    weights = make_weights(tokenizer, 2)
    logits = np.array([weights.logits(tokenizer.encode(text).ids) for text in texts], dtype=np.float32)
    assert classifier.labels == ("bad", "good")
    assert classifier.temperature == 2.5
    np.testing.assert_allclose(classifier.logits(texts), logits, atol=1e-4)
    expected = activate(logits, "softmax", temperature=2.5)
    np.testing.assert_allclose(classifier.scores(texts), expected, atol=1e-5)
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
        classifier.scores(["good", "\u200b\u200b"])


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


def test_lanes_change_no_answer_and_show_how_far_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_version(tmp_path)
    texts = [f"{text} " * (1 + place % 9) for place, (text, _) in enumerate(TRAIN_ROWS)]
    one = open_classifier(folder, threads=1).scores(texts)
    assert capsys.readouterr().err == ""
    three = open_classifier(folder, threads=3).scores(texts, progress="films/dev")
    np.testing.assert_allclose(one, three, atol=1e-6)
    assert "films/dev: 100%" in capsys.readouterr().err


def test_batches_hold_each_text_once_within_the_budget_the_longest_first() -> None:
    lengths = [3, 2000, 512, 5, 500, 17, 1024, 3, 1]
    found = list(batches(lengths))
    assert sorted(place for batch in found for place in batch) == list(range(len(lengths)))
    rectangles = [len(batch) * max(lengths[place] for place in batch) for batch in found]
    assert [lengths[batch[0]] for batch in found] == [2000, 1024, 512, 17]
    assert all(size <= BATCH_TOKENS for size in rectangles[1:])
    assert list(batches([])) == []


def test_a_single_label_is_set_against_its_absence(tmp_path: Path) -> None:
    classifier = open_classifier(make_version(tmp_path, labels=("good",), activation="sigmoid"), threads=1)
    sets = {"films/dev": labelled(("good great", 1), ("bad awful", 0), ("terrible", 1))}
    (result,) = evaluate(sets, ask(classifier, sets))
    assert result["confusion"] == [[1, 0], [1, 1]]
    assert "not good" in table([result], classifier.labels)


def test_probabilities_are_judged_with_the_temperature_and_without_it() -> None:
    """At 0.6 every answer is as sure as they are right; without the temperature they were far surer."""
    chances = np.array([[0.4, 0.6]] * 5)
    sets = {"films/test": labelled(("a", 1), ("b", 1), ("c", 1), ("d", 0), ("e", 0))}
    (result,) = evaluate(sets, {"films/test": chances}, temperature=4.0)
    odds = (0.6 / 0.4) ** 4
    assert result["ece"] == pytest.approx(0.0, abs=1e-9)
    assert result["ece_without_temperature"] == pytest.approx(odds / (1 + odds) - 0.6)
    assert result["nll"] == pytest.approx(-(3 * np.log(0.6) + 2 * np.log(0.4)) / 5)


def test_a_pair_is_right_when_both_of_it_are() -> None:
    chances = np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.6, 0.4]])
    sets = {"films/test": labelled(("a", 0), ("b", 1), ("c", 0), ("d", 1), pairs=["1", "1", "2", "2"])}
    (result,) = evaluate(sets, {"films/test": chances})
    assert result["accuracy"] == 0.75
    assert result["pairs"] == {"pairs": 2, "both_right": 0.5}
    assert "both of a pair right: 0.5000 of 2" in table([result], ("negative", "positive"))


def test_what_one_precision_loses_is_counted_by_set_and_over_all_rows() -> None:
    sets = {"a/test": labelled(("a", 1), ("b", 1)), "b/test": labelled(*[("c", 0)] * 6)}
    exact = {"a/test": np.array([[0.1, 0.9], [0.4, 0.6]]), "b/test": np.array([[0.9, 0.1]] * 6)}
    rounded = {"a/test": np.array([[0.1, 0.9], [0.6, 0.4]]), "b/test": np.array([[0.8, 0.2]] * 6)}
    first, second, pooled = compare(sets, rounded, exact)
    assert (first["accuracy"], first["accuracy_of_other"], first["lost"], first["flips"]) == (
        0.5,
        1,
        0.5,
        0.5,
    )
    assert (second["lost"], second["flips"]) == (0.0, 0.0)
    assert second["mean_change_of_a_probability"] == pytest.approx(0.1)
    assert (pooled["set"], pooled["rows"], pooled["lost"]) == ("all sets", 8, 1 / 8)
    assert "+0.1250" in comparison_table([pooled], "int8", "float32")


def test_the_table_names_each_set_and_each_label(finished_run: FinishedRun) -> None:
    classifier = open_classifier(finished_run.folder, threads=1)
    sets = {
        "films/dev": labelled(("a great movie", 1)),
        "books/test": LabelledSet([Example("very bad", 0), Example("a good time", 1)], left_out=3),
    }
    results = evaluate(sets, ask(classifier, sets))
    text = table(results, ("negative", "positive"))
    lines = text.splitlines()
    films = next(line for line in lines if line.startswith("films/dev "))
    assert films.split() == [
        "films/dev",
        "1",
        *(f"{results[0][figure]:.4f}" for figure in ("accuracy", "weighted_f1", "ece", "nll")),
        "not",
        "known",
    ]
    assert "books/test: 3 rows without a text are left out" in lines
    assert sum(line.strip().startswith("negative") and "positive" not in line for line in lines) == 2
    assert sum(line.split() == ["negative", "positive"] for line in lines) == 2
