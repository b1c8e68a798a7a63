"""Token ids of examples, and an order of training in which neighbours are of like length.

Knows nothing of models, of what is learnt or of where the examples come from.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import Trainer

from training.data import Example
from training.pretrained import clear_limits
from training.teacher import HalfArray

POOL_BATCHES = 50


class Encoded(Dataset[dict[str, Any]]):
    """Token ids and labels of examples, each text cut at `max_tokens`, special tokens included.

    With `teacher`, logits[labels] by text, a row has them as `teacher`.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: Any,
        max_tokens: int,
        teacher: Mapping[str, HalfArray] | None = None,
    ) -> None:
        texts = [example.text for example in examples]
        encoded = tokenizer(texts, truncation=True, max_length=max_tokens, return_attention_mask=False)
        clear_limits(tokenizer)
        self.ids: list[list[int]] = encoded["input_ids"]
        self.labels = [example.label for example in examples]
        self.teacher = None if teacher is None else [teacher[text].tolist() for text in texts]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.ids[index]
        row = {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": self.labels[index]}
        return row if self.teacher is None else {**row, "teacher": self.teacher[index]}


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


class GroupedTrainer(Trainer):
    """The library's Trainer with `LengthGroups` as the order of training."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Batches of like length, padded to the longest of each batch."""
        dataset = self.train_dataset
        if not isinstance(dataset, Encoded):
            raise TypeError("the training set is not Encoded")
        items = self.args.train_batch_size
        order = LengthGroups([len(ids) for ids in dataset.ids], batch_items=items, seed=self.args.seed)
        loader = DataLoader(dataset, batch_size=items, sampler=order, collate_fn=self.data_collator)
        prepared: DataLoader[Any] = self.accelerator.prepare(loader)
        return prepared
