"""What a teacher said of the texts of a folder: the file that keeps it, and what it says of each text.

Knows nothing of models, of how the teacher was asked or of how a student learns from it.

The file is a compressed .npz: for `train.tsv` and `unlabelled.tsv`, those that the folder has, an array
float16[rows, labels] of logits in the order of the rows, and `about`, a JSON text. In `about` stand the names
of the labels, the SHA-256 of the files of texts, and what read them.
"""

import hashlib
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from training.config import ConfigError
from training.data import UNLABELLED_FILE, DataError, texts_of

TEXT_FILES = ("train.tsv", UNLABELLED_FILE)

HalfArray: TypeAlias = NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class TeacherLogits:
    """The content of the file.

    Attributes:
        about: JSON types; `labels`, `sha256` by name of the file, `model`, `base` and how it was read.
        rows: by name of the file, float16[rows, labels]; a row of NaN was not read yet.
    """

    about: dict[str, Any]
    rows: dict[str, HalfArray]

    def by_text(self, folder: Path) -> dict[str, HalfArray]:
        """float16[labels] of each text of the folder. Raises DataError when it has read other texts."""
        found: dict[str, HalfArray] = {}
        hashes = text_hashes(folder)
        for name in dict.fromkeys((*hashes, *self.rows)):
            if hashes.get(name) != self.about["sha256"].get(name):
                raise DataError(
                    f"{folder / name}: not the file that the teacher {self.about['model']} has read"
                )
            texts, said = texts_of(folder / name), self.rows[name]
            if len(texts) != len(said):
                raise DataError(f"{folder / name}: {len(texts)} rows, and the teacher says {len(said)}")
            silent = np.flatnonzero(~np.isfinite(said).all(axis=1))
            if len(silent):
                raise DataError(f"{folder / name}: of row {silent[0] + 1} the teacher says nothing")
            for text, logits in zip(texts, said, strict=True):
                found.setdefault(text, logits)
        return found


def text_hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of the files that a teacher reads. Raises DataError when there are none."""
    paths = [folder / name for name in TEXT_FILES if (folder / name).is_file()]
    if not paths:
        raise DataError(f"{folder}: neither {' nor '.join(TEXT_FILES)}")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def read_teacher(path: Path) -> TeacherLogits:
    """Raises ConfigError when the file is not what `write_teacher` writes."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            rows = {name: file[name] for name in about["sha256"]}
            labels = len(about["labels"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: not the logits of a teacher: {error}") from error
    if any(said.dtype != np.float16 or said.ndim != 2 or said.shape[1] != labels for said in rows.values()):
        raise ConfigError(f"{path}: not the logits of a teacher: a shape or a type is wrong")
    return TeacherLogits(about, rows)


def write_teacher(path: Path, teacher: TeacherLogits) -> None:
    """Writes the file so that a reader never sees half of it; the same content gives the same bytes."""
    new = path.with_name(path.name + ".new")
    with new.open("wb") as stream:
        about: Any = json.dumps(teacher.about)
        arrays: dict[str, Any] = dict(teacher.rows)
        np.savez_compressed(stream, about=about, **arrays)
    new.replace(path)
