"""The choices of a run: what makes no sense is refused by name, and what was kept can be read back."""

import json
from pathlib import Path
from typing import Any

import pytest

from training.config import ConfigError, FitConfig, differences, read_config, write_json

CONFIG = FitConfig(base="bert", data=("train.tsv",))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base", " "),
        ("data", ()),
        ("learning_rate", 0.0),
        ("learning_rate", 5.0),
        ("learning_rate", -2e-5),
        ("learning_rate", float("nan")),
        ("weight_decay", -0.1),
        ("weight_decay", 1.0),
        ("warmup", 1.0),
        ("epochs", 0),
        ("batch_items", 0),
        ("max_tokens", 2),
        ("seed", -1),
        ("save_steps", 0),
        ("labels", ("only",)),
        ("labels", ("a", "a")),
        ("labels", ("a", "")),
        ("labels", ("a", " b")),
    ],
)
def test_nonsense_is_refused_by_the_name_of_the_field(field: str, value: object) -> None:
    choices: dict[str, Any] = {"base": "bert", "data": ("train.tsv",), field: value}
    with pytest.raises(ConfigError, match=f"^{field}: "):
        FitConfig(**choices)


def test_the_default_learning_rate_is_a_usual_one() -> None:
    assert 2e-5 <= CONFIG.learning_rate <= 5e-5
    assert CONFIG.weight_decay == 0.01
    assert CONFIG.labels == ("negative", "positive")


def test_a_kept_configuration_is_read_back_the_same(tmp_path: Path) -> None:
    config = FitConfig(base="bert", data=("a.tsv", "b.tsv"), dev=("c.tsv",), labels=("x", "y", "z"), seed=7)
    write_json(tmp_path / "config.json", {**config.as_dict(), "files": []})
    assert read_config(tmp_path) == config


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"base": "bert"}'])
def test_a_folder_without_a_configuration_is_refused_with_its_path(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=str(tmp_path / "config.json")):
        read_config(tmp_path)


def test_differences_name_each_field_that_changed_and_no_other() -> None:
    then = {"epochs": 3, "seed": 1, "gone": True}
    assert differences(then, {"epochs": 2, "seed": 1, "new": 5}) == [
        "epochs: was 3, now 2",
        "gone: was True, now None",
        "new: was None, now 5",
    ]
    assert differences(then, dict(then)) == []


def test_json_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_a_run_of_an_earlier_release_reads_back_without_what_was_not_to_be_chosen_then(
    tmp_path: Path,
) -> None:
    newer = {"encoder", "new", "freeze_layers", "attention_dropout"}
    newer |= {"teacher", "soft_weight", "soft_temperature"}
    kept = {name: value for name, value in CONFIG.as_dict().items() if name not in newer}
    write_json(tmp_path / "config.json", {**kept, "files": []})
    assert read_config(tmp_path) == CONFIG


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"soft_weight": 0.5}, "soft_weight: there is no teacher"),
        ({"soft_temperature": 2.0}, "soft_temperature: there is no teacher"),
        ({"teacher": "t.npz"}, "soft_weight: None is outside"),
        ({"teacher": "t.npz", "soft_weight": 0.5}, "soft_temperature: None is outside"),
        ({"teacher": "t.npz", "soft_weight": 0.5, "soft_temperature": float("nan")}, "soft_temperature: nan"),
    ],
)
def test_a_teacher_comes_with_its_weight_and_temperature(choices: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^{reason}"):
        FitConfig(base="bert", data=("mix",), **choices)
