"""A tokenizer or labels that belong to another model are refused with the reason; nothing is written."""

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import pytest

from service.engines import open_engine
from service.errors import StartupError
from service.loading import load
from service.settings import Settings
from service.store import open_version, versions
from tests.training.conftest import FinishedRun
from tests.training.exported import traced
from tests.training.families import FAMILIES, save_family
from tests.training.tiny import DEV_ROWS, Kind, write_rows
from training.cli import main


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def change_words(folder: Path, change: Callable[[dict[str, int]], dict[str, int]]) -> None:
    """Gives the words other ids or spellings; special tokens stay."""

    def edit(content: dict[str, Any]) -> None:
        special = {token["content"] for token in content["added_tokens"]}
        vocabulary: dict[str, int] = content["model"]["vocab"]
        words = {word: index for word, index in vocabulary.items() if word not in special}
        kept = {word: index for word, index in vocabulary.items() if word in special}
        content["model"]["vocab"] = {**kept, **change(words)}

    change_json(folder / "tokenizer.json", edit)


def shuffled(words: dict[str, int]) -> dict[str, int]:
    """The same words and the same ids, but the other way round."""
    return dict(zip(words, reversed(words.values()), strict=True))


def far_fewer(folder: Path) -> None:
    change_words(folder, lambda words: {word: index for word, index in words.items() if index < 80})


def one_in_twenty_fewer(folder: Path) -> None:
    """As many fewer as cased BERT has than uncased BERT."""
    change_words(folder, lambda words: {w: i for w, i in words.items() if i < 0.95 * (5 + len(words))})


def another_script(folder: Path) -> None:
    change_words(folder, lambda words: {chr(0x0E01 + index): index for index in words.values()})


def another_end(folder: Path) -> None:
    change_json(folder / "config.json", lambda config: config.update(eos_token_id=3))


def three_names(folder: Path) -> None:
    """The configuration has more names than the head has logits."""
    names = {"0": "bad", "1": "so-so", "2": "good"}
    change_json(
        folder / "config.json",
        lambda config: config.update(id2label=names, label2id={name: int(n) for n, name in names.items()}),
    )


def export(source: Path, store: Path, *more: str) -> int:
    words = ["export", str(source), "--name", "tiny", "--version", "1", "--store", str(store)]
    return main([*words, "--base-model", "tiny=MIT", "--formats", "onnx", "--threads", "1", *more])


@pytest.mark.parametrize(
    ("kind", "harm", "reason"),
    [
        ("bert", far_fewer, "the tokenizer has 80 tokens, the model knows"),
        ("bert", one_in_twenty_fewer, "tokens, the model knows"),
        ("bert", another_script, "tokens of the golden texts"),
        ("roberta", another_end, "eos is token 2 of the tokenizer, the model has 3"),
        ("distilbert", three_names, "classifier.bias is [2], and its configuration says [3]"),
    ],
)
def test_what_belongs_to_another_model_is_refused_at_export(
    kind: Kind,
    harm: Callable[[Path], None],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(traced(kind).folder, tmp_path / "classifier")
    harm(folder)
    assert export(folder, tmp_path / "store") == 2
    assert reason in capsys.readouterr().err
    assert versions(tmp_path / "store", "tiny") == []


def test_an_encoder_of_our_own_without_logits_for_its_names_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = save_family(next(family for family in FAMILIES if family.kind == "valence"), tmp_path)
    three_names(saved.folder)
    assert export(saved.folder, tmp_path / "store") == 2
    assert "3 labels, but the model gives 2 logits" in capsys.readouterr().err
    assert versions(tmp_path / "store", "tiny") == []


def test_a_run_with_other_words_is_refused_by_the_accuracy_that_it_had(
    finished_run: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished_run.folder, tmp_path / "run")
    dev = write_rows(tmp_path / "data" / "dev.tsv", DEV_ROWS)
    assert export(run, tmp_path / "store", "--data", str(dev)) == 0
    shutil.rmtree(tmp_path / "store")
    change_words(run / "model", shuffled)
    assert export(run, tmp_path / "store", "--data", str(dev)) == 2
    reason = capsys.readouterr().err
    assert "the accuracy on data/dev is" in reason
    assert "not those of the run" in reason
    assert versions(tmp_path / "store", "tiny") == []


EngineName = Literal["onnx", "torchscript"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version of a real encoder, in both float formats."""
    folder = tmp_path_factory.mktemp("store")
    assert export(traced("bert").folder, folder, "--formats", "onnx,torchscript") == 0
    return folder


@pytest.mark.parametrize("engine", ["onnx", "torchscript"])
def test_a_version_whose_tokenizer_was_exchanged_is_refused_at_load(
    store: Path, tmp_path: Path, engine: EngineName
) -> None:
    mine = shutil.copytree(store, tmp_path / "store")
    settings = Settings(model_store=mine, model="tiny", engine=engine, device="cpu", lanes=1)
    load(settings, open_engine, go_on=lambda: True).engine.close()
    folder = mine / "tiny" / "1"
    change_words(folder, shuffled)
    content = (folder / "tokenizer.json").read_bytes()
    record = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    change_json(folder / "manifest.json", lambda manifest: manifest["tokenizer"].update(record))
    with pytest.raises(StartupError, match=r"golden text \d: a logit is off by .*the tokenizer, the model"):
        load(settings, open_engine, go_on=lambda: True)


@pytest.mark.parametrize("engine", ["onnx", "torchscript"])
def test_a_version_with_names_for_other_logits_is_refused_at_load(
    store: Path, tmp_path: Path, engine: EngineName
) -> None:
    """The manifest agrees with itself: its golden texts have a logit for each of its names."""
    mine = shutil.copytree(store, tmp_path / "store")

    def add_name(manifest: dict[str, Any]) -> None:
        manifest["labels"].append("so-so")
        for golden in manifest["golden_texts"]:
            for logits in golden["logits"].values():
                logits.append(0.0)

    change_json(mine / "tiny" / "1" / "manifest.json", add_name)
    assert open_version(mine, "tiny").manifest.labels[2] == "so-so"
    settings = Settings(model_store=mine, model="tiny", engine=engine, device="cpu", lanes=1)
    with pytest.raises(StartupError, match="for 3 labels"):
        load(settings, open_engine, go_on=lambda: True)
