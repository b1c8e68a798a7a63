"""Any text at all: an encoding within the limits of the model, or a refusal that is true of the text."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core import Encoding
from service.errors import TextEmpty, TextInvalid, TextRefused, TextTooLong
from service.tokenizer import Tokenizer
from tests.models import BERT_SPECIAL, ROBERTA_SPECIAL, Kind, bert_tokenizer, roberta_tokenizer

MAX_TOKENS = 32
MAX_TEXT_CHARS = 2_000
TEXTS = 2_000

_ODD = (
    *BERT_SPECIAL,
    *ROBERTA_SPECIAL,
    "good ",
    "##good",
    "\u0301",  # combining
    "\u202e",  # right to left
    "\u200d",
    "\ufeff",
    "\x00",
    "\ufdfa",  # 18 characters when it is spelt out
    "\u0130",  # two characters in lower case
    "\U0001f468\u200d\U0001f469",
    "\U0010ffff",
    "\ud800",
    "\udfff",
    "\u4e2d",
    "\u05e9",
    "\x85",
    "\t\r\n",
)


@dataclass(frozen=True)
class Subject:
    """A tokenizer, one with room for all, and what its vocabulary holds.

    Attributes:
        control: ids of the special tokens but the unknown one.
    """

    tokenizer: Tokenizer
    roomy: Tokenizer
    size: int
    control: frozenset[int]
    unknown: int


@pytest.fixture(params=["bert", "roberta"], scope="module")
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    kind: Kind = request.param
    backend = bert_tokenizer() if kind == "bert" else roberta_tokenizer()
    special, unknown = (BERT_SPECIAL, "[UNK]") if kind == "bert" else (ROBERTA_SPECIAL, "<unk>")
    ids = {name: backend.get_vocab()[name] for name in special}
    content = backend.to_str().encode()
    tokenizer = Tokenizer.load(content, max_tokens=MAX_TOKENS, max_text_chars=MAX_TEXT_CHARS)
    roomy = Tokenizer.load(content, max_tokens=1_000_000, max_text_chars=MAX_TEXT_CHARS)
    control = frozenset(set(ids.values()) - {ids[unknown]})
    yield Subject(tokenizer, roomy, backend.get_vocab_size(), control, ids[unknown])
    tokenizer.close()
    roomy.close()


def texts() -> st.SearchStrategy[str]:
    """Of any characters, lone surrogates too, with odd ones in their midst and some repeated very often."""
    one = st.characters(exclude_categories=())
    odd = st.sampled_from(_ODD)
    often = st.builds(lambda text, count: text * count, one | odd, st.integers(1, 3_000))
    return st.one_of(
        st.text(one, max_size=80),
        st.lists(odd | st.text(one, max_size=6), max_size=20).map("".join),
        st.lists(odd | often, max_size=4).map("".join),
        st.text(st.characters(categories=["Cc", "Cf", "Zs", "Zl", "Zp", "Mn", "Me"]), max_size=20),
    )


def outcome(tokenizer: Tokenizer, text: str, *, truncate: bool = True) -> Encoding | TextRefused:
    try:
        return tokenizer.encode(text, truncate=truncate)
    except TextRefused as refusal:
        return refusal


def is_writable(text: str) -> bool:
    """Whether it can be sent at all: UTF-8 has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@settings(max_examples=TEXTS, deadline=None, database=None, derandomize=True)
@given(text=texts())
def test_any_text_is_read_or_refused(subject: Subject, text: str) -> None:
    found = outcome(subject.tokenizer, text)
    if not isinstance(found, Encoding):
        assert_refused_rightly(found, text)
        return
    assert is_writable(text)
    assert 3 <= len(found) <= MAX_TOKENS
    assert all(0 <= index < subject.size for index in found.ids)
    body = list(found.ids[1:-1])
    assert subject.control.isdisjoint(body), "no control token can be typed"
    assert found.unknown == body.count(subject.unknown)

    whole = subject.roomy.encode(text)
    assert body == list(whole.ids[1:-1])[: MAX_TOKENS - 2], "it is the beginning that is kept"
    assert found.truncated == (len(text) > MAX_TEXT_CHARS or len(whole) > MAX_TOKENS)

    uncut = outcome(subject.tokenizer, text, truncate=False)
    assert isinstance(uncut, TextTooLong) if found.truncated else uncut == found


def assert_refused_rightly(refusal: TextRefused, text: str) -> None:
    if isinstance(refusal, TextInvalid):
        assert not is_writable(text)
    else:
        assert isinstance(refusal, TextEmpty)
        assert not any(character.isalnum() for character in text[:MAX_TEXT_CHARS])
    assert text.strip() == "" or text not in refusal.detail


@settings(max_examples=TEXTS // 8, deadline=None, database=None, derandomize=True)
@given(several=st.lists(texts(), min_size=1, max_size=4))
def test_a_text_is_read_the_same_in_company_and_in_a_thread(subject: Subject, several: list[str]) -> None:
    """Long lists go to threads, short ones do not."""
    together = asyncio.run(subject.tokenizer.encode_all(several))
    for text, found in zip(several, together, strict=True):
        alone = outcome(subject.tokenizer, text)
        assert type(found) is type(alone)
        if isinstance(alone, Encoding):
            assert found == alone
