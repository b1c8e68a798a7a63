"""`valence-train export`, from a run or a folder to a version that the service opens; and what it refuses."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from transformers import LongformerConfig, LongformerForSequenceClassification

from service.engines import EngineOptions, open_engine
from service.store import Manifest, form, open_version, versions
from service.tokenizer import Tokenizer
from service.warmup import check_golden_texts
from tests.server import ROOT, SAFETY_S, eventually, serving
from tests.training.conftest import FinishedRun
from tests.training.exported import MAX_TOKENS, make_classifier, traced
from tests.training.tiny import DEV_ROWS, write_rows
from training.classifiers import open_classifier
from training.cli import main
from training.graph import graph_weights, load_eager, rebuild, round_to_half
from training.pretrained import load_tokenizer

BASE = ("--base-model", "tiny-bert=Apache-2.0")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,000 labelled rows, and some more."""
    return write_rows(
        tmp_path_factory.mktemp("rows") / "tiny" / "test.tsv", DEV_ROWS * (2100 // len(DEV_ROWS))
    )


def export(source: Path, store: Path, *more: str, version: int = 1) -> int:
    words = ["export", str(source), "--name", "tiny", "--version", str(version), "--store", str(store)]
    return main([*words, "--threads", "1", *more])


@pytest.fixture(scope="module")
def exported(
    finished_run: FinishedRun, rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[FinishedRun, Path]:
    """The store that a finished run was exported into, with everything that can be asked for."""
    store = tmp_path_factory.mktemp("store")
    notes = store.parent / "notes.md"
    notes.write_text("## Thanks\n\nTo all who wrote reviews.\n", encoding="utf-8")
    more = ("--data", str(rows), "--trained-on", "data=CC0-1.0", "--card", str(notes))
    assert export(finished_run.folder, store, *BASE, *more) == 0
    return finished_run, store


def manifest_of(store: Path) -> Manifest:
    return open_version(store, "tiny").manifest


def test_a_run_becomes_a_version_that_the_service_accepts(exported: tuple[FinishedRun, Path]) -> None:
    version = open_version(exported[1], "tiny")
    manifest = version.manifest
    tokenizer = Tokenizer.load(
        version.read(manifest.tokenizer), max_tokens=manifest.max_tokens, max_text_chars=1000
    )
    assert [(m.path, m.precision) for m in manifest.models] == [
        ("model.onnx", "float32"),
        ("model.int8.onnx", "int8"),
    ]
    for model in manifest.models:
        engine = open_engine(version, EngineOptions(precision=model.precision))
        check_golden_texts(engine, tokenizer, manifest)


def test_the_manifest_tells_where_it_all_came_from(exported: tuple[FinishedRun, Path]) -> None:
    run, store = exported
    manifest = manifest_of(store)
    assert manifest.labels == ["negative", "positive"]
    assert manifest.activation == "softmax"
    assert (manifest.base_model.name, manifest.base_model.licence) == ("tiny-bert", "Apache-2.0")
    kept = run.metrics["training_rows"]["rows_kept"]
    assert [(s.name, s.licence, s.rows) for s in manifest.training_data] == [("data", "CC0-1.0", kept)]
    assert {m.name for m in manifest.metrics} >= {"accuracy", "accuracy lost against float32"}
    assert str(store.parent) not in json.dumps([m.command for m in manifest.metrics])


def test_the_eager_model_can_be_rebuilt_from_the_version(exported: tuple[FinishedRun, Path]) -> None:
    run, store = exported
    version = open_version(store, "tiny")
    rebuilt = rebuild(graph_weights(version.path / "model.onnx"), version.manifest.architecture).state_dict()
    model = load_eager(run.folder / "model")
    round_to_half(model)
    assert all(torch.equal(weight, rebuilt[name]) for name, weight in model.state_dict().items())


def test_the_tokenizer_brings_no_padding_and_no_truncation(exported: tuple[FinishedRun, Path]) -> None:
    backend = Backend.from_file(str(exported[1] / "tiny" / "1" / "tokenizer.json"))
    assert backend.padding is None
    assert backend.truncation is None


def test_the_card_shows_sources_figures_commands_and_weaknesses(exported: tuple[FinishedRun, Path]) -> None:
    card = (exported[1] / "tiny" / "1" / "README.md").read_text(encoding="utf-8")
    for part in ("tiny-bert", "CC0-1.0", "accuracy lost", "valence-train evaluate", "bad at", "## Thanks"):
        assert part in card
    assert "none stated" not in card
    for line in card.splitlines():
        if line.startswith("|"):
            assert line.count("|") in {4, 5, 6}


def contents(version: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in version.iterdir()}


def test_a_card_is_written_anew_and_nothing_else_is(
    exported: tuple[FinishedRun, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = tmp_path / "tiny" / "1"
    shutil.copytree(exported[1] / "tiny" / "1", version)
    before = contents(version)
    later = tmp_path / "later.md"
    later.write_text("## Beyond\n\nOther reviews: 0.9.\n", encoding="utf-8")
    assert main(["card", str(version), str(later)]) == 0
    assert str(version / "README.md") in capsys.readouterr().out
    card = (version / "README.md").read_text(encoding="utf-8")
    first = before["README.md"].decode()
    assert card == first.replace("## Thanks\n\nTo all who wrote reviews.", "## Beyond\n\nOther reviews: 0.9.")
    assert card != first
    assert {**contents(version), "README.md": b""} == {**before, "README.md": b""}


@pytest.mark.parametrize(
    ("case", "reason"),
    [("no version", "<name>/<number>"), ("no note", "cannot be read"), ("damaged", "SHA-256")],
)
def test_a_card_that_is_refused_stays_as_it_was(
    exported: tuple[FinishedRun, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    case: str,
    reason: str,
) -> None:
    version = tmp_path / "tiny" / "1"
    shutil.copytree(exported[1] / "tiny" / "1", version)
    if case == "damaged":
        words = (version / "tokenizer.json").read_bytes()
        (version / "tokenizer.json").write_bytes(words[:-1] + b" ")
    before = contents(version)
    folder = version.parent if case == "no version" else version
    assert main(["card", str(folder), *([str(tmp_path / "gone.md")] if case == "no note" else [])]) == 2
    assert reason in capsys.readouterr().err
    assert contents(version) == before


def test_a_version_is_never_written_twice(
    exported: tuple[FinishedRun, Path], rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, store = exported
    before = (store / "tiny" / "1" / "manifest.json").read_bytes()
    assert export(run.folder, store, *BASE, "--data", str(rows)) == 2
    assert "never changed" in capsys.readouterr().err
    assert (store / "tiny" / "1" / "manifest.json").read_bytes() == before


def test_a_model_that_was_fine_tuned_elsewhere_comes_in(tmp_path: Path) -> None:
    source = traced("roberta").folder
    more = ("--formats", "onnx", "--max-tokens", "40", "--labels", "bad,good")
    assert export(source, tmp_path, *BASE, *more, "--trained-on", "reviews", version=3) == 0
    manifest = manifest_of(tmp_path)
    assert (manifest.version, manifest.max_tokens, manifest.labels) == (3, 40, ["bad", "good"])
    assert manifest.training_data[0].licence == "none stated"
    assert "Ask a lawyer" in (tmp_path / "tiny" / "3" / "README.md").read_text(encoding="utf-8")


def test_torchscript_alone_becomes_a_version_that_is_served(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows" / "dev.tsv", DEV_ROWS)
    more = ("--format", "torchscript", "--data", str(rows))
    assert export(traced("bert").folder, tmp_path / "store", *BASE, *more) == 0
    version = open_version(tmp_path / "store", "tiny")
    assert [(m.path, m.format, m.logit_bound) for m in version.manifest.models] == [
        ("model.torchscript", "torchscript", 1e-3)
    ]
    measured = [m.command for m in version.manifest.metrics if m.name == "accuracy"]
    assert measured == [
        "valence-train evaluate store/tiny/1 --data dev.tsv --engine torchscript --precision float32"
    ]
    assert "only when its SHA-256" in " ".join(
        (version.path / "README.md").read_text(encoding="utf-8").split()
    )
    with serving(model_store=tmp_path / "store", model="tiny", engine="torchscript", device="cpu") as server:
        answer = httpx.post(f"{server.url}/predict", json={"inputs": "good"}, timeout=60).json()
    golden = next(g for g in version.manifest.golden_texts if g.text == "good")
    logits = torch.tensor(golden.logits["reference"])
    expected = dict(zip(version.manifest.labels, torch.softmax(logits, 0).tolist(), strict=True))
    assert answer["predictions"][0]["scores"] == pytest.approx(expected, abs=1e-4)


def test_all_formats_are_one_version_in_a_fixed_order(rows: Path, tmp_path: Path) -> None:
    more = ("--formats", "torchscript, int8,onnx,float16", "--data", str(rows))
    assert export(traced("bert").folder, tmp_path, *BASE, *more) == 0
    manifest = manifest_of(tmp_path)
    forms = ["onnx/float32", "onnx/float16", "onnx/int8", "torchscript/float32"]
    assert [form(m) for m in manifest.models] == forms
    accuracies = {f"{m.format}/{m.precision}" for m in manifest.metrics if m.name == "accuracy"}
    assert accuracies == set(forms)
    card = (tmp_path / "tiny" / "1" / "README.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in card for name in forms)


def write_doubtful(folder: Path) -> Path:
    """Dev rows of which one in five bears the wrong label: nobody can be sure of them."""
    rows = [
        (text, 1 - label if place % 5 == 0 else label) for place, (text, label) in enumerate(DEV_ROWS * 12)
    ]
    return write_rows(folder / "doubtful" / "dev.tsv", rows)


def test_a_temperature_is_fitted_on_dev_rows_and_is_in_what_is_served(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    dev = write_doubtful(tmp_path)
    more = ("--formats", "onnx", "--calibrate-on", str(dev))
    assert export(finished_run.folder, tmp_path / "store", *BASE, *more) == 0
    folder = tmp_path / "store" / "tiny" / "1"
    manifest = manifest_of(tmp_path / "store")
    assert abs(manifest.temperature - 1) > 0.05
    errors = {m.name: m for m in manifest.metrics if m.name.startswith("expected calibration error")}
    before, after = (
        errors["expected calibration error at temperature 1"],
        errors["expected calibration error"],
    )
    assert (after.dataset, after.examples) == ("doubtful/dev", len(DEV_ROWS) * 12)
    assert after.value < before.value
    assert after.command.endswith("--formats onnx --calibrate-on dev.tsv")
    assert f"a temperature of {manifest.temperature:.4g}" in (folder / "README.md").read_text(
        encoding="utf-8"
    )
    golden = next(g for g in manifest.golden_texts if g.text == "good")
    expected = torch.softmax(torch.tensor(golden.logits["reference"]) / manifest.temperature, 0).tolist()
    scores = open_classifier(folder, threads=1).scores(["good"])
    assert scores[0].tolist() == pytest.approx(expected, abs=1e-4)


def test_without_dev_rows_the_temperature_is_one(exported: tuple[FinishedRun, Path]) -> None:
    assert manifest_of(exported[1]).temperature == 1.0
    card = (exported[1] / "tiny" / "1" / "README.md").read_text(encoding="utf-8")
    assert "temperature" not in card


def test_one_label_is_a_sigmoid(tmp_path: Path) -> None:
    source = make_classifier(tmp_path, "distilbert", labels=("positive",))
    assert export(source, tmp_path / "store", *BASE, "--formats", "onnx") == 0
    manifest = manifest_of(tmp_path / "store")
    assert (manifest.labels, manifest.activation) == (["positive"], "sigmoid")


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")


def unnamed_labels(folder: Path) -> None:
    change_config(folder, id2label={"0": "LABEL_0", "1": "LABEL_1"}, label2id={"LABEL_0": 0, "LABEL_1": 1})


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def larger_tokenizer(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([f"word{number}" for number in range(50)])
    backend.save(str(folder / "tokenizer.json"))


def without_special_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, "post_processor": None}), encoding="utf-8")


def other_padding(folder: Path) -> None:
    change_config(folder, pad_token_id=4)


def a_quantity(folder: Path) -> None:
    change_config(folder, problem_type="regression")


def fewer_layers(folder: Path) -> None:
    """The library would leave the weights of the other layer out, and say nothing."""
    change_config(folder, num_hidden_layers=1)


def relative_positions(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["bert.encoder.layer.0.attention.self.distance_embedding.weight"] = torch.zeros(127, 16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def labels_with_a_gap(folder: Path) -> None:
    change_config(folder, id2label={"0": "bad", "5": "good"}, label2id={"bad": 0, "good": 5})


def without_head(folder: Path) -> None:
    shutil.copy(folder.parent / "base" / "model.safetensors", folder / "model.safetensors")


def without_model(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("harm", "more", "reason"),
    [
        (unnamed_labels, (), "--labels"),
        (None, ("--labels", "one,two,three"), "3 labels, but the model gives 2 logits"),
        (without_tokenizer, (), "tokenizer"),
        (larger_tokenizer, (), "the model knows"),
        (without_special_tokens, (), "no special tokens round a text"),
        (other_padding, (), "the tokenizer pads with 0, the model with 4"),
        (a_quantity, (), "regression"),
        (fewer_layers, (), "bert.encoder.layer.1.attention.output.LayerNorm.bias has no place"),
        (relative_positions, (), "distance_embedding.weight has no place"),
        (labels_with_a_gap, (), "id2label does not count from 0 without a gap, see 1"),
        (None, ("--labels", "bad,bad"), "two labels have the same name"),
        (None, ("--labels", "bad,go\nod"), "label 1 is no name"),
        (None, ("--labels", "bad," + "x" * 201), "label 1 is no name"),
        (without_head, (), "classifier"),
        (without_model, (), "neither a finished run nor"),
        (None, ("--formats", "int8"), "int8 without onnx"),
        (None, ("--formats", "torchscript,int8"), "int8 without onnx"),
        (None, ("--formats", "float16"), "float16 without onnx"),
        (None, ("--formats", "onnx,coreml"), "there is no 'coreml', only onnx, float16, int8, torchscript"),
        (None, ("--formats", ""), "there is no ''"),
        (None, ("--formats", "onnx,int8"), "2,000"),
        (None, ("--max-tokens", "2"), "no room"),
        (None, ("--card", "/nowhere/card.md"), "cannot be read"),
        (None, ("--calibrate-on", "/nowhere/dev.tsv"), "there is no such file"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    harm: Callable[[Path], None] | None,
    more: tuple[str, ...],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(traced("bert").folder.parent, tmp_path / "source")
    folder = tmp_path / "source" / "classifier"
    if harm is not None:
        harm(folder)
    assert export(folder, tmp_path / "store", *BASE, "--formats", "onnx", *more) == 2
    assert reason in capsys.readouterr().err
    assert versions(tmp_path / "store", "tiny") == []


def test_an_interrupted_export_says_so_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    # What Ctrl-C does while the graph is made.
    monkeypatch.setattr("training.export.trace", interrupted)
    assert export(traced("bert").folder, tmp_path, *BASE, "--formats", "onnx") == 130
    assert capsys.readouterr().err.splitlines()[-1] == "valence-train: stopped; nothing is written"
    assert versions(tmp_path, "tiny") == []


def test_sigterm_ends_an_export_and_leaves_nothing_behind(tmp_path: Path) -> None:
    words = ["export", str(traced("bert").folder), "--name", "tiny", "--version", "1", "--threads", "1"]
    words += ["--store", str(tmp_path / "store")]
    with subprocess.Popen(
        [sys.executable, "-m", "training.cli", *words, *BASE, "--formats", "onnx"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
    ) as process:
        try:
            eventually(lambda: list(tmp_path.glob("valence-export-*")) != [], "the files are being made")
            process.terminate()
            _, said = process.communicate(timeout=SAFETY_S)
        finally:
            process.kill()
    assert said.decode().splitlines()[-1] == "valence-train: stopped; nothing is written"
    assert process.returncode == 130
    assert list(tmp_path.glob("valence-export-*")) == []
    assert versions(tmp_path / "store", "tiny") == []


@pytest.mark.parametrize("form_name", ["onnx", "torchscript"])
def test_a_family_that_cannot_be_traced_ends_with_one_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form_name: str
) -> None:
    """Longformer gives each layer a mask of its own form."""
    tokenizer = load_tokenizer(str(traced("bert").folder))
    names = {0: "negative", 1: "positive"}
    config = LongformerConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        attention_window=[8, 8],
        pad_token_id=tokenizer.pad_token_id,
        sep_token_id=tokenizer.sep_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        id2label=names,
        label2id={name: index for index, name in names.items()},
    )
    source = tmp_path / "longformer"
    LongformerForSequenceClassification(config).save_pretrained(source)
    tokenizer.save_pretrained(source)
    capsys.readouterr()
    assert export(source, tmp_path / "store", *BASE, "--formats", form_name) == 1
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith("valence-train: error: a longformer model cannot be exported: IndexError: ")
    assert versions(tmp_path / "store", "tiny") == []


def test_a_base_that_is_a_folder_must_be_named(
    finished_run: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(finished_run.folder, tmp_path, "--formats", "onnx") == 2
    assert "--base-model" in capsys.readouterr().err


def test_the_longest_text_is_what_the_positions_leave(tmp_path: Path) -> None:
    # 64 rows of positions, of which RoBERTa never uses the first two.
    source = traced("roberta").folder
    assert export(source, tmp_path, *BASE, "--formats", "onnx") == 0
    assert manifest_of(tmp_path).max_tokens == 62
    assert MAX_TOKENS < 62
