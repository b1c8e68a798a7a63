"""One batch in a lane: encodings to logits to predictions, in one blocking call.

Knows nothing of queues, deadlines or HTTP.
"""

import time
from collections.abc import Sequence
from threading import current_thread
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from service.core import Encoding, FloatArray, Prediction, TokenBatch
from service.engines import Engine
from service.errors import EngineFailed
from service.metrics import Metrics
from service.tracing import Batch

Activation: TypeAlias = Literal["softmax", "sigmoid"]
Result: TypeAlias = Prediction | EngineFailed


class Traced(NamedTuple):
    """A result, and the batch that gave it."""

    result: Result
    batch: Batch


class Classifier:
    """What the lanes call. May be called from several threads at once."""

    def __init__(
        self, engine: Engine, metrics: Metrics, *, activation: Activation, temperature: float
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._activation: Activation = activation
        self._temperature = temperature

    def __call__(self, encodings: Sequence[Encoding], *, ran: list[TokenBatch] | None = None) -> list[Result]:
        """A prediction for each text, in order; an error for one whose logits are not finite numbers.

        Texts with the same tokens share a row of the batch.

        Args:
            ran: gets the batch that the engine ran.

        Raises:
            Exception: whatever the engine raises; it then has no answer for any text of this batch.
        """
        numbers: dict[tuple[int, ...], int] = {}
        row_of = [numbers.setdefault(tuple(one.ids), len(numbers)) for one in encodings]
        twins = len(encodings) - len(numbers)
        batch = TokenBatch.of([Encoding(ids) for ids in numbers] if twins else encodings)
        started_s = time.perf_counter()
        try:
            logits = self._engine.run(batch)
        finally:
            self._metrics.batch_ran(
                items=len(batch),
                tokens=len(batch.ids),
                padded_tokens=batch.padded_tokens,
                duration_s=time.perf_counter() - started_s,
                twins=twins,
            )
        if logits.shape != (len(batch), self._engine.labels):
            # One column too many would be served as a label, one too few would fail the whole request.
            raise EngineFailed(f"the engine gave an array of shape {logits.shape} for {len(batch)} texts")
        if ran is not None:
            ran.append(batch)
        finite = np.all(np.isfinite(logits), axis=1, keepdims=True)
        usable = np.where(finite, logits, np.float32(0))
        scores = activate(usable, self._activation, temperature=self._temperature)
        rows = list(zip(finite[:, 0].tolist(), logits.tolist(), scores.tolist(), strict=True))
        return [_result(encoding, *rows[row]) for encoding, row in zip(encodings, row_of, strict=True)]

    def traced(self, encodings: Sequence[Encoding]) -> list[Traced]:
        """The same, each with the batch that it was in."""
        ran: list[TokenBatch] = []
        started_s = time.perf_counter()
        results = self(encodings, ran=ran)
        batch = Batch(
            started_s,
            time.perf_counter(),
            texts=len(encodings),
            items=len(ran[0]),
            tokens=len(ran[0].ids),
            padded_tokens=ran[0].padded_tokens,
            lane=current_thread().name,
        )
        return [Traced(result, batch) for result in results]


def _result(encoding: Encoding, is_finite: bool, logits: list[float], scores: list[float]) -> Result:
    if not is_finite:
        return EngineFailed("The model's answer for this text is not a finite number.")
    return Prediction(tuple(logits), tuple(scores), len(encoding), encoding.truncated)


def activate(logits: FloatArray, activation: Activation, *, temperature: float) -> NDArray[np.float64]:
    """Probabilities float64[n, labels] of logits float32[n, labels], divided by the temperature first.

    softmax shares 1 among the labels of a row, sigmoid judges each label by itself; no finite row overflows.
    Temperature scaling: Guo et al. 2017, "On Calibration of Modern Neural Networks".
    """
    scaled = logits.astype(np.float64) / temperature
    if activation == "softmax":
        powers = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        shares: NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
        return shares
    return 0.5 * (1 + np.tanh(0.5 * scaled))
