"""The tokenizer reads texts as the model was trained to, within its limits, and refuses the empty."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from service.core import Encoding
from service.errors import StartupError, Stopping, TextEmpty, TextInvalid, TextTooLong
from service.tokenizer import INLINE_CHARS, JOB_CHARS, Tokenizer
from tests.models import BERT_SPECIAL, ROBERTA_SPECIAL, bert_tokenizer, roberta_tokenizer

UNHEARD = " ".join(f"w{number}" for number in range(INLINE_CHARS // 2))


def load(backend: Backend, *, max_tokens: int = 64, max_text_chars: int = 32_768) -> Tokenizer:
    return Tokenizer.load(backend.to_str().encode(), max_tokens=max_tokens, max_text_chars=max_text_chars)


@pytest.fixture
def bert() -> Iterator[Tokenizer]:
    tokenizer = load(bert_tokenizer())
    yield tokenizer
    tokenizer.close()


@pytest.fixture
def roberta() -> Tokenizer:
    return load(roberta_tokenizer())


def words(encoding: Encoding) -> list[str | None]:
    backend = bert_tokenizer()
    return [backend.id_to_token(index) for index in encoding.ids]


def test_reads_a_text_between_the_special_tokens(bert: Tokenizer) -> None:
    encoding = bert.encode("The FILM was good!")
    assert words(encoding) == ["[CLS]", "the", "film", "was", "good", "!", "[SEP]"]
    assert (encoding.truncated, encoding.unknown, len(encoding)) == (False, 0, 7)


def test_reads_a_file_as_well_as_bytes(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(bert_tokenizer().to_str())
    tokenizer = Tokenizer.load(path, max_tokens=64, max_text_chars=100)
    assert words(tokenizer.encode("good")) == ["[CLS]", "good", "[SEP]"]


def test_padding_and_truncation_of_the_file_are_removed() -> None:
    backend = bert_tokenizer()
    backend.enable_padding(length=20)
    backend.enable_truncation(max_length=4)
    encoding = load(backend).encode("a very good film and product")
    assert words(encoding) == ["[CLS]", "a", "very", "good", "film", "and", "product", "[SEP]"]
    assert not encoding.truncated


@pytest.mark.parametrize("words_in_text", [1, 5, 6, 7, 5_000])
def test_r41_a_long_text_is_cut_to_the_tokens_that_fit(words_in_text: int) -> None:
    encoding = load(bert_tokenizer(), max_tokens=8).encode("good " * words_in_text)
    kept = min(words_in_text, 6)
    assert words(encoding) == ["[CLS]", *["good"] * kept, "[SEP]"]
    assert encoding.truncated == (words_in_text > 6)


def test_characters_are_cut_before_the_text_is_read() -> None:
    tokenizer = load(bert_tokenizer(), max_text_chars=8)
    cut = tokenizer.encode("good bad terrible")
    assert words(cut) == ["[CLS]", "good", "bad", "[SEP]"]
    assert cut.truncated
    assert not tokenizer.encode("good bad").truncated


def test_a_long_text_is_refused_when_it_may_not_be_cut() -> None:
    tokenizer = load(bert_tokenizer(), max_tokens=5, max_text_chars=14)
    assert len(tokenizer.encode("good good good", truncate=False)) == 5
    with pytest.raises(TextTooLong):
        tokenizer.encode("a a a a", truncate=False)
    with pytest.raises(TextTooLong):
        tokenizer.encode("good good good ", truncate=False)


EMPTY = ["", " ", "\n\n", "\t", "\0", "\u200b\u200d\ufeff", "\u202e", "\u00a0\u2003", "\0 \u200b" * 50_000]


@pytest.mark.parametrize("text", EMPTY, ids=ascii)
@pytest.mark.parametrize("kind", [bert_tokenizer, roberta_tokenizer])
def test_r23_a_text_without_a_visible_character_is_empty(kind: Callable[[], Backend], text: str) -> None:
    with pytest.raises(TextEmpty):
        load(kind()).encode(text)


def test_r23_a_text_of_which_no_token_is_left_is_empty(bert: Tokenizer) -> None:
    with pytest.raises(TextEmpty):
        bert.encode("\u0301" * 1_000)


def test_a_lone_surrogate_is_invalid_wherever_it_is() -> None:
    tokenizer = load(bert_tokenizer(), max_text_chars=10)
    for text in ("\ud800", "good \udfff film", "a" * 1_000 + "\ud83d"):
        with pytest.raises(TextInvalid) as caught:
            tokenizer.encode(text)
        assert "good" not in caught.value.detail
    assert len(tokenizer.encode("\U0001f60d")) == 3


@pytest.mark.parametrize(
    "text", ["great film [SEP] awful", "[PAD]" * 50 + "i hate it", "[CLS]", "[MASK]", "[UNK]"]
)
def test_r24_control_tokens_cannot_be_typed(bert: Tokenizer, text: str) -> None:
    encoding = bert.encode(text)
    control = {BERT_SPECIAL.index(name) for name in BERT_SPECIAL}
    assert control.isdisjoint(encoding.ids[1:-1])
    assert encoding.unknown == 0


def test_r24_a_typed_separator_reads_as_its_letters(bert: Tokenizer) -> None:
    assert words(bert.encode("[SEP]")) == ["[CLS]", "[", "s", "##e", "##p", "]", "[SEP]"]


@pytest.mark.parametrize("text", [*ROBERTA_SPECIAL, "great </s> awful", "<pad>" * 9])
def test_r24_control_tokens_of_roberta_cannot_be_typed(roberta: Tokenizer, text: str) -> None:
    encoding = roberta.encode(text)
    control = {ROBERTA_SPECIAL.index(name) for name in ROBERTA_SPECIAL}
    assert control.isdisjoint(encoding.ids[1:-1])
    assert (encoding.ids[0], encoding.ids[-1]) == (0, 2)


def test_r26_unknown_tokens_are_counted(bert: Tokenizer) -> None:
    assert bert.encode("\U0001f60d").unknown == 1
    assert bert.encode("good \U0001f621 \u6f22").unknown == 2
    assert bert.encode("good").unknown == 0


@pytest.mark.parametrize(
    "text", ["w" + "e" * 999_999, "@" * 1_000_000, "e\u0301" * 500_000, "\u6f22" * 1_000_000]
)
def test_r25_only_what_fits_is_read_of_a_huge_text(text: str) -> None:
    short, long = load(bert_tokenizer(), max_text_chars=500), load(bert_tokenizer(), max_text_chars=500)
    assert long.encode(text).ids == short.encode(text[:500]).ids
    assert long.encode(text).truncated


async def test_each_text_of_a_list_has_its_own_outcome_in_order(bert: Tokenizer) -> None:
    outcomes = await bert.encode_all(["good", "", "bad", "\ud800"])
    assert [type(one) for one in outcomes] == [Encoding, TextEmpty, Encoding, TextInvalid]
    assert outcomes[0] == bert.encode("good")
    assert outcomes[2] == bert.encode("bad")


@pytest.mark.parametrize("chars", [INLINE_CHARS // 2, INLINE_CHARS * 2, JOB_CHARS * 3])
async def test_long_lists_give_the_same_as_single_texts(bert: Tokenizer, chars: int) -> None:
    pieces = ["good film ", "", "bad " * 40, "x" * 5_000, "a" * JOB_CHARS + " good"]
    texts = [pieces[i % len(pieces)] for i in range(1 + chars // 200)]
    outcomes = await bert.encode_all(texts)
    assert [type(one) for one in outcomes] == [Encoding if text else TextEmpty for text in texts]
    assert [one for one in outcomes if isinstance(one, Encoding)] == [bert.encode(t) for t in texts if t]


async def test_refusals_do_not_depend_on_the_way(bert: Tokenizer) -> None:
    long_text = "good " * INLINE_CHARS
    assert [type(one) for one in await bert.encode_all([long_text, "good"], truncate=False)] == [
        TextTooLong,
        Encoding,
    ]


def tokenizer_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("tokenize")}


async def test_short_texts_are_read_at_once_and_long_ones_in_a_thread(bert: Tokenizer) -> None:
    before = tokenizer_threads()
    assert await bert.encode_all(["good film"] * 3)
    assert await bert.encode_all(["good film " * (INLINE_CHARS // 5)])  # long, but known
    assert not tokenizer_threads() - before
    assert await bert.encode_all([UNHEARD])
    assert len(tokenizer_threads() - before) == 1


async def test_a_long_text_of_unknown_words_is_read_in_a_thread(roberta: Tokenizer, bert: Tokenizer) -> None:
    for tokenizer in (bert, roberta):
        before = tokenizer_threads()
        assert await tokenizer.encode_all([UNHEARD])
        assert len(tokenizer_threads() - before) == 1


async def test_the_loop_turns_while_a_long_text_is_read(bert: Tokenizer) -> None:
    reading = asyncio.create_task(bert.encode_all(["good film " * 3_000] * 20))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(await reading) == 20
    assert turns > 20  # at least one for each job, or the loop stood still


async def test_closed_it_takes_no_long_texts_and_its_threads_end(bert: Tokenizer) -> None:
    before = tokenizer_threads()
    await bert.encode_all([UNHEARD])
    threads = tokenizer_threads() - before
    assert threads
    bert.close()
    bert.close()
    for thread in threads:
        await asyncio.to_thread(thread.join, 60)
        assert not thread.is_alive()
    with pytest.raises(Stopping):
        await bert.encode_all([UNHEARD.replace("w", "v")])


def test_one_that_fails_on_what_it_does_not_know_is_refused() -> None:
    content = json.loads(bert_tokenizer().to_str())
    content["model"] |= {"unk_token": "[NONE]"}
    with pytest.raises(StartupError, match=r"the tokenizer cannot be read: .*Missing"):
        Tokenizer.load(json.dumps(content).encode(), max_tokens=64, max_text_chars=100)


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff"])
def test_what_is_no_tokenizer_is_refused(content: bytes) -> None:
    with pytest.raises(StartupError, match="the tokenizer cannot be read"):
        Tokenizer.load(content, max_tokens=64, max_text_chars=100)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="the tokenizer cannot be read"):
        Tokenizer.load(tmp_path / "tokenizer.json", max_tokens=64, max_text_chars=100)


def test_a_limit_without_room_is_refused() -> None:
    with pytest.raises(StartupError, match="no room"):
        load(bert_tokenizer(), max_tokens=2)


def edited(edit: Callable[[dict[str, Any]], None]) -> Backend:
    content = json.loads(bert_tokenizer().to_str())
    edit(content)
    return Backend.from_str(json.dumps(content))


def test_a_tokenizer_in_which_control_tokens_can_be_typed_is_refused() -> None:
    def split_at_spaces(content: dict[str, Any]) -> None:
        content["pre_tokenizer"] = {"type": "WhitespaceSplit"}
        content["normalizer"] = None

    with pytest.raises(StartupError, match=r"reads a typed \[\w+\] as the control token"):
        load(edited(split_at_spaces))


def test_a_tokenizer_that_reads_nothing_is_refused() -> None:
    def drop_everything(content: dict[str, Any]) -> None:
        content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "."}, "content": ""}

    with pytest.raises(StartupError, match="fixed special tokens"):
        load(edited(drop_everything))


def test_r28_reading_a_text_starts_no_threads(tmp_path: Path) -> None:
    """The library would start one a core, blind to a quota, and a process that has them cannot be forked."""
    file = tmp_path / "tokenizer.json"
    bert_tokenizer().save(str(file))
    code = f"""
import os
from pathlib import Path
from service.environment import keep_tokenizers_single
from service.tokenizer import Tokenizer
keep_tokenizers_single()
before = len(os.listdir("/proc/self/task"))
tokenizer = Tokenizer.load(Path({str(file)!r}), max_tokens=32, max_text_chars=1000)
tokenizer.encode("good")
print(len(os.listdir("/proc/self/task")) - before)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "0\n"
