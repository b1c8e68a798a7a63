"""What a recipe may hold: which files are drawn from, how much, for what, and how their texts are cut.

A recipe is TOML; see `training/recipes`. Knows nothing of the content of the files.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.config import ConfigError

ROLES = ("train", "dev", "unlabelled")
_KINDS: dict[str, type] = {
    "file": str,
    "role": str,
    "split": str,
    "only_label": int,
    "exclude": str,
    "rows": int,
    "least_words": int,
    "crop_words": list,
    "turn": int,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is taken from one file.

    Attributes:
        file: below the folder of the data sets.
        role: "train", "dev", or "unlabelled" (a teacher labels it).
        split: only rows whose column `split` says so.
        only_label: only rows with this label.
        exclude: a file whose column `id` names the rows to leave out.
        rows: how many to draw, and no fewer; None takes all.
        least_words: shorter texts are left out.
        crop_words: shortest and longest piece that is cut of a text, in words; the length is log-uniform
            between them, the place uniform. A text that is no longer stays whole.
        turn: added to the seed, so that a second part of the same file draws and crops otherwise.
    """

    file: str
    role: str = "train"
    split: str | None = None
    only_label: int | None = None
    exclude: str | None = None
    rows: int | None = None
    least_words: int = 1
    crop_words: tuple[int, int] | None = None
    turn: int = 0

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"{self.file}: role {self.role!r} is not {', '.join(ROLES)}")
        if self.rows is not None and self.rows < 1:
            raise ConfigError(f"{self.file}: rows: {self.rows} is less than 1")
        if self.crop_words is not None and not 1 <= self.crop_words[0] <= self.crop_words[1]:
            raise ConfigError(f"{self.file}: crop_words: {list(self.crop_words)} is not shortest and longest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The parts of a mix, in order.

    Attributes:
        keep_out: files that are reported on; a text that stands in one of them, normalised, is never drawn,
            but for dev.
    """

    seed: int
    keep_out: tuple[str, ...]
    parts: tuple[Part, ...]


def read_recipe(path: Path) -> Recipe:
    """Raises ConfigError with the file and what does not fit."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        return _recipe(values)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _recipe(values: dict[str, Any]) -> Recipe:
    if unknown := sorted(set(values) - {"seed", "keep_out", "part"}):
        raise ConfigError(f"unknown: {', '.join(unknown)}")
    if type(values.get("seed")) is not int:
        raise ConfigError("seed: a whole number is needed")
    keep_out, parts = values.get("keep_out", []), values.get("part")
    if not isinstance(keep_out, list) or not all(isinstance(name, str) for name in keep_out):
        raise ConfigError("keep_out: not a list of files")
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        raise ConfigError("there is no [[part]]")
    return Recipe(
        seed=values["seed"],
        keep_out=tuple(keep_out),
        parts=tuple(_part(entry, number) for number, entry in enumerate(parts, 1)),
    )


def _part(entry: dict[str, Any], number: int) -> Part:
    if unknown := sorted(set(entry) - set(_KINDS)):
        raise ConfigError(f"part {number}: unknown: {', '.join(unknown)}")
    for name, value in entry.items():
        if type(value) is not _KINDS[name]:
            raise ConfigError(f"part {number}: {name}: not of the type {_KINDS[name].__name__}")
    if "file" not in entry:
        raise ConfigError(f"part {number}: file is missing")
    crop = entry.get("crop_words")
    if crop is None:
        return Part(**entry)
    if len(crop) != 2 or not all(type(length) is int for length in crop):
        raise ConfigError(f"part {number}: crop_words: {crop} is not shortest and longest")
    return Part(**{**entry, "crop_words": (crop[0], crop[1])})
