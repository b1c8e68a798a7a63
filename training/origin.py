"""Reads the folder that a version is made from, and refuses a model and a tokenizer that do not fit together.

Knows nothing of graphs, precision, bounds or the model store.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from service.store import Metric, Source
from training.config import ConfigError
from training.graph import load_eager
from training.pretrained import OFFSET_POSITIONS, label_names, load_tokenizer, usable_tokens
from training.sources import NONE_STATED, training_sources

_UNNAMED = re.compile(r"LABEL_[0-9]+")
LEAST_TOKENS = 3
LONGEST_NAME = 200
# A table of words is often a little larger than the vocabulary, for the sake of a round number. Cased BERT
# has 95 % of the words of uncased BERT, and the same ids for padding and control tokens.
LEAST_SHARE = 0.98
# A run was measured on texts cut to its own length, perhaps in bfloat16.
LARGEST_DRIFT = 0.05
# A tokenizer without a limit of its own says 1e30.
_NO_LIMIT = 1_000_000


@dataclass(frozen=True, slots=True)
class Origin:
    """A fine-tuned classifier and all that its version must say of it.

    Attributes:
        model: eager, in float32, not rounded yet.
        tokenizer_json: without padding and truncation.
        special: ids that the tokenizer puts round an empty text.
        words: ids that are no special tokens, those of real text.
        max_tokens: the longest text, special tokens included.
        dev: for a run, what its metrics say.
    """

    model: PreTrainedModel
    labels: tuple[str, ...]
    activation: Literal["softmax", "sigmoid"]
    tokenizer_json: bytes
    special: tuple[int, ...]
    words: tuple[int, ...]
    pad_id: int
    max_tokens: int
    base_model: Source
    training_data: tuple[Source, ...]
    dev: "DevScore | None" = None


@dataclass(frozen=True, slots=True)
class DevScore:
    """What a run says of itself: its accuracy over the rows of its dev sets, by name of the set."""

    rows: Mapping[str, int]
    accuracy: float

    def check(self, metrics: Sequence[Metric]) -> None:
        """Holds each form to this accuracy, if it was measured on all of the dev sets.

        A tokenizer of the same size with other words is seen by this alone. Raises ConfigError.
        """
        forms: dict[str, dict[tuple[str, int], float]] = {}
        for metric in metrics:
            if metric.name == "accuracy":
                key = f"{metric.format}/{metric.precision}"
                forms.setdefault(key, {})[metric.dataset, metric.examples] = metric.value
        for key, measured in forms.items():
            if self.rows.items() <= measured.keys():
                hits = sum(measured[name, count] * count for name, count in self.rows.items())
                self._compare(key, hits / sum(self.rows.values()))

    def _compare(self, key: str, accuracy: float) -> None:
        if accuracy < self.accuracy - LARGEST_DRIFT:
            raise ConfigError(
                f"{key}: the accuracy on {', '.join(self.rows)} is {accuracy:.4f}, and the run had "
                f"{self.accuracy:.4f}: the tokenizer or the weights are not those of the run"
            )


def open_origin(
    folder: Path,
    *,
    labels: Sequence[str] = (),
    max_tokens: int | None = None,
    base_model: Source | None = None,
    training_data: Sequence[Source] = (),
) -> Origin:
    """Opens a run (its `model/`) or a folder of `save_pretrained`.

    `labels`, `base_model` and `training_data` stand above what the folder says. Raises ConfigError.
    """
    saved = folder / "model" if (folder / "model").is_dir() else folder
    if not (saved / "config.json").is_file():
        raise ConfigError(f"{folder}: neither a finished run nor the folder of a transformers model")
    model = load_eager(saved)
    tokenizer = load_tokenizer(str(saved))
    run = _run_of(folder)
    special, words = _check_tokenizer(folder, tokenizer, model)
    names = _labels(folder, model, labels)
    if model.config.problem_type == "regression":
        raise ConfigError(f"{folder}: its output is a quantity (regression), not the probability of a label")
    sigmoid = len(names) == 1 or model.config.problem_type == "multi_label_classification"
    return Origin(
        model=model,
        labels=names,
        activation="sigmoid" if sigmoid else "softmax",
        tokenizer_json=tokenizer.backend_tokenizer.to_str().encode(),
        special=special,
        words=words,
        pad_id=int(tokenizer.pad_token_id),
        max_tokens=_max_tokens(tokenizer, model, max_tokens),
        base_model=base_model or _base_of(folder, run),
        training_data=training_sources(run, training_data),
        dev=_dev_of(run),
    )


def _labels(folder: Path, model: PreTrainedModel, given: Sequence[str]) -> tuple[str, ...]:
    """The names in index order, as many as there are logits, all of them real names."""
    width = _width(model)
    names = tuple(given) or label_names(model.config)
    if len(names) != width:
        raise ConfigError(f"{folder}: {len(names)} labels, but the model gives {width} logits")
    numbers = set(map(int, model.config.id2label or {}))
    if keys := sorted(numbers ^ set(range(len(numbers)))):
        raise ConfigError(f"{folder}: id2label does not count from 0 without a gap, see {keys[0]}")
    if odd := [name for name in names if not _is_name(name)]:
        raise ConfigError(
            f"{folder}: label {names.index(odd[0])} is no name of 1 to {LONGEST_NAME} printable characters"
        )
    if len(set(names)) < len(names):
        raise ConfigError(f"{folder}: two labels have the same name")
    if unnamed := [name for name in names if _UNNAMED.fullmatch(name)]:
        raise ConfigError(f"{folder}: {unnamed[0]} is a number, not a name; give the names with --labels")
    return names


def _is_name(name: str) -> bool:
    return bool(name.strip()) and len(name) <= LONGEST_NAME and name.isprintable()


def _width(model: PreTrainedModel) -> int:
    with torch.inference_mode():
        logits = model(
            input_ids=torch.tensor([[5, 6, 7]]), attention_mask=torch.ones(1, 3, dtype=torch.int64)
        ).logits
    return int(logits.shape[1])


def _check_tokenizer(
    folder: Path, tokenizer: Any, model: PreTrainedModel
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids round an empty text and the ids of words. Raises ConfigError for another model's tokenizer.

    Sizes and control tokens are compared. A tokenizer of about the same size with other words, or with the
    same words and another rule for capitals, cannot be told from the right one here: a model does not say
    what its rows stand for. What is seen later is whether it knows the words of the golden texts at all, and
    whether a run still has its accuracy. Of a model from elsewhere no more can be known.
    """
    rows: int = model.config.vocab_size
    ids = set(tokenizer.get_vocab().values())
    if max(ids) >= rows:
        raise ConfigError(f"{folder}: the tokenizer has ids up to {max(ids)}, the model knows {rows} tokens")
    if tokenizer.pad_token_id is None or tokenizer.unk_token_id is None:
        raise ConfigError(f"{folder}: the tokenizer lacks a padding or an unknown token")
    expected = model.config.pad_token_id
    if expected is None and model.config.model_type in OFFSET_POSITIONS:
        raise ConfigError(
            f"{folder}: the configuration has no pad_token_id, from which positions are counted"
        )
    if expected is not None and expected != tokenizer.pad_token_id:
        raise ConfigError(
            f"{folder}: the tokenizer pads with {tokenizer.pad_token_id}, the model with {expected}"
        )
    for name in ("bos", "eos", "cls", "sep"):
        known, own = (getattr(one, f"{name}_token_id", None) for one in (model.config, tokenizer))
        if known is not None and own is not None and known != own:
            raise ConfigError(f"{folder}: {name} is token {own} of the tokenizer, the model has {known}")
    if len(ids) < LEAST_SHARE * rows:
        raise ConfigError(f"{folder}: the tokenizer has {len(ids)} tokens, the model knows {rows}")
    special = tuple(tokenizer.backend_tokenizer.encode("").ids)
    if len(special) < 2 or not set(special) <= set(tokenizer.all_special_ids):
        raise ConfigError(f"{folder}: the tokenizer puts no special tokens round a text")
    return special, tuple(sorted(ids - set(tokenizer.all_special_ids)))


def _max_tokens(tokenizer: Any, model: PreTrainedModel, asked: int | None) -> int:
    """The least of what the positions, the tokenizer and the caller allow."""
    limits = [usable_tokens(model.config), tokenizer.model_max_length, asked]
    real = [int(limit) for limit in limits if limit is not None and limit < _NO_LIMIT]
    if not real:
        raise ConfigError("neither the model nor its tokenizer has a limit: give one with --max-tokens")
    if min(real) < LEAST_TOKENS:
        raise ConfigError(f"a longest text of {min(real)} tokens leaves no room between the special tokens")
    return min(real)


def _run_of(folder: Path) -> dict[str, Any]:
    path = folder / "metrics.json"
    if not path.is_file():
        return {}
    try:
        run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    return run


def _dev_of(run: dict[str, Any]) -> DevScore | None:
    rows = {
        str(file["name"]).removesuffix(".gz").removesuffix(".tsv"): int(file["rows"]["dev"])
        for file in run.get("files", [])
        if file["rows"].get("dev")
    }
    return DevScore(rows, float(run["dev"]["accuracy"])) if rows and "dev" in run else None


def _base_of(folder: Path, run: dict[str, Any]) -> Source:
    """A hub name can be told; a folder of the training machine says nothing to anybody else."""
    base = str(run.get("config", {}).get("base", ""))
    if run.get("config", {}).get("new") is not None:
        return Source("none, random weights", NONE_STATED)
    if not base or base.startswith(("/", ".", "~")):
        raise ConfigError(f"{folder}: the base model has no public name; give --base-model NAME=LICENCE")
    return Source(base, NONE_STATED)
