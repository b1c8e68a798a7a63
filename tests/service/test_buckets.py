"""Shapes for a device: rounded up to few, filled without changing an answer, run on bound buffers."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
import pytest

from service.core import Encoding, TokenBatch
from service.engines import Integers, ModelShape
from service.engines.binding import BoundSession
from service.engines.buckets import bucket_of, rectangle
from tests.models import BERT_INPUTS, PLAIN_INPUTS, make_onnx
from tests.service.engine_cases import encodings, weights

SHAPE = ModelShape(labels=2, max_tokens=64, pad_id=0)


@pytest.mark.parametrize(
    ("count", "longest", "bucket"),
    [
        (1, 1, (1, 8)),
        (2, 8, (2, 8)),
        (3, 9, (4, 16)),
        (5, 64, (8, 64)),
        (32, 65, (32, 80)),
        (33, 128, (64, 128)),
        (1, 129, (1, 160)),
        (256, 500, (256, 512)),
    ],
)
def test_a_shape_is_rounded_up(count: int, longest: int, bucket: tuple[int, int]) -> None:
    assert bucket_of(count, longest, max_tokens=512) == bucket


@pytest.mark.parametrize("max_tokens", [1, 7, 60, 500, 512])
def test_shapes_are_few_and_hold_every_batch(max_tokens: int) -> None:
    seen = set()
    for longest in range(1, max_tokens + 1):
        rows, length = bucket_of(3, longest, max_tokens=max_tokens)
        assert rows == 4
        assert longest <= length <= max_tokens
        assert length <= max(longest + 7, 1.25 * longest)
        seen.add(length)
    assert len(seen) <= 20


def test_the_rectangle_has_the_texts_first_and_no_row_without_a_token() -> None:
    batch = TokenBatch.of([Encoding([5, 6, 7]), Encoding([8])])
    ids, mask = rectangle(batch, 9, (4, 5))
    assert ids.tolist() == [[5, 6, 7, 9, 9], [8, 9, 9, 9, 9], [9] * 5, [9] * 5]
    assert mask.tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]


def bound(inputs: Sequence[str] = BERT_INPUTS, *, integers: Any = "int64") -> BoundSession:
    """The tiny classifier on bound buffers of the CPU."""
    session = onnxruntime.InferenceSession(
        make_onnx(weights(), inputs=inputs, integers=integers), providers=["CPUExecutionProvider"]
    )
    kind: Integers = np.int32 if integers == "int32" else np.int64
    return BoundSession(session, device="cpu", inputs=dict.fromkeys(inputs, kind), shape=SHAPE)


@pytest.mark.parametrize("inputs", [BERT_INPUTS, PLAIN_INPUTS])
@pytest.mark.parametrize("integers", ["int32", "int64"])
def test_bound_buffers_give_each_text_its_logits_in_order(inputs: Sequence[str], integers: str) -> None:
    session = bound(inputs, integers=integers)
    texts = encodings()
    expected = [weights().logits(text.ids) for text in texts]
    np.testing.assert_allclose(session.run(TokenBatch.of(texts)), expected, atol=1e-5)
    for text, one in zip(texts, expected, strict=True):
        np.testing.assert_allclose(session.run(TokenBatch.of([text])), [one], atol=1e-5)


def test_nothing_of_a_call_is_left_in_the_buffers_of_its_shape() -> None:
    session = bound()
    large, small = encodings((8, 8, 8, 8), seed=1), encodings((2, 1, 3), seed=2)
    first = session.run(TokenBatch.of(large))
    kept = first.copy()
    again = session.run(TokenBatch.of(small))
    np.testing.assert_allclose(again, [weights().logits(text.ids) for text in small], atol=1e-5)
    np.testing.assert_array_equal(first, kept)


def test_callers_at_the_same_time_do_not_share_buffers() -> None:
    session = bound()
    callers, rounds = 4, 50
    start = threading.Barrier(callers)
    wrong: list[int] = []

    def call(number: int) -> None:
        texts = encodings((5, 4, 3), seed=number)
        expected = [weights().logits(text.ids) for text in texts]
        start.wait()
        answers = [session.run(TokenBatch.of(texts)) for _ in range(rounds)]
        wrong.extend(number for one in answers if not np.allclose(one, expected, atol=1e-5))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_call_that_failed_leaves_the_next_one_right() -> None:
    session = bound()
    bad = TokenBatch.of([Encoding([10**6, 1])])
    with pytest.raises(Exception, match="out of data bounds"):
        session.run(bad)
    text = encodings((2,))[0]
    np.testing.assert_allclose(session.run(TokenBatch.of([text])), [weights().logits(text.ids)], atol=1e-5)
