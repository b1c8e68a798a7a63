"""Turns texts into token ids, and refuses the texts that cannot be predicted.

Knows nothing of models, batches, queues or HTTP. No message repeats a text.
"""

import asyncio
import math
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer as Backend

from service.core import Encoding, is_unicode
from service.errors import (
    DeadlineExceeded,
    QueueFull,
    StartupError,
    Stopping,
    TextEmpty,
    TextInvalid,
    TextRefused,
    TextTooLong,
)
from service.words import Words, reads_words_alone

# Measured with a BERT vocabulary of 30,522 on one busy core: 0.4 to 0.9 µs a character of English, 1.4 µs at
# worst (Chinese, one token a character), 2 µs for an empty text. So what runs on the event loop holds it for
# about a millisecond. Longer work goes to a thread in jobs of 6 to 45 ms; requests take turns between them.
INLINE_CHARS = 1_000
JOB_CHARS = 16_384
TEXT_OVERHEAD_CHARS = 8
THREADS = 2
# Requests take turns, so without a bound many large ones all end at their deadline with nothing done. This is
# a few seconds of work, and at least two of the largest bodies.
MAX_READING_CHARS = 4_194_304
CHARS_A_SECOND = 1_000_000

_INVISIBLE = {"Cc", "Cf", "Zs", "Zl", "Zp"}
_RARE = "\U00013080"  # a hieroglyph: an assigned letter that hardly any vocabulary knows


class Tokenizer:
    """A tokenizer.json bound to the limits of a model.

    Padding and truncation that the file brings are removed, and control tokens typed in a text ("[SEP]") are
    read as plain characters. A text gets the room that the special tokens of the file's template leave free.
    """

    def __init__(self, backend: Backend, *, max_tokens: int, max_text_chars: int) -> None:
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # the file does not keep this switch
        self._backend = backend
        self._words = Words(backend) if reads_words_alone(backend) else None
        self._max_text_chars = max_text_chars
        self._prefix, self._suffix = self._read_template()
        self._room = max_tokens - len(self._prefix) - len(self._suffix)
        if self._room < 1:
            raise StartupError(f"{max_tokens} tokens leave no room between the special tokens")
        self._unknown_id = self._find_unknown()
        self._refuse_control_in_text()
        # No thread until `start`, or until one is used.
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")
        self._closed = False
        self._reading = 0  # characters that requests in the threads have brought

    @classmethod
    def load(cls, source: Path | bytes, *, max_tokens: int, max_text_chars: int) -> Self:
        """Read a tokenizer.json, from a file or as the bytes of one.

        Args:
            max_tokens: where a text is cut, special tokens included.
            max_text_chars: where a text is cut before it is tokenised.

        Raises:
            StartupError: the content is not a tokenizer, or not one that the service can use.
        """
        try:
            backend = Backend.from_buffer(source if isinstance(source, bytes) else source.read_bytes())
            made = cls(backend, max_tokens=max_tokens, max_text_chars=max_text_chars)
            made._body(_RARE)  # one without a token for what it does not know fails on it
        except StartupError:
            raise
        except Exception as error:  # the library raises no other kind for most of its reasons
            raise StartupError(f"the tokenizer cannot be read: {error}") from error
        return made

    def start(self) -> None:
        """Start the threads that long texts need, while it can still be refused that there are none.

        Raises:
            StartupError: the system starts no more threads.
        """
        together = threading.Barrier(THREADS)
        try:
            for started in [self._executor.submit(together.wait) for _ in range(THREADS)]:
                started.result()
        except RuntimeError as error:
            together.abort()
            raise StartupError("the threads that read long texts cannot be started") from error

    def encode(self, text: str, *, truncate: bool = True) -> Encoding:
        """The tokens of a text, cut to what the model reads. Blocks; may be called from several threads.

        Raises:
            TextInvalid: the text holds a lone surrogate.
            TextEmpty: it holds no visible character, or none that becomes a token.
            TextTooLong: it had to be cut, and `truncate` is false.
        """
        if not is_unicode(text):
            raise TextInvalid
        cut = text[: self._max_text_chars]
        if len(cut) < len(text) and not truncate:
            raise TextTooLong
        body = [] if _is_blank(cut) else self._body(cut)
        if not body:
            raise TextEmpty
        if len(body) > self._room and not truncate:
            raise TextTooLong
        kept = body[: self._room]
        return Encoding(
            ids=[*self._prefix, *kept, *self._suffix],
            truncated=len(cut) < len(text) or len(kept) < len(body),
            unknown=0 if self._unknown_id is None else kept.count(self._unknown_id),
        )

    async def encode_all(
        self, texts: Sequence[str], *, truncate: bool = True, deadline: float | None = None
    ) -> list[Encoding | TextRefused]:
        """The tokens of each text, or why it is refused, in order. Long work leaves the event loop free.

        Args:
            truncate: see `encode`.
            deadline: when the answer is no longer wanted, on the clock of the loop.

        Raises:
            QueueFull: at once; so much is being read that this would come too late.
            DeadlineExceeded: it passed; what had not been begun is left.
            Stopping: `close` was called.
        """
        work = sum(map(self._work, texts))
        if work <= INLINE_CHARS or (work <= JOB_CHARS and self._is_known(texts)):
            return self._encode_or_refuse(texts, truncate=truncate)
        if self._reading and self._reading + work > MAX_READING_CHARS:
            raise QueueFull(retry_after_s=math.ceil(self._reading / CHARS_A_SECOND))
        self._reading += work
        try:
            async with asyncio.timeout_at(deadline):
                return await self._encode_in_threads(texts, truncate=truncate)
        except TimeoutError:
            raise DeadlineExceeded from None
        finally:
            self._reading -= work

    def close(self) -> None:
        """End the threads after the jobs that they have. Safe to call twice."""
        self._closed = True
        self._executor.shutdown(wait=False)

    async def _encode_in_threads(
        self, texts: Sequence[str], *, truncate: bool
    ) -> list[Encoding | TextRefused]:
        loop = asyncio.get_running_loop()
        encodings: list[Encoding | TextRefused] = []
        for job in self._jobs(texts):
            if self._closed:
                raise Stopping
            work = partial(self._encode_or_refuse, job, truncate=truncate)
            encodings += await loop.run_in_executor(self._executor, work)
        return encodings

    def _encode_or_refuse(self, texts: Sequence[str], *, truncate: bool) -> list[Encoding | TextRefused]:
        encodings: list[Encoding | TextRefused] = []
        for text in texts:
            try:
                encodings.append(self.encode(text, truncate=truncate))
            except TextRefused as refusal:
                refusal.let_go()  # it names this frame, which names the list
                encodings.append(refusal)
        return encodings

    def _is_known(self, texts: Sequence[str]) -> bool:
        """Whether so much of the texts is remembered that they are read as quickly as short ones."""
        words = self._words
        if words is None:
            return False
        return sum(words.unknown_chars(text[: self._max_text_chars]) for text in texts) <= INLINE_CHARS

    def _work(self, text: str) -> int:
        return min(len(text), self._max_text_chars) + TEXT_OVERHEAD_CHARS

    def _jobs(self, texts: Sequence[str]) -> Iterator[list[str]]:
        job: list[str] = []
        work = 0
        for text in texts:
            if job and work + self._work(text) > JOB_CHARS:
                yield job
                job, work = [], 0
            job.append(text)
            work += self._work(text)
        yield job

    def _body(self, text: str) -> list[int]:
        """The token ids of a text without special tokens; in a batch of one, as `encode` holds the GIL."""
        if self._words is not None:
            return self._words.read(text)
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _read_template(self) -> tuple[list[int], list[int]]:
        """The special tokens that the file puts before and after a text."""
        sample = "a 1"
        body, whole = self._body(sample), self._backend.encode(sample).ids
        for start in range(len(whole) - len(body) + 1):
            if body and whole[start : start + len(body)] == body:
                return whole[:start], whole[start + len(body) :]
        raise StartupError("the tokenizer does not put a text between fixed special tokens")

    def _find_unknown(self) -> int | None:
        named = getattr(self._backend.model, "unk_token", None)
        names = [named] if named else ["[UNK]", "<unk>"]
        return next((i for name in names if (i := self._backend.token_to_id(name)) is not None), None)

    def _refuse_control_in_text(self) -> None:
        """Make sure that no special token can be typed: its spelling must be read as plain characters."""
        special = {i: t.content for i, t in self._backend.get_added_tokens_decoder().items() if t.special}
        control = set(special) - {self._unknown_id}
        for spelling in special.values():
            if control & set(self._body(spelling)):
                raise StartupError(f"the tokenizer reads a typed {spelling} as the control token")


def _is_blank(text: str) -> bool:
    """Whether all characters are spaces, controls or zero-width ones; looks up to the first that is not."""
    return all(unicodedata.category(character) in _INVISIBLE for character in text)
