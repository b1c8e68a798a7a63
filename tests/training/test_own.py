"""Our encoder stands where a model of the library does: in training, in a run folder, in a graph."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from encoder.config import EncoderConfig
from service.store import open_version
from tests.training.exported import open_graph, traced
from tests.training.test_train import (
    ProcessEndError,
    StopAt,
    assert_decay_spares_biases_and_norms,
    assert_learned,
    assert_same_weights,
)
from tests.training.tiny import TRAIN_ROWS, Kind, make_base, tiny_config, write_data
from training.cli import main
from training.config import ConfigError, FitConfig, NewEncoder, read_config, write_json
from training.graph import (
    architecture_of,
    graph_weights,
    load_eager,
    rebuild,
    round_to_half,
    store_half,
    trace,
)
from training.own import (
    OwnClassifier,
    from_library,
    is_own,
    kept_names,
    load_own,
    new_classifier,
    rebuild_own,
    through_encoder,
    to_library,
)
from training.parity import Vocabulary, eager_logits, grid
from training.pretrained import load_classifier, load_tokenizer
from training.train import fit

OWN_KINDS: tuple[Kind, ...] = ("bert", "distilbert", "roberta")
SMALL = NewEncoder(layers=2, width=32, heads=2)


@pytest.fixture(scope="module")
def scratch_run(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run from random weights: a small pre-norm encoder, a base that gives only its tokenizer."""
    folder = tmp_path_factory.mktemp("scratch")
    data = write_data(folder / "data", train=TRAIN_ROWS)
    config = tiny_config(
        tiny_base, data, epochs=20, batch_items=8, learning_rate=1e-3, encoder="own", new=SMALL
    )
    return folder / "run", fit(config, folder / "run", threads=1)


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_weights_of_the_library_go_in_and_come_back_bit_by_bit(kind: Kind) -> None:
    library = traced(kind).model
    back = to_library(from_library(library))
    assert type(back) is type(library)
    assert [n for n, w in library.state_dict().items() if not torch.equal(w, back.state_dict()[n])] == []


def test_another_family_stays_with_the_library() -> None:
    library = traced("mpnet").model
    assert through_encoder(library) is library
    with pytest.raises(ConfigError, match="model_type is 'mpnet'"):
        from_library(library)


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_training_through_it_gives_a_folder_of_the_library(tmp_path: Path, kind: Kind) -> None:
    data = write_data(tmp_path / "data", train=TRAIN_ROWS)
    config = tiny_config(make_base(tmp_path / "base", kind), data, epochs=12, batch_items=8, encoder="own")
    assert_learned(tmp_path / "run", fit(config, tmp_path / "run", threads=1))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert model.config.model_type == kind
    assert model.config.id2label == {0: "negative", 1: "positive"}


def test_it_learns_what_the_library_learns(tiny_base: Path, tmp_path: Path) -> None:
    """Without dropout, both codes take the same steps from the same weights."""
    config = json.loads((tiny_base / "config.json").read_text(encoding="utf-8"))
    base = tmp_path / "base"
    base.mkdir()
    for path in tiny_base.iterdir():
        (base / path.name).write_bytes(path.read_bytes())
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (base / "config.json").write_text(json.dumps({**config, **still}), encoding="utf-8")
    data = write_data(tmp_path / "data")
    runs = {}
    for encoder in ("library", "own"):
        folder = tmp_path / encoder
        runs[encoder] = fit(tiny_config(base, data, encoder=encoder), folder, threads=1)
    for ours, theirs in zip(runs["own"]["epochs"], runs["library"]["epochs"], strict=True):
        assert ours["dev_loss"] == pytest.approx(theirs["dev_loss"], abs=1e-3)
    weights = {name: load_file(tmp_path / name / "model" / "model.safetensors") for name in runs}
    # Adam makes a step of full size of a gradient that is nothing but rounding, as that of a key's bias.
    for name, weight in weights["library"].items():
        if "key.bias" not in name:
            torch.testing.assert_close(weights["own"][name], weight, atol=2e-3, rtol=0)


def test_random_weights_learn(scratch_run: tuple[Path, dict[str, Any]]) -> None:
    run, metrics = scratch_run
    assert_learned(run, metrics)
    assert metrics["config"]["new"] == {"layers": 2, "width": 32, "heads": 2, "positions": "learned"}
    model = load_classifier(run / "model")
    assert isinstance(model, OwnClassifier)
    assert model.network.config.norm_first
    assert len(metrics["fresh_weights"]) == len(list(model.parameters()))


def test_an_interrupted_run_ends_like_one_that_was_not(tiny_base: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    config = tiny_config(tiny_base, data, epochs=3, save_steps=2, encoder="own", new=SMALL)
    whole = fit(config, tmp_path / "whole", threads=1)
    with pytest.raises(ProcessEndError):
        fit(config, tmp_path / "cut", threads=1, callbacks=[StopAt(5)])
    resumed = fit(config, tmp_path / "cut", threads=1)
    assert resumed["resumed_from"] == "checkpoint-4"
    assert resumed["epochs"] == whole["epochs"]
    assert_same_weights(tmp_path / "whole", tmp_path / "cut")


def test_weight_decay_spares_biases_and_layer_norm(tiny_base: Path, tmp_path: Path) -> None:
    shape = EncoderConfig(words=80, max_tokens=32, width=32, heads=2)
    model = new_classifier(shape, labels=("a", "b"), pad_id=0)
    assert_decay_spares_biases_and_norms(model, tiny_base, tmp_path)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_a_new_classifier_is_kept_and_read_back(tmp_path: Path, positions: Any) -> None:
    shape = EncoderConfig(words=80, max_tokens=32, width=32, layers=2, heads=2, positions=positions)
    model = new_classifier(shape, labels=("a", "b", "c"), pad_id=4)
    model.train(False)
    model.save_pretrained(tmp_path)
    assert is_own(tmp_path)
    assert not is_own(tmp_path / "nowhere")
    kept = load_own(tmp_path)
    assert kept.network.config == replace(shape, labels=3)
    assert (kept.config.id2label, kept.config.pad_token_id) == ({0: "a", 1: "b", 2: "c"}, 4)
    assert not kept.training
    ids = torch.arange(10).view(2, 5)
    assert torch.equal(kept(ids).logits, model(ids).logits)


@pytest.mark.parametrize("harm", ["{", "[]", '{"model_type": "valence"}', None])
def test_a_folder_that_holds_no_whole_model_is_refused(tmp_path: Path, harm: str | None) -> None:
    shape = EncoderConfig(words=80, max_tokens=32, width=32, layers=1, heads=2)
    new_classifier(shape, labels=("a", "b"), pad_id=0).save_pretrained(tmp_path)
    if harm is None:
        (tmp_path / "model.safetensors").write_bytes(b"damaged")
    else:
        (tmp_path / "config.json").write_text(harm, encoding="utf-8")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_own(tmp_path)


def test_a_graph_of_a_new_encoder_can_be_turned_back(
    scratch_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    model = load_eager(scratch_run[0] / "model")
    round_to_half(model)
    graph = trace(model, 32)
    store_half(graph, list(kept_names(model)))
    path = tmp_path / "model.onnx"
    ir.save(graph, path)
    architecture = json.loads(json.dumps(architecture_of(model)))
    rebuilt = rebuild(graph_weights(path), architecture)
    assert isinstance(rebuilt, OwnClassifier)
    assert [n for n, w in model.state_dict().items() if not torch.equal(w, rebuilt.state_dict()[n])] == []
    engine = open_graph(path, precision="float32", pad_id=0)
    for batch in grid(Vocabulary((2, 3), tuple(range(5, 60)), 0), 32):
        np.testing.assert_allclose(engine.run(batch), eager_logits(rebuilt, batch, 0), atol=1e-4)


def test_a_configuration_without_an_encoder_is_refused() -> None:
    with pytest.raises(ConfigError, match="makes no sense"):
        rebuild_own({"model_type": "valence"})


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"encoder": "other"}, "^encoder: "),
        ({"new": NewEncoder()}, "^new: "),
    ],
)
def test_choices_that_make_no_sense_are_refused(choice: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        FitConfig(base="bert", data=("train.tsv",), **choice)


@pytest.mark.parametrize(
    "size", [{"layers": 0}, {"width": 30}, {"heads": 0}, {"heads": 3}, {"positions": "none"}]
)
def test_a_size_that_makes_no_sense_is_refused(size: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(size))}: |^width: "):
        NewEncoder(**size)


def test_a_kept_size_is_read_back_and_an_older_run_needs_none(tmp_path: Path) -> None:
    config = FitConfig(base="bert", data=("a.tsv",), encoder="own", new=NewEncoder(layers=3))
    write_json(tmp_path / "config.json", {**config.as_dict(), "files": []})
    assert read_config(tmp_path) == config
    older = {name: value for name, value in config.as_dict().items() if name not in {"encoder", "new"}}
    write_json(tmp_path / "config.json", {**older, "files": []})
    assert read_config(tmp_path) == replace(config, encoder="library", new=None)


def test_a_refused_run_leaves_nothing_in_the_way_of_the_next(tiny_base: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    with pytest.raises(ConfigError, match="65 is more than the 64"):
        fit(tiny_config(tiny_base, data, epochs=1, max_tokens=65, encoder="own"), tmp_path / "run", threads=1)
    assert not (tmp_path / "run").exists()


def test_padding_stands_on_the_right_whatever_the_tokenizer_says(tiny_base: Path, tmp_path: Path) -> None:
    """The head reads what stands first, and the service pads on the right."""
    base = tmp_path / "base"
    base.mkdir()
    for path in tiny_base.iterdir():
        (base / path.name).write_bytes(path.read_bytes())
    config = json.loads((base / "tokenizer_config.json").read_text(encoding="utf-8"))
    left = {**config, "padding_side": "left", "truncation_side": "left"}
    (base / "tokenizer_config.json").write_text(json.dumps(left), encoding="utf-8")
    tokenizer = load_tokenizer(str(base))
    ids = tokenizer(["good", "a good film it was"], padding=True)["input_ids"]
    assert ids[0][0] == ids[1][0] == tokenizer.cls_token_id
    assert ids[0][-1] == tokenizer.pad_token_id


def test_a_version_from_random_weights_names_no_base(
    scratch_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    words = ["export", str(scratch_run[0]), "--name", "new", "--version", "1", "--store", str(tmp_path)]
    assert main([*words, "--formats", "onnx", "--threads", "1"]) == 0
    manifest = open_version(tmp_path, "new").manifest
    assert manifest.base_model.name == "none, random weights"
    # No longer than the positions that were trained.
    assert manifest.max_tokens == 32
