"""Finds texts that stand twice: among the rows that train, and between them and the rows that judge.

Knows nothing of files, models or scores.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from training.data import Corpus, Example


@dataclass(frozen=True, slots=True)
class Cleaning:
    """Counts of the training rows read, kept, and left out for a reason; texts are compared normalised.

    A row that stands in dev and in test counts in both.
    """

    rows_read: int
    rows_kept: int
    duplicates: int
    contradictory: int
    also_in_dev: int
    also_in_test: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """How many rows of a set stand among those that were trained on, as they are and normalised."""

    exact: int
    normalised: int


@dataclass(frozen=True, slots=True)
class TrainedTexts:
    """The texts that a model learned from, as they are and normalised."""

    exact: frozenset[str]
    normalised: frozenset[str]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        """Takes each text once."""
        exact = frozenset(texts)
        return cls(exact, frozenset(map(normalised, exact)))


def normalised(text: str) -> str:
    """The form in which texts are compared: NFKC, case folded, runs of white space as one space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def clean_train(corpus: Corpus) -> tuple[list[Example], Cleaning]:
    """The training rows without repeats, contradictions and what stands in dev or test, and the counts.

    Of rows with the same normalised text and label the first is kept; a text with several labels is not.
    """
    dev = {normalised(example.text) for example in corpus.dev}
    test = {normalised(example.text) for example in corpus.test}
    keys = [normalised(example.text) for example in corpus.train]
    labels_of: dict[str, set[int]] = {}
    for key, example in zip(keys, corpus.train, strict=True):
        labels_of.setdefault(key, set()).add(example.label)
    kept: list[Example] = []
    seen: set[str] = set()
    duplicates = contradictory = also_in_dev = also_in_test = 0
    for key, example in zip(keys, corpus.train, strict=True):
        also_in_dev += key in dev
        also_in_test += key in test
        if key in dev or key in test:
            continue
        if len(labels_of[key]) > 1:
            contradictory += 1
        elif key in seen:
            duplicates += 1
        else:
            seen.add(key)
            kept.append(example)
    counts = Cleaning(len(corpus.train), len(kept), duplicates, contradictory, also_in_dev, also_in_test)
    return kept, counts


def fresh_texts(rows: Sequence[Example], corpus: Corpus, train: Sequence[Example]) -> list[Example]:
    """The rows whose texts, normalised, stand neither among those before them nor in train, dev or test."""
    seen = {normalised(example.text) for part in (train, corpus.dev, corpus.test) for example in part}
    fresh: list[Example] = []
    for row in rows:
        key = normalised(row.text)
        if key not in seen:
            seen.add(key)
            fresh.append(row)
    return fresh


def overlap(examples: Sequence[Example], trained: TrainedTexts) -> Overlap:
    """How many examples stand in the texts that were trained on."""
    return Overlap(
        exact=sum(example.text in trained.exact for example in examples),
        normalised=sum(normalised(example.text) in trained.normalised for example in examples),
    )
