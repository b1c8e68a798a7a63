"""What is remembered of words is exactly what the library reads, and never more than the bound."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from service.store import open_version
from service.words import LONGEST_WORD_CHARS, Words, reads_words_alone
from tests.models import bert_tokenizer, roberta_tokenizer

STORE = Path(__file__).parents[2] / "model_store"


@pytest.fixture(scope="module")
def backend() -> Backend:
    """The vocabulary of the newest real version, set as the service sets it."""
    version = open_version(STORE, "sentiment")
    real = Backend.from_buffer(version.read(version.manifest.tokenizer))
    real.encode_special_tokens = True
    return real


@pytest.fixture(scope="module")
def words(backend: Backend) -> Words:
    """Kept through all examples: what is read in one is remembered in the next."""
    return Words(backend)


def by_the_library(backend: Backend, text: str) -> list[int]:
    return list(backend.encode(text, add_special_tokens=False).ids)


# What could join or part words: marks that combine, spaces of all kinds, controls, letters that grow.
TRICKY = [
    *" \t\n\x1c\x00\u0301\u0323\u3000\u00a0\u200b\u2028\ufffdéßİΣς中-_'.##",
    "[SEP]",
    "  ",
    "ab",
    "x" * 101,
    "👍🏽",
]


@given(st.lists(st.sampled_from(TRICKY) | st.text(max_size=4), max_size=16).map("".join))
@settings(max_examples=1_500, deadline=None)
def test_a_text_is_read_as_the_library_reads_it(backend: Backend, words: Words, text: str) -> None:
    expected = by_the_library(backend, text)
    assert words.read(text) == expected
    assert words.read(text) == expected  # now remembered


def test_words_are_remembered_until_there_are_too_many(backend: Backend) -> None:
    words = Words(backend, most=50)
    dice = random.Random(1)
    for _ in range(200):
        text = " ".join("".join(dice.choices("abcdefg", k=3)) for _ in range(dice.randint(1, 70)))
        assert words.read(text) == by_the_library(backend, text)
        assert len(words) <= 50


def test_only_what_is_not_remembered_counts_as_unknown(words: Words) -> None:
    words.read("a fine film")
    assert words.unknown_chars("a fine  film") == 0
    assert words.unknown_chars("a fine zyxwvu film") == 6


def test_long_words_are_not_remembered(words: Words) -> None:
    long_word = "q" * (LONGEST_WORD_CHARS + 1)
    words.read(long_word)
    assert words.unknown_chars(long_word) == len(long_word)


def test_only_tokenizers_that_read_words_alone_are_remembered() -> None:
    assert reads_words_alone(bert_tokenizer())
    assert not reads_words_alone(roberta_tokenizer())
    with_phrase = bert_tokenizer()
    with_phrase.add_tokens([AddedToken("good film", special=False)])
    assert not reads_words_alone(with_phrase)
    other_normalizer = bert_tokenizer()
    other_normalizer.normalizer = normalizers.Sequence([normalizers.BertNormalizer(), normalizers.Strip()])
    assert not reads_words_alone(other_normalizer)
    other_split = bert_tokenizer()
    other_split.pre_tokenizer = pre_tokenizers.Metaspace()
    assert not reads_words_alone(other_split)
