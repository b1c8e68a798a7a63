"""Reads labelled sentences from TAB separated files and says which of them train and which of them judge.

Knows nothing of tokenizers, models or torch.

A file is `.tsv` or `.tsv.gz`: UTF-8, one header line, TAB separated, no quoting. The header names a column
`text` or `sentence` and a column `label` (a whole number, the index of the label). Of other columns only
`split` is read.

What a row is for, first rule that fits:

1. the column `split`: `train`, `dev` (also `val`, `valid`, `validation`) or `test`;
2. the words of the file's name, where one starts with `test`, `dev` or `val`, or `train`, looked for in this
   order (`orig_train.tsv` trains, `test_subset1000.tsv` tests);
3. a file that was named itself trains.

Of a folder only the files whose name starts with `train`, `dev`, `val` or `test` are read. Files given as
`dev_paths` judge, whatever they are called. Test rows are never trained on and never choose the best epoch.
"""

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

TEXT_COLUMNS = ("text", "sentence")
SUFFIXES = (".tsv", ".tsv.gz")
ROLES = ("train", "dev", "test")
UNLABELLED_FILE = "unlabelled.tsv"
# The index that PyTorch's cross-entropy passes over.
NO_LABEL = -100
FOLDER_PREFIXES = ("train", "dev", "val", "test")
_SPLIT_NAMES = {
    "train": "train",
    "dev": "dev",
    "val": "dev",
    "valid": "dev",
    "validation": "dev",
    "test": "test",
}
_WORD_ROLES = (("test", "test"), ("dev", "dev"), ("val", "dev"), ("train", "train"))


class DataError(ValueError):
    """A file or a row that does not fit. The message starts with `file:` or `file:line:`, without a text."""


@dataclass(frozen=True, slots=True)
class Example:
    """One text. `label` is the index of its label, or NO_LABEL for one that a teacher alone labels."""

    text: str
    label: int


@dataclass(frozen=True, slots=True)
class SourceFile:
    """What was read from one file: its folder and name, its SHA-256 and the rows for each role."""

    name: str
    sha256: str
    rows: dict[str, int]


@dataclass(slots=True)
class Corpus:
    """The rows of all files by role, and the files they came from."""

    train: list[Example] = field(default_factory=list)
    dev: list[Example] = field(default_factory=list)
    test: list[Example] = field(default_factory=list)
    unlabelled: list[Example] = field(default_factory=list)
    files: list[SourceFile] = field(default_factory=list)

    def of_role(self, role: str) -> list[Example]:
        """Rows of `train`, `dev` or `test`."""
        return {"train": self.train, "dev": self.dev, "test": self.test}[role]


def read_rows(path: Path, *, labels: int) -> list[tuple[Example, str | None]]:
    """All rows of one file, each with what its column `split` says (None without such a column).

    `labels` is the number of labels; a label is 0 to `labels` - 1. Raises DataError with file and line.
    """
    lines = _decoded_lines(path)
    try:
        header = next(lines)[1].split("\t")
    except StopIteration:
        raise DataError(f"{path}: the file is empty") from None
    columns = _Columns.of(header, path)
    rows = [columns.parse(line, f"{path}:{number}", labels) for number, line in lines]
    if not rows:
        raise DataError(f"{path}: there is a header and no row")
    return rows


def table_rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Each row of a file as `file:line` and its fields by column. Raises DataError with file and line."""
    header: list[str] | None = None
    for number, line in _decoded_lines(path):
        fields = line.split("\t")
        if header is None:
            header = fields
        elif len(fields) != len(header):
            raise DataError(f"{path}:{number}: {len(fields)} fields, the header has {len(header)}")
        else:
            yield f"{path}:{number}", dict(zip(header, fields, strict=True))


def role_of_name(name: str) -> str | None:
    """`train`, `dev` or `test` from the words of a file's name, or None."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    for prefix, role in _WORD_ROLES:
        if any(word.startswith(prefix) for word in words):
            return role
    return None


def find_files(paths: Iterable[Path]) -> list[Path]:
    """The data files meant by files and folders, in order and each once. Raises DataError."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = [file for file in sorted(path.iterdir()) if _is_wanted(file.name)]
            if not inside:
                raise DataError(f"{path}: no train*, dev*, val* or test* file that ends in .tsv or .tsv.gz")
            found += inside
        elif not path.exists():
            raise DataError(f"{path}: there is no such file or folder")
        elif not path.name.endswith(SUFFIXES):
            raise DataError(f"{path}: the name does not end in .tsv or .tsv.gz")
        else:
            found.append(path)
    unique: dict[Path, Path] = {}
    for file in found:
        unique.setdefault(file.resolve(), file)
    return list(unique.values())


def load_corpus(paths: Sequence[Path], *, labels: int, dev_paths: Sequence[Path] = ()) -> Corpus:
    """All rows of the files and folders in `paths`, by role, and of `dev_paths`, which judge.

    With `dev_paths`, what `paths` would set aside as dev is read too (for the count of overlaps) but is test.
    A file in both counts as named in `dev_paths` only. Raises DataError.
    """
    corpus = Corpus()
    judges = find_files(dev_paths)
    taken = {file.resolve() for file in judges}
    for file in judges:
        _add_file(corpus, file, labels=labels, forced="dev")
    for file in find_files(paths):
        if file.resolve() not in taken:
            _add_file(corpus, file, labels=labels, displaced=bool(judges))
    return corpus


def add_unlabelled(corpus: Corpus, path: Path) -> None:
    """Adds the texts of a file whose labels, if it has any, are not read. Raises DataError."""
    texts = texts_of(path)
    corpus.unlabelled += [Example(text, NO_LABEL) for text in texts]
    corpus.files.append(source_file(path, unlabelled=len(texts)))


def texts_of(path: Path) -> list[str]:
    """The text of each row, whether it has a label or not. Raises DataError with file and line."""
    texts = []
    for where, row in table_rows(path):
        text = next((row[name] for name in TEXT_COLUMNS if name in row), "").strip()
        if not text:
            raise DataError(f"{where}: no text")
        texts.append(text)
    return texts


def set_name(path: Path) -> str:
    """The name a file is reported by: its folder and its name without the suffix, `sst2/dev`."""
    resolved = path.resolve()
    return f"{resolved.parent.name}/{resolved.name.removesuffix('.gz').removesuffix('.tsv')}"


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where the wanted columns stand in a row, and how many fields a row has."""

    text: int
    label: int
    split: int | None
    count: int

    @classmethod
    def of(cls, header: list[str], path: Path) -> "_Columns":
        text = next((header.index(name) for name in TEXT_COLUMNS if name in header), None)
        if text is None:
            raise DataError(f"{path}:1: no column 'text' or 'sentence' in the header")
        if "label" not in header:
            raise DataError(f"{path}:1: no column 'label' in the header")
        split = header.index("split") if "split" in header else None
        return cls(text, header.index("label"), split, len(header))

    def parse(self, line: str, where: str, labels: int) -> tuple[Example, str | None]:
        fields = line.split("\t")
        if len(fields) != self.count:
            raise DataError(f"{where}: {len(fields)} fields, the header has {self.count}")
        text = fields[self.text].strip()
        if not text:
            raise DataError(f"{where}: the text is empty")
        if not re.fullmatch(r"-?[0-9]+", fields[self.label].strip()):
            raise DataError(f"{where}: the label is not a whole number")
        label = int(fields[self.label])
        if not 0 <= label < labels:
            raise DataError(f"{where}: label {label} is outside 0 to {labels - 1}, the labels of the model")
        role = None
        if self.split is not None:
            role = _SPLIT_NAMES.get(fields[self.split].strip().lower())
            if role is None:
                raise DataError(f"{where}: the column 'split' is none of {', '.join(_SPLIT_NAMES)}")
        return Example(text, label), role


def _decoded_lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with _open(path) as stream:
            for raw in stream:
                number += 1
                encoding = "utf-8-sig" if number == 1 else "utf-8"
                yield number, raw.decode(encoding).rstrip("\r\n")
    except UnicodeDecodeError:
        raise DataError(f"{path}:{number}: not UTF-8") from None
    except EOFError:
        raise DataError(f"{path}:{number + 1}: the compressed file ends too early") from None
    except (gzip.BadGzipFile, zlib.error):
        raise DataError(f"{path}:{number + 1}: not a sound gzip file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _open(path: Path) -> gzip.GzipFile | IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _is_wanted(name: str) -> bool:
    return name.endswith(SUFFIXES) and name.lower().startswith(FOLDER_PREFIXES)


def _add_file(
    corpus: Corpus, path: Path, *, labels: int, forced: str | None = None, displaced: bool = False
) -> None:
    by_name = role_of_name(path.name) or "train"
    counts = dict.fromkeys(ROLES, 0)
    for example, split in read_rows(path, labels=labels):
        role = forced or split or by_name
        if displaced and role == "dev":
            role = "test"
        corpus.of_role(role).append(example)
        counts[role] += 1
    corpus.files.append(source_file(path, **counts))


def source_file(path: Path, **rows: int) -> SourceFile:
    """The record of a file; `rows` are the counts by role that are not 0. Raises DataError."""
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    resolved = path.resolve()
    return SourceFile(f"{resolved.parent.name}/{resolved.name}", digest, {**dict.fromkeys(ROLES, 0), **rows})
