"""Builds small encoders with random weights, and batches with real padding."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from encoder.config import EncoderConfig
from encoder.model import SequenceClassifier

Module = TypeVar("Module", bound=nn.Module)
WORDS = 50
LONGEST = 16


class Batch(NamedTuple):
    """ids int64[b, n] and mask int64[b, n]."""

    ids: Tensor
    mask: Tensor


def small(**changes: Any) -> EncoderConfig:
    """A shape in which no two sizes are the same, so that a mixed-up axis is seen. No dropout."""
    chosen = {
        "words": WORDS,
        "max_tokens": LONGEST,
        "labels": 3,
        "width": 32,
        "layers": 2,
        "heads": 4,
        "inner_width": 40,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "head_dropout": 0.0,
        "spread": 0.2,
    }
    return EncoderConfig(**{**chosen, **changes})


def build(*, seed: int = 0, fused: bool = True, **changes: Any) -> SequenceClassifier:
    """A classifier of that shape, not training, with every weight random (see `scatter`)."""
    torch.manual_seed(seed)
    return scatter(SequenceClassifier(small(**changes)).eval().fuse_attention(fused), seed=seed)


def scatter(module: Module, *, seed: int = 0) -> Module:
    """Random biases and LayerNorms in place of zeros and ones, so that one left out or swapped is seen."""
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=dice) * 0.3)
    return module


def batch(
    lengths: Sequence[int] = (5, 11, 1, 8), *, words: int = WORDS, pad_id: int = 0, seed: int = 0
) -> Batch:
    """Random ids of 5 and up, `pad_id` after each text's end."""
    dice = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, words, (len(lengths), max(lengths)), generator=dice)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return Batch(torch.where(mask == 1, ids, pad_id), mask)


def largest(difference: Tensor) -> float:
    """The largest absolute value."""
    return float(difference.detach().abs().max())
