"""Texts for load tests: real sentences and reviews where `VALENCE_DATA` names the data sets, else our own.

Knows nothing of servers.
"""

import csv
import gzip
import os
import random
from collections.abc import Sequence
from pathlib import Path

_OPENINGS = (
    "The service was",
    "I found the ending",
    "This blender is",
    "Their support is",
    "The whole cast is",
)
_MIDDLES = ("slow and unhelpful", "quite moving", "well made", "a waste of money", "better than I had hoped")
_ENDINGS = (
    "and I will not come back.",
    "although the price is fair.",
    "which surprised me.",
    "as my sister said.",
)
_OWN = [f"{a} {b} {c}" for a in _OPENINGS for b in _MIDDLES for c in _ENDINGS]
TOKENS_A_WORD = 1.3  # of English reviews with a vocabulary of 30,000 pieces


def sentences() -> list[str]:
    """The sentences of SST-2 dev, in a fixed random order; a hundred of our own without the data."""
    folder = _folder()
    rows = list(_OWN)
    if folder is not None:
        with (folder / "sst2/dev.tsv").open(encoding="utf-8", newline="") as file:
            rows = [row[0] for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)][1:]
    random.Random(1).shuffle(rows)  # noqa: S311 - seeded dice
    return rows


def reviews(tokens: int) -> list[str]:
    """Texts of about so many tokens (±15 %), from reviews of IMDB or from our own sentences."""
    dice = random.Random(2)  # noqa: S311
    words = [word for text in _long_sources(dice) for word in text.split()]
    made: list[str] = []
    start = 0
    while start < len(words) and len(made) < 1000:
        length = max(1, round(tokens / TOKENS_A_WORD * dice.uniform(0.85, 1.15)))
        made.append(" ".join(words[start : start + length]))
        start += length
    return made


def whole_reviews() -> list[str]:
    """The reviews of IMDB as they were written; texts of about 200 tokens of our own without the data."""
    if _folder() is None:
        return reviews(200)
    return list(_long_sources(random.Random(2)))  # noqa: S311


def source() -> str:
    """What the texts are, for a report."""
    return "sentences of our own" if _folder() is None else "SST-2 dev and IMDB"


def _long_sources(dice: random.Random) -> Sequence[str]:
    folder = _folder()
    if folder is None:
        return dice.choices(_OWN, k=10_000)
    with gzip.open(folder / "imdb/test_subset1000.tsv.gz", "rt", encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [max(row, key=len) for row in rows][1:]


def _folder() -> Path | None:
    found = os.environ.get("VALENCE_DATA")
    return Path(found) if found else None
