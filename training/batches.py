"""Token ids of examples, and an order of training in which neighbours are of like length.

Knows nothing of models or of where the examples come from.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler

from training.data import Example
from training.pretrained import clear_limits

POOL_BATCHES = 50


class Encoded(Dataset[dict[str, Any]]):
    """Token ids and labels of examples, each text cut at `max_tokens`, special tokens included."""

    def __init__(self, examples: Sequence[Example], tokenizer: Any, max_tokens: int) -> None:
        texts = [example.text for example in examples]
        encoded = tokenizer(texts, truncation=True, max_length=max_tokens, return_attention_mask=False)
        clear_limits(tokenizer)
        self.ids: list[list[int]] = encoded["input_ids"]
        self.labels = [example.label for example in examples]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": self.labels[index]}


class LengthGroups(Sampler[int]):
    """A shuffle in which neighbours are of like length.

    Pools of 50 batches are drawn and sorted by length, then all batches are shuffled. The order depends on
    the seed and the epoch alone, so that a resumed run sees the batches that it would have seen (the
    library's own grouping draws from the global generator).
    """

    def __init__(self, lengths: Sequence[int], *, batch_items: int, seed: int) -> None:
        self.lengths = np.asarray(lengths)
        self.batch_items = batch_items
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch, counted from 0. The Trainer calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng((self.seed, self.epoch))
        order = random.permutation(len(self.lengths))
        pool = self.batch_items * POOL_BATCHES
        pools = [order[start : start + pool] for start in range(0, len(order), pool)]
        ordered = np.concatenate([part[np.argsort(-self.lengths[part], kind="stable")] for part in pools])
        whole = len(ordered) // self.batch_items * self.batch_items
        batches = ordered[:whole].reshape(-1, self.batch_items)
        # An incomplete batch stays last: elsewhere it would shift the bounds of all later ones.
        yield from random.permutation(batches).ravel().tolist()
        yield from ordered[whole:].tolist()
