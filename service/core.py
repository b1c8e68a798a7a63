"""The nouns that travel between tokenizer, batcher, engine and predictor.

Knows nothing of HTTP, settings, queues or models: plain data that nobody changes, and what a text is.
What is made for each text is a tuple: a frozen dataclass takes three times as long to make.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float32]
IntArray: TypeAlias = NDArray[np.int64]


def is_unicode(text: str) -> bool:
    """Whether a text can be written in UTF-8: a lone surrogate cannot, and is no character."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Encoding:
    """One text as the model reads it.

    Attributes:
        ids: token ids, special tokens included, not padded.
        truncated: whether characters or tokens were cut off to fit.
        unknown: how many of the ids are the unknown token.
    """

    ids: Sequence[int]
    truncated: bool = False
    unknown: int = 0

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Several encodings laid end to end, without padding.

    Attributes:
        ids: int64[sum(lengths)], the token ids of all texts one after the other.
        lengths: int64[n], tokens of each text, every one at least 1.
    """

    ids: IntArray
    lengths: IntArray

    @classmethod
    def of(cls, encodings: Sequence[Encoding]) -> "TokenBatch":
        """Lay the encodings end to end, in their order."""
        lengths = np.fromiter((len(e.ids) for e in encodings), dtype=np.int64, count=len(encodings))
        ids = np.empty(int(lengths.sum()), dtype=np.int64)
        start = 0
        for encoding in encodings:
            ids[start : start + len(encoding.ids)] = encoding.ids
            start += len(encoding.ids)
        return cls(ids=ids, lengths=lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def padded_tokens(self) -> int:
        """Tokens of the rectangle that holds the batch: longest × count."""
        return int(self.lengths.max()) * len(self.lengths) if len(self.lengths) else 0


class Prediction(NamedTuple):
    """What the model says of one text.

    Attributes:
        logits: one raw score a label, in the label order of the version.
        scores: the probabilities of the same labels (softmax or sigmoid, temperature applied).
        tokens: how many tokens the model read, special tokens included.
        truncated: whether the text was cut.
    """

    logits: tuple[float, ...]
    scores: tuple[float, ...]
    tokens: int
    truncated: bool


class Timings(NamedTuple):
    """Seconds that a request spent in each stage; a stage not reached is 0.

    `queue_s` and `infer_s` are those of the text of the request that was answered last.
    """

    tokenize_s: float = 0.0
    queue_s: float = 0.0
    infer_s: float = 0.0
