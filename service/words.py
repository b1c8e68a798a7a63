"""Remembers the token ids of words, for tokenizers that read each word by itself.

A tokenizer of BERT's kind never looks across a space: the tokens of a text are those of its words, one after
the other. People use the same words again and again, and looking one up costs a hundredth of reading it.
Knows nothing of models, limits or special tokens.
"""

from collections.abc import Sequence
from itertools import chain

from tokenizers import Tokenizer as Backend
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

MOST_WORDS = 32_768
LONGEST_WORD_CHARS = 32


class Words:
    """The words that were read lately and the token ids of each. May be used from several threads at once.

    Args:
        backend: a tokenizer for which `reads_words_alone` holds.
        most: when so many are remembered they are all forgotten. What is in use comes back at once; what a
            flood of nonsense has left does not.
    """

    def __init__(self, backend: Backend, *, most: int = MOST_WORDS) -> None:
        self._backend = backend
        self._most = most
        self._known: dict[str, tuple[int, ...]] = {"": ()}

    def __len__(self) -> int:
        return len(self._known)

    def read(self, text: str) -> list[int]:
        """The token ids of a text, without special tokens."""
        words = text.split(" ")
        ids = list(map(self._known.get, words))
        if None in ids:
            missing = [place for place, found in enumerate(ids) if found is None]
            for place, found in zip(missing, self._learn([words[place] for place in missing]), strict=True):
                ids[place] = found
        return list(chain.from_iterable(found for found in ids if found))

    def unknown_chars(self, text: str) -> int:
        """How many characters of the text belong to words that would have to be read."""
        known = self._known
        return sum(len(word) for word in text.split(" ") if word not in known)

    def _learn(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        found = [
            tuple(one.ids) for one in self._backend.encode_batch_fast(list(words), add_special_tokens=False)
        ]
        if len(self._known) + len(words) > self._most:
            self._known = {"": ()}
        short = (pair for pair in zip(words, found, strict=True) if len(pair[0]) <= LONGEST_WORD_CHARS)
        self._known.update(list(short)[: self._most - 1])
        return found


def reads_words_alone(backend: Backend) -> bool:
    """Whether the tokens of a text are those of what stands between its spaces, one after the other.

    So it is with BERT's way to normalise and to split, both of which look at one character at a time or at
    marks that follow a letter, and with no token added to the vocabulary that could hold a space.
    """
    return (
        type(backend.normalizer) is BertNormalizer
        and type(backend.pre_tokenizer) is BertPreTokenizer
        and type(backend.model) is WordPiece
        and all(token.special for token in backend.get_added_tokens_decoder().values())
    )
