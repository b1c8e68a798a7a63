"""Fine-tuning with real, tiny models: it learns, it resumes to the same result, it keeps the best epoch."""

import json
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from tests.training.conftest import FinishedRun
from tests.training.tiny import (
    DEV_ROWS,
    ROWS,
    TRAIN_ROWS,
    Kind,
    make_base,
    tiny_config,
    write_data,
    write_rows,
)
from training.batches import LengthGroups
from training.classifiers import open_classifier
from training.config import ConfigError, FitConfig
from training.data import DataError, Example
from training.pretrained import load_base, load_tokenizer, usable_tokens
from training.runs import trained_texts
from training.train import build_trainer, fit


class ProcessEndError(Exception):
    """Stands for the end of the process."""


class StopAt(TrainerCallback):
    """Ends the run after a step, when its checkpoint, if it has one, was written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(
        self,
        args: Any,  # noqa: ARG002 - the library passes it by name
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        if state.global_step == self.step:
            raise ProcessEndError


class TurnHead(TrainerCallback):
    """Turns the head round in the last epoch, so that this epoch is the worst."""

    def on_epoch_end(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        if round(state.epoch or 0) == args.num_train_epochs:
            with torch.no_grad():
                kwargs["model"].classifier.weight.neg_()


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def share_right(run: Path, rows: Sequence[tuple[str, int]]) -> float:
    """The accuracy of the kept model."""
    scores = open_classifier(run, threads=1).scores([text for text, _ in rows])
    guesses: list[int] = scores.argmax(axis=1).tolist()
    return sum(guess == label for guess, (_, label) in zip(guesses, rows, strict=True)) / len(rows)


def assert_learned(run: Path, metrics: dict[str, Any]) -> None:
    assert metrics["train_loss"][-1]["loss"] < 0.9 * metrics["train_loss"][0]["loss"]
    assert metrics["dev"]["accuracy"] > 0.8
    assert share_right(run, DEV_ROWS) == metrics["dev"]["accuracy"]


@pytest.fixture(scope="module")
def whole_run(
    tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, FitConfig, dict[str, Any]]:
    """A run of 9 steps, 3 an epoch, that nobody interrupted, and its data."""
    folder = tmp_path_factory.mktemp("whole")
    config = tiny_config(tiny_base, write_data(folder / "data"), epochs=3, save_steps=2)
    return folder / "run", config, fit(config, folder / "run", threads=1)


def test_a_bert_learns(finished_run: FinishedRun) -> None:
    assert_learned(finished_run.folder, finished_run.metrics)


@pytest.mark.parametrize("kind", ["distilbert", "roberta", "mpnet"])
def test_other_architectures_learn(tmp_path: Path, kind: Kind) -> None:
    data = write_data(tmp_path / "data", train=TRAIN_ROWS)
    config = tiny_config(make_base(tmp_path / "base", kind), data, epochs=12, batch_items=8)
    assert_learned(tmp_path / "run", fit(config, tmp_path / "run", threads=1))


def test_a_run_folder_holds_configuration_metrics_picture_and_model(finished_run: FinishedRun) -> None:
    folder = finished_run.folder
    assert json.loads((folder / "metrics.json").read_text(encoding="utf-8")) == finished_run.metrics
    kept = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert kept.items() >= finished_run.config.as_dict().items()
    assert [file["name"] for file in kept["files"]] == ["data/dev.tsv", "data/train.tsv"]
    picture = (folder / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.endswith(b"IEND\xaeB`\x82")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    assert model.config.id2label == {0: "negative", 1: "positive"}
    assert model.config.label2id == {"negative": 0, "positive": 1}


def test_each_epoch_is_measured_with_accuracy_and_f1(finished_run: FinishedRun) -> None:
    epochs = finished_run.metrics["epochs"]
    assert [entry["epoch"] for entry in epochs] == list(range(1, 13))
    assert all(0 <= entry["accuracy"] <= 1 and 0 <= entry["weighted_f1"] <= 1 for entry in epochs)
    best = max(entry["weighted_f1"] for entry in epochs)
    assert finished_run.metrics["dev"]["weighted_f1"] == best
    assert finished_run.metrics["dev"]["rows"] == len(DEV_ROWS)


def test_the_tokenizer_is_kept_without_padding_and_truncation(
    tiny_base: Path, finished_run: FinishedRun
) -> None:
    before = Tokenizer.from_file(str(tiny_base / "tokenizer.json"))
    assert before.padding is not None
    assert before.truncation is not None
    kept = Tokenizer.from_file(str(finished_run.folder / "model" / "tokenizer.json"))
    assert kept.padding is None
    assert kept.truncation is None
    assert len(kept.encode("good " * 100).ids) == 102


def test_labels_may_be_named(tiny_base: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_rows(data / "train.tsv", [*ROWS, ("the time", 2), ("this is a film", 2)])
    write_rows(data / "dev.tsv", DEV_ROWS)
    fit(tiny_config(tiny_base, data, epochs=1, labels=("bad", "good", "plain")), tmp_path / "run", threads=1)
    assert open_classifier(tmp_path / "run", threads=1).labels == ("bad", "good", "plain")


@pytest.mark.parametrize(
    ("step", "checkpoint"),
    [(1, None), (2, "checkpoint-2"), (5, "checkpoint-4"), (6, "checkpoint-6")],
    ids=["before the first checkpoint", "first epoch", "mid epoch", "epoch end"],
)
def test_an_interrupted_run_ends_like_one_that_was_not(
    whole_run: tuple[Path, FitConfig, dict[str, Any]], tmp_path: Path, step: int, checkpoint: str | None
) -> None:
    whole, config, metrics = whole_run
    with pytest.raises(ProcessEndError):
        fit(config, tmp_path, threads=1, callbacks=[StopAt(step)])
    resumed = fit(config, tmp_path, threads=1)
    assert resumed["resumed_from"] == checkpoint
    assert resumed["epochs"] == metrics["epochs"]
    assert_same_weights(whole, tmp_path)


def test_a_half_written_checkpoint_is_passed_over(
    whole_run: tuple[Path, FitConfig, dict[str, Any]], tmp_path: Path
) -> None:
    whole, config, _ = whole_run
    with pytest.raises(ProcessEndError):
        fit(config, tmp_path, threads=1, callbacks=[StopAt(5)])
    state = tmp_path / "checkpoints" / "checkpoint-4" / "trainer_state.json"
    state.write_bytes(state.read_bytes()[:40])
    assert fit(config, tmp_path, threads=1)["resumed_from"] == "checkpoint-3"
    assert_same_weights(whole, tmp_path)


def test_a_finished_run_is_left_as_it_is(finished_run: FinishedRun) -> None:
    before = (finished_run.folder / "model" / "model.safetensors").stat()
    again = fit(finished_run.config, finished_run.folder, threads=1, callbacks=[StopAt(0)])
    assert again == finished_run.metrics
    assert (finished_run.folder / "model" / "model.safetensors").stat() == before


def test_other_choices_are_refused_with_the_difference(finished_run: FinishedRun) -> None:
    other = replace(finished_run.config, seed=7)
    with pytest.raises(ConfigError, match=r"seed: was 42, now 7$"):
        fit(other, finished_run.folder, threads=1)


def test_other_data_is_refused_and_restart_begins_anew(tiny_base: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    config = tiny_config(tiny_base, data, epochs=1)
    fit(config, tmp_path / "run", threads=1)
    write_rows(data / "train.tsv", [*ROWS, ("happy time", 1)])
    with pytest.raises(ConfigError, match=r"file 2 data/train\.tsv: was \w{12}, now \w{12}$"):
        fit(config, tmp_path / "run", threads=1)
    metrics = fit(config, tmp_path / "run", threads=1, restart=True)
    assert metrics["resumed_from"] is None
    assert metrics["training_rows"]["rows_kept"] == len(ROWS) + 1
    assert trained_texts(tmp_path / "run") == {*(text for text, _ in ROWS), "happy time"}
    write_rows(data / "train.tsv", ROWS)
    with pytest.raises(DataError, match="any more"):
        trained_texts(tmp_path / "run")


def test_a_folder_that_is_no_run_is_left_alone_even_by_restart(tiny_base: Path, tmp_path: Path) -> None:
    out = tmp_path / "precious"
    out.mkdir()
    (out / "letter.txt").write_text("keep me", encoding="utf-8")
    config = tiny_config(tiny_base, write_data(tmp_path / "data"))
    with pytest.raises(ConfigError, match="not the configuration of a run"):
        fit(config, out, threads=1, restart=True)
    (out / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="not the configuration of a run"):
        fit(config, out, threads=1, restart=True)
    assert (out / "letter.txt").read_text(encoding="utf-8") == "keep me"


def test_the_best_epoch_is_kept_not_the_last(tiny_base: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", train=TRAIN_ROWS)
    config = tiny_config(tiny_base, data, epochs=10, batch_items=8)
    metrics = fit(config, tmp_path / "run", threads=1, callbacks=[TurnHead()])
    best = metrics["best_epoch"]
    assert best < 10
    assert metrics["epochs"][-1]["weighted_f1"] < metrics["dev"]["weighted_f1"]
    assert share_right(tmp_path / "run", DEV_ROWS) == metrics["epochs"][best - 1]["accuracy"]


def test_the_same_seed_gives_the_same_model_and_another_another(tiny_base: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        fit(tiny_config(tiny_base, data, epochs=1, seed=seed), tmp_path / name, threads=1)
    assert_same_weights(tmp_path / "one", tmp_path / "same")
    head = "classifier.weight"
    assert not torch.equal(weights(tmp_path / "one")[head], weights(tmp_path / "other")[head])


def test_rows_that_also_judge_do_not_train_and_are_counted(tiny_base: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", train=[*ROWS, *DEV_ROWS[:2], ROWS[0]])
    metrics = fit(tiny_config(tiny_base, data, epochs=1), tmp_path / "run", threads=1)
    assert metrics["training_rows"] == {
        "rows_read": 15,
        "rows_kept": 12,
        "duplicates": 1,
        "contradictory": 0,
        "also_in_dev": 2,
        "also_in_test": 0,
    }


def assert_decay_spares_biases_and_norms(model: PreTrainedModel, base: Path, out: Path) -> None:
    config = tiny_config(base, out)
    rows = [Example(text, label) for text, label in ROWS]
    tokenizer = load_tokenizer(config.base)
    trainer = build_trainer(config, out, model=model, tokenizer=tokenizer, train=rows, dev=rows)
    decay = {
        id(parameter): group["weight_decay"]
        for group in trainer.create_optimizer().param_groups
        for parameter in group["params"]
    }
    spared = [name for name, parameter in model.named_parameters() if decay[id(parameter)] == 0]
    decayed = [name for name, parameter in model.named_parameters() if decay[id(parameter)] == 0.01]
    expected = [
        name for name, _ in model.named_parameters() if name.endswith("bias") or "norm" in name.lower()
    ]
    assert spared == expected
    assert len(spared) + len(decayed) == len(decay)


def test_weight_decay_spares_biases_and_layer_norm(tiny_base: Path, tmp_path: Path) -> None:
    model, _ = load_base(str(tiny_base), ("negative", "positive"))
    assert_decay_spares_biases_and_norms(model, tiny_base, tmp_path)


def test_a_local_base_never_asks_the_network(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def refuse(*address: object, **_: object) -> None:
        asked.append(address)
        raise OSError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    fit(tiny_config(tiny_base, write_data(tmp_path / "data"), epochs=1), tmp_path / "run", threads=1)
    open_classifier(tmp_path / "run", threads=1)
    assert asked == []


def test_weights_that_the_base_brings_are_not_made_anew(tiny_base: Path, finished_run: FinishedRun) -> None:
    """The pooler of a BERT comes from the checkpoint; only the head is new."""
    assert finished_run.metrics["fresh_weights"] == ["classifier.bias", "classifier.weight"]
    model, _ = load_base(str(tiny_base), ("negative", "positive"))
    kept = load_file(tiny_base / "model.safetensors")
    assert torch.equal(model.state_dict()["bert.pooler.dense.weight"], kept["pooler.dense.weight"])


@pytest.mark.parametrize(
    ("base", "reason"),
    [("./nowhere", "no such folder"), ("/a/b/c", "no such folder"), ("models/tiny/", "no such folder")],
)
def test_a_base_that_is_written_like_a_path_is_not_looked_for_elsewhere(base: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_tokenizer(base)


def test_a_base_without_model_or_tokenizer_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=f"^{empty}: "):
        load_tokenizer(str(empty))
    with pytest.raises(ConfigError, match=f"^{empty}: "):
        load_base(str(empty), ("negative", "positive"))


def test_a_base_that_lacks_its_encoder_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    """A configuration with more layers than the weights: the library would fill the rest at random."""
    base = tmp_path / "deeper"
    shutil.copytree(tiny_base, base)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    (base / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"lacks 16 weights of its encoder, first bert\.encoder\.layer\.2"):
        load_base(str(base), ("negative", "positive"))


def test_what_cannot_be_trained_is_refused_before_the_folder_is_made(tiny_base: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    only_train = write_rows(tmp_path / "a" / "train.tsv", ROWS)
    with pytest.raises(DataError, match="no dev rows"):
        fit(tiny_config(tiny_base, only_train), out, threads=1)
    with pytest.raises(DataError, match="no training rows"):
        fit(tiny_config(tiny_base, write_rows(tmp_path / "b" / "dev.tsv", DEV_ROWS)), out, threads=1)
    one_sided = write_data(tmp_path / "c", train=ROWS[:6])
    with pytest.raises(DataError, match="no training row for negative"):
        fit(tiny_config(tiny_base, one_sided), out, threads=1)
    assert not out.exists()


def test_more_tokens_than_the_base_reads_are_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "roberta")
    config = tiny_config(base, write_data(tmp_path / "data"), max_tokens=63)
    with pytest.raises(ConfigError, match="max_tokens: 63 is more than the 62 the base reads"):
        fit(config, tmp_path / "run", threads=1)


@pytest.mark.parametrize(
    ("kind", "tokens"), [("bert", 64), ("distilbert", 64), ("roberta", 62), ("mpnet", 62)]
)
def test_a_model_reads_as_many_tokens_as_it_has_positions_for(
    tmp_path: Path, kind: Kind, tokens: int
) -> None:
    """At the limit it answers; beyond it the table of positions ends."""
    model, _ = load_base(str(make_base(tmp_path / "base", kind)), ("negative", "positive"))
    limit = usable_tokens(model.config)
    assert limit == tokens
    assert model(torch.full((1, limit), 5)).logits.shape == (1, 2)
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, limit + 1), 5))


def order(groups: LengthGroups, epoch: int) -> list[int]:
    groups.set_epoch(epoch)
    return list(groups)


def padded(lengths: Sequence[int], indices: Sequence[int], items: int) -> int:
    batches = [indices[start : start + items] for start in range(0, len(indices), items)]
    return sum(max(lengths[index] for index in batch) * len(batch) for batch in batches)


def test_batches_hold_texts_of_like_length_in_an_order_of_their_own_each_epoch() -> None:
    lengths = np.random.default_rng(3).integers(3, 60, 1001).tolist()
    groups = LengthGroups(lengths, batch_items=8, seed=5)
    first = order(groups, 0)
    assert sorted(first) == list(range(1001))
    assert len(groups) == 1001
    assert order(groups, 1) != first
    assert order(LengthGroups(lengths, batch_items=8, seed=5), 0) == first
    assert order(LengthGroups(lengths, batch_items=8, seed=6), 0) != first
    assert padded(lengths, first, 8) < 1.1 * sum(lengths)
    assert padded(lengths, list(range(1001)), 8) > 1.5 * sum(lengths)
    longest = [max(lengths[index] for index in first[start : start + 8]) for start in range(0, 400, 8)]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))
