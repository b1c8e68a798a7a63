"""Rounds the shape of a batch up, so that a device sees few shapes, and pads a batch to such a shape.

Pure arithmetic on arrays. Knows nothing of sessions, devices or graphs.
"""

import numpy as np

from service.core import IntArray, TokenBatch
from service.engines import pad

LEAST_STEP_TOKENS = 8
"""Half-precision products are fastest where each side is a multiple of 8."""
STEPS_OF_A_DOUBLING = 4


def bucket_of(count: int, longest: int, *, max_tokens: int) -> tuple[int, int]:
    """The (rows, length) that a batch of so many texts is given: no row or token less, few shapes in all.

    Rows are a power of two. Lengths are multiples of 8 up to 64 tokens and quarters of a doubling above it,
    none longer than `max_tokens`: up to 512 tokens there are 20 of them.
    """
    doubling = 1 << max(0, longest - 1).bit_length()
    step = max(LEAST_STEP_TOKENS, doubling // 2 // STEPS_OF_A_DOUBLING)
    return 1 << (count - 1).bit_length(), min(-(-longest // step) * step, max_tokens)


def rectangle(batch: TokenBatch, pad_id: int, shape: tuple[int, int]) -> tuple[IntArray, IntArray]:
    """The batch right-padded to (rows, length): ids and mask, int64[rows, length] each.

    A row without a text is one real token of padding: attention over nothing at all would be no number.
    """
    rows, length = shape
    ids, mask = pad(batch, pad_id, length)
    missing = rows - len(batch)
    if not missing:
        return ids, mask
    no_text = np.zeros((missing, length), dtype=np.int64)
    no_text[:, 0] = 1
    return np.concatenate([ids, np.full_like(no_text, pad_id)]), np.concatenate([mask, no_text])
