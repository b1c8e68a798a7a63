"""Draws the rows of a recipe from the data sets and writes them as a folder that `fit` reads.

The same recipe and the same files give the same bytes everywhere: what is drawn and where a text is cropped
follow from a hash of the seed and the text, and not from a random generator. Knows nothing of tokenizers,
models or torch.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from training.config import write_json
from training.data import TEXT_COLUMNS, DataError, Example, set_name, table_rows
from training.leaks import normalised
from training.recipe import ROLES, Part, Recipe

SUMMARY_FILE = "mix.json"
_NO_LICENCE = re.compile(r"\bno licence|\bstates? none", re.IGNORECASE)


def write_mix(recipe: Recipe, data: Path, out: Path) -> dict[str, Any]:
    """Writes `train.tsv`, `dev.tsv` and `unlabelled.tsv` (those that have rows) and `mix.json`, the counts.

    `data` is the folder of the data sets. Repeats and contradictions are left in: `fit` cleans what it reads.
    Returns what `mix.json` says: the parts, the licence of each set (null: its SOURCE.md states none, or is
    not there), the SHA-256 of the files. Raises DataError for a file that cannot be read or lacks a column,
    and for a part that has not the rows that are asked for.
    """
    kept_out = {normalised(row.text) for name in recipe.keep_out for row in _read(data, Part(file=name))}
    rows: dict[str, list[tuple[Example, str]]] = {role: [] for role in ROLES}
    parts = []
    for part in recipe.parts:
        found = list(_read(data, part))
        reported = set() if part.role == "dev" else kept_out
        free = [row for row in found if normalised(row.text) not in reported]
        drawn = [_crop(row, part, recipe.seed + part.turn) for row in _draw(free, part, recipe.seed)]
        source = set_name(data / part.file)
        if len(drawn) < (part.rows or 1):
            raise DataError(f"{data / part.file}: {part.rows or 1} rows are asked for, {len(drawn)} are left")
        rows[part.role] += [(row, source) for row in drawn]
        parts.append(
            {
                "source": source,
                "role": part.role,
                "rows": len(drawn),
                "words": sum(len(row.text.split()) for row in drawn),
                "also_reported": len(found) - len(free),
            }
        )
    out.mkdir(parents=True, exist_ok=True)
    # A file of another recipe must not be taken for one of this.
    for name in (SUMMARY_FILE, *(f"{role}.tsv" for role in ROLES)):
        (out / name).unlink(missing_ok=True)
    hashes = {f"{role}.tsv": _write(out / f"{role}.tsv", rows[role]) for role in ROLES if rows[role]}
    sets = {set_name(data / part.file).partition("/")[0]: (data / part.file).parent for part in recipe.parts}
    licences = {name: _licence(folder / "SOURCE.md") for name, folder in sets.items()}
    summary = {"parts": parts, "licences": licences, "sha256": hashes}
    write_json(out / SUMMARY_FILE, summary)
    return summary


def read_mix(folder: Path) -> dict[str, Any] | None:
    """What `mix.json` says, None for a folder without one. Raises DataError when it is of other files."""
    path = folder / SUMMARY_FILE
    if not path.is_file():
        return None
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        hashes = {**summary["sha256"]}
        summary["parts"] = [*summary["parts"]]
        # A summary of an earlier release names no licences.
        summary["licences"] = {**summary.get("licences", {})}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not the summary of a mix: {error}") from error
    for role in ROLES:
        file = folder / f"{role}.tsv"
        now = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
        if now != hashes.get(file.name):
            raise DataError(f"{file}: not the file that {path.name} describes")
    return summary


def mix_table(summary: dict[str, Any]) -> str:
    """The parts as text, a line for each."""
    head = ("source", "role", "rows", "words", "left out, as it is reported on")
    names = ("source", "role", "rows", "words", "also_reported")
    lines = [[str(part[name]) for name in names] for part in summary["parts"]]
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
    text = [
        "  ".join(
            [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
            + [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]
        )
        for line in (head, *lines)
    ]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def _licence(path: Path) -> str | None:
    """The first line under `## Licence as stated`; None where it says that there is none."""
    if not path.is_file():
        return None
    _, _, section = path.read_text(encoding="utf-8").partition("## Licence as stated\n")
    line = section.strip().partition("\n")[0].strip()
    return None if not line or line.startswith("#") or _NO_LICENCE.search(line) else line


def _read(data: Path, part: Part) -> Iterator[Example]:
    left_out = None if part.exclude is None else {row["id"] for _, row in _rows(data / part.exclude, "id")}
    needed = [name for name, used in (("split", part.split), ("id", part.exclude)) if used is not None]
    for where, row in _rows(data / part.file, "label", *needed):
        text = next((row[name] for name in TEXT_COLUMNS if name in row), None)
        if text is None:
            raise DataError(f"{where}: no column 'text' or 'sentence'")
        if not re.fullmatch(r"[0-9]+", row["label"].strip()):
            raise DataError(f"{where}: the label is not a whole number")
        if part.split is not None and row["split"] != part.split:
            continue
        if left_out is not None and row["id"] in left_out:
            continue
        label = int(row["label"])
        if part.only_label is not None and label != part.only_label:
            continue
        words = text.split()
        if len(words) >= part.least_words:
            yield Example(" ".join(words), label)


def _rows(path: Path, *columns: str) -> Iterator[tuple[str, dict[str, str]]]:
    for where, row in table_rows(path):
        for name in columns:
            if name not in row:
                raise DataError(f"{where}: no column {name!r}")
        yield where, row


def _draw(rows: Sequence[Example], part: Part, seed: int) -> list[Example]:
    """The rows with the lowest hashes, in the order of the hashes."""
    ranked = sorted(rows, key=lambda row: _digest(seed + part.turn, "draw", row.text))
    return ranked[: part.rows]


def _crop(row: Example, part: Part, seed: int) -> Example:
    if part.crop_words is None:
        return row
    words = row.text.split()
    low, high = part.crop_words
    digest = _digest(seed, "crop", row.text)
    share, place = (int.from_bytes(digest[start : start + 4], "big") / 2**32 for start in (0, 4))
    length = round(math.exp(math.log(low) + share * (math.log(high) - math.log(low))))
    first = int(place * (len(words) - length + 1)) if len(words) > length else 0
    return Example(" ".join(words[first : first + length]), row.label)


def _digest(seed: int, what: str, text: str) -> bytes:
    return hashlib.sha256(f"{seed}\t{what}\t{text}".encode()).digest()


def _write(path: Path, rows: Iterable[tuple[Example, str]]) -> str:
    if path.name == "unlabelled.tsv":
        lines = ["text\tsource", *(f"{row.text}\t{source}" for row, source in rows)]
    else:
        lines = ["text\tlabel\tsource", *(f"{row.text}\t{row.label}\t{source}" for row, source in rows)]
    content = ("\n".join(lines) + "\n").encode()
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()
