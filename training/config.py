"""The choices of one fine-tuning run, checked once, and how they are kept in the run folder.

Knows nothing of torch, of the content of data or of how a model is trained.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

DEFAULT_LABELS = ("negative", "positive")
MIN_LEARNING_RATE = 1e-6
MAX_LEARNING_RATE = 1e-3
LEAST = {"epochs": 1, "batch_items": 1, "max_tokens": 3, "seed": 0, "save_steps": 1}
ENCODERS = ("library", "own")
POSITIONS = ("learned", "sinusoidal")


class ConfigError(ValueError):
    """A choice that makes no sense, or that is not the one the run was started with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEncoder:
    """The size of a pre-norm encoder that begins with random weights.

    Attributes:
        positions: "learned" or "sinusoidal", for as many tokens as a training text may have.

    Raises:
        ConfigError: with the name of the field.
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    positions: str = "learned"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads"):
            _require(getattr(self, name) >= 1, f"{name}: {getattr(self, name)} is less than 1")
        _require(
            self.width % (2 * self.heads) == 0, f"width: {self.width} is no even share for {self.heads} heads"
        )
        _require(self.positions in POSITIONS, f"positions: {self.positions} is not {' or '.join(POSITIONS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """Everything that decides the result of a run, but for the data's content and the machine.

    Attributes:
        base: a folder of a transformers model, or a hub name.
        data: files and folders; see `training.data` for what each row is for.
        dev: files that choose the best epoch, instead of those found in `data`.
        labels: names in index order.
        learning_rate: the peak, reached after `warmup`, from which it falls linearly to 0.
        warmup: the share of all steps in which the learning rate rises.
        max_tokens: where a training text is cut, special tokens included.
        save_steps: steps between checkpoints; there is also one after each epoch.
        encoder: whose code computes the model, that of the "library" or the project's "own".
        new: an encoder of that size with random weights, and only the tokenizer of `base`; None to fine-tune
            the weights of `base`.
        freeze_layers: the embeddings and as many layers from below keep their weights; None: all learn.
        attention_dropout: instead of what `base` says. On a CPU 0 is 1.4 times as fast with 128 tokens, and
            more with longer texts, since the fused attention knows no dropout.
        teacher: a file that `valence-train logits` wrote of the one folder that `data` names; the texts of
            its `unlabelled.tsv` train, too. None: the labels alone teach.
        soft_weight: the share of the teacher in the loss, above 0 to 1; see `training.distil`.
        soft_temperature: divides the logits of both before they are compared.

    Raises:
        ConfigError: with the name of the field and what it may be.
    """

    base: str
    data: tuple[str, ...]
    dev: tuple[str, ...] = ()
    labels: tuple[str, ...] = DEFAULT_LABELS
    learning_rate: float = 5e-5
    weight_decay: float = 0.01
    warmup: float = 0.06
    epochs: int = 3
    batch_items: int = 32
    max_tokens: int = 128
    seed: int = 42
    save_steps: int = 1000
    encoder: str = "library"
    new: NewEncoder | None = None
    freeze_layers: int | None = None
    attention_dropout: float | None = None
    teacher: str | None = None
    soft_weight: float | None = None
    soft_temperature: float | None = None

    def __post_init__(self) -> None:
        _require(bool(self.base.strip()), "base: no model is named")
        _require(self.encoder in ENCODERS, f"encoder: {self.encoder} is not {' or '.join(ENCODERS)}")
        _require(self.new is None or self.encoder == "own", "new: --from-scratch needs --encoder own")
        _require(bool(self.data), "data: no file or folder is named")
        _require(
            MIN_LEARNING_RATE <= self.learning_rate <= MAX_LEARNING_RATE,
            f"learning_rate: {self.learning_rate:g} is outside {MIN_LEARNING_RATE:g} to"
            f" {MAX_LEARNING_RATE:g}; 2e-5 to 5e-5 is usual",
        )
        _require(0 <= self.weight_decay < 1, f"weight_decay: {self.weight_decay:g} is outside 0 to 1")
        _require(0 <= self.warmup < 1, f"warmup: {self.warmup:g} is outside 0 to 1")
        frozen, dropout = self.freeze_layers, self.attention_dropout
        plain = self.encoder == "library" and self.new is None
        _require(frozen is None or (plain and frozen >= 0), "freeze_layers: 0 or more, of a library encoder")
        _require(
            dropout is None or (plain and 0 <= dropout < 1),
            "attention_dropout: 0 to 1, of a library encoder",
        )
        self._check_teacher()
        for name, least in LEAST.items():
            value = getattr(self, name)
            _require(value >= least, f"{name}: {value} is less than {least}")
        _require(len(self.labels) >= 2, "labels: at least two are needed")
        tidy = all(name and name == name.strip() for name in self.labels)
        _require(tidy, "labels: a name is blank or padded")
        _require(len(set(self.labels)) == len(self.labels), "labels: a name stands twice")

    def _check_teacher(self) -> None:
        weight, temperature = self.soft_weight, self.soft_temperature
        if self.teacher is None:
            _require(weight is None, "soft_weight: there is no teacher")
            _require(temperature is None, "soft_temperature: there is no teacher")
            return
        _require(len(self.data) == 1, "teacher: it has read one folder, and data names several")
        _require(weight is not None and 0 < weight <= 1, f"soft_weight: {weight} is outside 0 to 1")
        _require(
            temperature is not None and 0.1 <= temperature <= 100,
            f"soft_temperature: {temperature} is outside 0.1 to 100",
        )

    def as_dict(self) -> dict[str, Any]:
        """The choices as JSON types, in the order of the fields."""
        values = asdict(self).items()
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values}


def read_config(run: Path) -> FitConfig:
    """The choices kept in a run folder. Raises ConfigError when there are none."""
    path = run / "config.json"
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not the configuration of a run: {error}") from error
    # A run of an earlier release does not say what was not to be chosen then.
    since = {"encoder", "new", "freeze_layers", "attention_dropout"}
    since |= {"teacher", "soft_weight", "soft_temperature"}
    names = {entry.name for entry in fields(FitConfig)}
    if not isinstance(kept, dict) or not names - since <= set(kept):
        raise ConfigError(f"{path}: not the configuration of a run")
    chosen: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in kept.items()
        if name in names
    }
    if chosen.get("new") is not None:
        chosen["new"] = NewEncoder(**chosen["new"])
    return FitConfig(**chosen)


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for each key whose value differs, `name: was X, now Y`, in the order of the keys."""
    names = dict.fromkeys([*then, *now])
    return [
        f"{name}: was {then.get(name)}, now {now.get(name)}"
        for name in names
        if then.get(name) != now.get(name)
    ]


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that a reader never sees half of it."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
