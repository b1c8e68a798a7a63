"""The store finds, verifies, lists and writes versions, and refuses whatever is damaged or unknown."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.errors import StartupError
from service.store import FileRecord, Manifest, ModelFile, list_models, open_version, versions, write_version
from tests.models import make_version


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_opens_what_was_written(tmp_path: Path) -> None:
    folder = make_version(tmp_path, labels=("bad", "so-so", "good"), precisions=("float32", "int8"))
    version = open_version(tmp_path, "sentiment")
    assert version.path == folder == tmp_path / "sentiment" / "1"
    assert version.manifest.labels == ["bad", "so-so", "good"]
    assert [model.precision for model in version.manifest.models] == ["float32", "int8"]
    for record in version.manifest.models:
        assert version.read(record) == (folder / record.path).read_bytes()
    assert (folder / "README.md").read_text().startswith("# ")


def test_r37_ten_is_newer_than_nine(tmp_path: Path) -> None:
    for number in (9, 10, 2):
        make_version(tmp_path, version=number)
    assert versions(tmp_path, "sentiment") == [2, 9, 10]
    assert open_version(tmp_path, "sentiment").manifest.version == 10


def test_a_pinned_version_is_opened(tmp_path: Path) -> None:
    for number in (1, 2):
        make_version(tmp_path, version=number)
    assert open_version(tmp_path, "sentiment", 1).manifest.version == 1


def test_only_numbers_are_versions(tmp_path: Path) -> None:
    make_version(tmp_path, version=3)
    parent = tmp_path / "sentiment"
    for name in ("latest", "04", "0", "-5", "6.5", ".7-abc.tmp", "٨", "9 "):
        (parent / name).mkdir()
    (parent / "11").write_text("a file")
    assert versions(tmp_path, "sentiment") == [3]


def endless(path: Path) -> None:
    """The system will say nothing of this path, as of one in a folder that may not be looked into."""
    if path.is_file():
        path.unlink()
    path.symlink_to("x" * 300)


@pytest.mark.parametrize("place", [".", "sentiment", "sentiment/2", "sentiment/1/manifest.json"])
def test_what_the_system_has_against_a_path_is_the_reason(tmp_path: Path, place: str) -> None:
    store = tmp_path / "store"
    if place == "sentiment":
        store.mkdir()
    elif place != ".":
        make_version(store)
    endless(store if place == "." else store / place)
    with pytest.raises(StartupError, match=rf"{store}.*: File name too long"):
        open_version(store, "sentiment")


def test_what_cannot_be_looked_at_does_not_hide_the_rest_of_a_list(tmp_path: Path) -> None:
    make_version(tmp_path)
    endless(make_version(tmp_path, version=2) / "manifest.json")
    endless(make_version(tmp_path, "other").parent / "2")
    assert [(one.name, one.version, one.problem is None) for one in list_models(tmp_path)] == [
        ("sentiment", 1, True),
        ("sentiment", 2, False),
    ]
    assert not list_models(tmp_path / ("x" * 300))


def test_a_version_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    for number in (1, 10):
        make_version(tmp_path, version=number)
    with pytest.raises(StartupError, match=r"version 7 is not there; there are 1, 10"):
        open_version(tmp_path, "sentiment", 7)


@pytest.mark.parametrize("name", ["absent", "../sentiment", "..", "", "a/b", "/etc", "a\0b"])
def test_a_name_without_a_model_is_refused(tmp_path: Path, name: str) -> None:
    make_version(tmp_path)
    with pytest.raises(StartupError):
        open_version(tmp_path, name)
    assert versions(tmp_path, name) == []


@pytest.mark.parametrize("file", ["model.onnx", "tokenizer.json", "manifest.json"])
def test_r56_a_missing_file_is_refused(tmp_path: Path, file: str) -> None:
    folder = make_version(tmp_path)
    (folder / file).unlink()
    with pytest.raises(StartupError, match=rf"{re.escape(file)}: missing"):
        open_version(tmp_path, "sentiment")


@pytest.mark.parametrize("file", ["model.onnx", "tokenizer.json"])
def test_r56_a_truncated_file_is_refused(tmp_path: Path, file: str) -> None:
    path = make_version(tmp_path) / file
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(StartupError, match=rf"{re.escape(file)}: {len(whole) - 1} bytes.*says {len(whole)}"):
        open_version(tmp_path, "sentiment")


@pytest.mark.parametrize("file", ["model.onnx", "tokenizer.json"])
def test_a_file_with_other_content_of_the_same_size_is_refused(tmp_path: Path, file: str) -> None:
    path = make_version(tmp_path) / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(StartupError, match=rf"{re.escape(file)}: its SHA-256 is"):
        open_version(tmp_path, "sentiment")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"schema_version": 1'])
def test_a_manifest_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (make_version(tmp_path) / "manifest.json").write_bytes(content)
    with pytest.raises(StartupError, match=r"manifest\.json: not a JSON object"):
        open_version(tmp_path, "sentiment")


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "unknown schema": (lambda m: m.update(schema_version=2), "schema version 2 is not known"),
    "no schema": (lambda m: m.pop("schema_version"), "schema version None is not known"),
    "unknown field": (lambda m: m.update(colour="red"), "colour: "),
    "unknown inner field": (lambda m: m["models"][0].update(engine="x"), "models.0.engine: "),
    "missing field": (lambda m: m.pop("labels"), "labels: "),
    "wrong type": (lambda m: m.update(max_tokens="64"), "max_tokens: "),
    "unknown format": (lambda m: m["models"][0].update(format="pickle"), "models.0.format: "),
    "unknown activation": (lambda m: m.update(activation="relu"), "activation: "),
    "left padding": (lambda m: m.update(padding_side="left"), "padding_side: "),
    "another name": (lambda m: m.update(name="other"), "manifest of other 1, not of its folder"),
    "another version": (lambda m: m.update(version=2), "manifest of sentiment 2, not of its folder"),
    "no labels": (lambda m: m.update(labels=[]), "there is no label"),
    "blank label": (lambda m: m.update(labels=["a", " "]), "a label has no name"),
    "equal labels": (lambda m: m.update(labels=["a", "a"]), "the same name"),
    "unnamed labels": (lambda m: m.update(labels=["LABEL_0", "LABEL_1"]), "numbers, not names"),
    "one label too many": (lambda m: m.update(labels=["a", "b", "c"]), "are not 3 finite numbers"),
    "softmax of one": (lambda m: m.update(labels=["a"]), "use sigmoid"),
    "no room": (lambda m: m.update(max_tokens=2), "max_tokens"),
    "negative padding": (lambda m: m.update(pad_id=-1), "pad_id"),
    "temperature 0": (lambda m: m.update(temperature=0.0), "temperature"),
    "temperature NaN": (lambda m: m.update(temperature=float("nan")), "temperature"),
    "no models": (lambda m: m.update(models=[]), "there is no model file"),
    "the same form twice": (
        lambda m: m["models"].append({**m["models"][0], "path": "b.onnx"}),
        "two model files",
    ),
    "the same path twice": (
        lambda m: m["models"].append({**m["models"][0], "precision": "int8"}),
        "two files have the same path",
    ),
    "no bound": (lambda m: m["models"][0].update(logit_bound=0.0), "logit_bound"),
    "endless bound": (lambda m: m["models"][0].update(logit_bound=float("inf")), "logit_bound"),
    "no golden text": (lambda m: m.update(golden_texts=[]), "there is no golden text"),
    "golden text without logits": (lambda m: m["golden_texts"][0].update(logits={}), "lacks the logits"),
    "golden logits NaN": (
        lambda m: m["golden_texts"][0]["logits"].update({"onnx/float32": [0.0, float("nan")]}),
        "are not 2 finite numbers",
    ),
}


@pytest.mark.parametrize("case", EDITS)
def test_a_manifest_that_makes_no_sense_is_refused(tmp_path: Path, case: str) -> None:
    edit, reason = EDITS[case]
    folder = make_version(tmp_path)
    edit_manifest(folder, edit)
    with pytest.raises(StartupError, match=re.escape(reason)) as caught:
        open_version(tmp_path, "sentiment")
    assert str(folder / "manifest.json") in str(caught.value)


@pytest.mark.parametrize(
    "path",
    [
        "../model.onnx",
        "/etc/passwd",
        "a/../../model.onnx",
        "sub/model.onnx",
        "..",
        ".",
        "",
        "a\\b",
        "manifest.json",
    ],
)
@pytest.mark.parametrize("field", ["tokenizer", "models"])
def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path, path: str, field: str) -> None:
    folder = make_version(tmp_path)
    edit_manifest(
        folder, lambda m: (m["tokenizer"] if field == "tokenizer" else m["models"][0]).update(path=path)
    )
    with pytest.raises(StartupError, match="is not the name of a file in the folder"):
        open_version(tmp_path, "sentiment")


@pytest.mark.parametrize("file", ["model.onnx", "tokenizer.json", "manifest.json"])
def test_a_symbolic_link_out_of_the_folder_is_refused(tmp_path: Path, file: str) -> None:
    path = make_version(tmp_path) / file
    outside = tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(StartupError, match="leads out of the folder"):
        open_version(tmp_path, "sentiment")


def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    path = make_version(tmp_path) / "model.onnx"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(StartupError, match="not a regular file"):
        open_version(tmp_path, "sentiment")


@pytest.mark.parametrize("change", ["gone", "other"])
def test_a_file_that_changes_after_opening_is_not_handed_out(tmp_path: Path, change: str) -> None:
    folder = make_version(tmp_path)
    version = open_version(tmp_path, "sentiment")
    path = folder / "model.onnx"
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes(len(path.read_bytes())))
    with pytest.raises(StartupError, match=r"model\.onnx"):
        version.read(version.manifest.models[0])


def test_the_list_shows_every_version_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    make_version(tmp_path, version=10)
    make_version(tmp_path, version=9)
    make_version(tmp_path, name="other")
    (tmp_path / "sentiment" / "9" / "manifest.json").write_text("{}")
    (tmp_path / "a file").write_text("")
    listings = list_models(tmp_path)
    assert [(one.name, one.version) for one in listings] == [
        ("other", 1),
        ("sentiment", 9),
        ("sentiment", 10),
    ]
    assert [one.manifest is not None for one in listings] == [True, False, True]
    assert listings[1].problem is not None
    assert "schema version" in listings[1].problem
    assert list_models(tmp_path / "absent") == []


def manifest_and_files(store: Path) -> tuple[Manifest, dict[str, bytes | Path]]:
    version = open_version(store, "sentiment")
    files: dict[str, bytes | Path] = {
        name: (version.path / name).read_bytes() for name in ("model.onnx", "tokenizer.json", "README.md")
    }
    return version.manifest, files


def test_a_version_is_never_written_over(tmp_path: Path) -> None:
    folder = make_version(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(FileExistsError, match="never changed"):
        make_version(tmp_path, labels=("a", "b"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_sizes_and_hashes_are_computed_when_writing(tmp_path: Path) -> None:
    make_version(tmp_path)
    manifest, files = manifest_and_files(tmp_path)
    source = tmp_path / "elsewhere.onnx"
    source.write_bytes(files["model.onnx"] if isinstance(files["model.onnx"], bytes) else b"")
    draft = replace(
        manifest,
        version=2,
        tokenizer=FileRecord("tokenizer.json", 5, "made up"),
        models=[ModelFile("model.onnx", "onnx", "float32", 6, "made up", 1e-3)],
    )
    write_version(tmp_path, draft, {**files, "model.onnx": source})
    written = open_version(tmp_path, "sentiment", 2).manifest
    assert written == replace(manifest, version=2)


@pytest.mark.parametrize("case", ["a file is missing", "a file is not named", "no model card", "senseless"])
def test_what_does_not_fit_together_is_not_written(tmp_path: Path, case: str) -> None:
    make_version(tmp_path)
    manifest, files = manifest_and_files(tmp_path)
    draft = replace(manifest, version=2)
    if case == "a file is missing":
        del files["model.onnx"]
    elif case == "a file is not named":
        files["notes.txt"] = b""
    elif case == "no model card":
        del files["README.md"]
    else:
        draft = replace(draft, labels=["a", "a"])
    with pytest.raises(StartupError):
        write_version(tmp_path, draft, files)
    assert [entry.name for entry in (tmp_path / "sentiment").iterdir()] == ["1"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    make_version(tmp_path)
    manifest, files = manifest_and_files(tmp_path)
    files["model.onnx"] = tmp_path / "not there"
    with pytest.raises(FileNotFoundError):
        write_version(tmp_path, replace(manifest, version=2), files)
    assert [entry.name for entry in (tmp_path / "sentiment").iterdir()] == ["1"]


def test_of_two_writers_the_slower_is_told_that_the_version_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one comes between the look and the last step."""
    renamed = Path.rename

    def rename(self: Path, target: Path) -> Path:
        monkeypatch.undo()
        make_version(tmp_path)
        return renamed(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(FileExistsError, match="never changed"):
        make_version(tmp_path)
    assert [path.name for path in (tmp_path / "sentiment").iterdir()] == ["1"]
