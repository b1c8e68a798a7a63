"""The gate of a version: compares what the service's engine says with the eager model, on real masks.

Knows nothing of how a graph was made, of manifests or of the model store.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from service.classifier import Activation, activate
from service.core import FloatArray, TokenBatch
from service.engines import Engine, pad
from training.config import ConfigError

BATCHES = (1, 2, 3, 7, 32)
LENGTHS = (2, 3, 16, 127, 128)
LOGIT_BOUNDS = {"float32": 1e-3, "float16": 0.05, "int8": 1.0}
"""Largest |Δlogit| against the eager model with rounded weights, over the grid and the golden texts."""
RERUN_BOUNDS = {"float32": 1e-3, "float16": 0.05, "int8": 0.05}
"""Largest |Δlogit| between two ways to run a file: another processor, or a graph that is not optimised."""
COMPANY_BOUND = 1e-4
"""Largest change of a probability by the other texts of a batch."""
FLOAT16_COMPANY_BOUND = 0.005
"""The same where it is computed with 11 bits of fraction."""
COMPANY_ITEMS = 512


class ParityError(ConfigError):
    """The model in the file is not the model that was trained."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a batch of tokens is made from: ids round a text, ids of words, and the id that pads."""

    special: tuple[int, ...]
    words: tuple[int, ...]
    pad_id: int


def grid(vocabulary: Vocabulary, max_tokens: int, *, seed: int = 0) -> Iterator[TokenBatch]:
    """Batches of 1 to 32 texts with longest lengths from 2 to `max_tokens`.

    The first text of a batch has the full length and the others any, so that masks are real. Ids are random.
    """
    dice = np.random.default_rng(seed)
    least = len(vocabulary.special)
    lengths = sorted({max(least, length) for length in (*LENGTHS, max_tokens) if length <= max_tokens})
    for longest in lengths:
        for count in BATCHES:
            sizes = dice.integers(least, longest + 1, count)
            sizes[0] = longest
            yield join([_random_text(vocabulary, int(size), dice) for size in sizes])


def join(texts: Sequence[Sequence[int]]) -> TokenBatch:
    """Ids of each text laid end to end."""
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    return TokenBatch(np.concatenate([np.asarray(text, dtype=np.int64) for text in texts]), lengths)


def eager_logits(model: PreTrainedModel, batch: TokenBatch, pad_id: int) -> FloatArray:
    """float32[n, labels] of the PyTorch model, with its own way to make a mask."""
    ids, mask = pad(batch, pad_id)
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits
    result: FloatArray = logits.numpy()
    return result


class Plain(Protocol):
    """A file run without any optimisation."""

    def run(self, batch: TokenBatch) -> FloatArray:
        """Logits float32[n, labels]."""
        ...


class PlainSession:
    """An ONNX file run by onnxruntime without any optimisation of the graph."""

    def __init__(self, content: bytes, pad_id: int) -> None:
        settings = onnxruntime.SessionOptions()
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        settings.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(content, settings, providers=["CPUExecutionProvider"])
        self._pad_id = pad_id

    def run(self, batch: TokenBatch) -> FloatArray:
        """Logits float32[n, labels]."""
        ids, mask = pad(batch, self._pad_id)
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        wanted = {node.name: feed[node.name] for node in self._session.get_inputs()}
        logits: FloatArray = self._session.run(None, wanted)[0]
        return logits


def check_grid(
    engine: Engine,
    plain: Plain,
    batches: Sequence[TokenBatch],
    expected: Sequence[FloatArray],
) -> float:
    """Holds the engine to the eager logits (the largest |Δlogit| is returned) and to the plain run.

    Raises ParityError with the shape of the batch that is off.
    """
    worst = 0.0
    for batch, reference in zip(batches, expected, strict=True):
        logits = engine.run(batch)
        off = _distance(logits, reference)
        _hold(
            off, LOGIT_BOUNDS[engine.precision], f"{engine.precision}, {_shape(batch)}: off the eager model"
        )
        rerun = _distance(logits, plain.run(batch))
        _hold(
            rerun,
            RERUN_BOUNDS[engine.precision],
            f"{engine.precision}, {_shape(batch)}: optimising changes it",
        )
        worst = max(worst, off)
    return worst


def check_company(
    engine: Engine,
    texts: Sequence[Sequence[int]],
    activation: Activation,
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> tuple[float, int]:
    """The largest change of a probability by who is in the batch, and on how many of the texts (at most 512).

    Each is run alone, in random batches of 16, and with its like in length by 8. Raises ParityError above the
    bound.
    """
    step = -(-len(texts) // COMPANY_ITEMS)
    chosen = list(texts[::step])
    count = len(chosen)
    by_length = sorted(range(count), key=lambda index: len(chosen[index]))
    shuffled = np.random.default_rng(seed).permutation(count).tolist()

    def chances(order: Sequence[int], items: int) -> NDArray[np.float64]:
        logits = run_all(engine, chosen, order, items=items)
        return activate(logits, activation, temperature=temperature)

    alone = chances(range(count), 1)
    worst = 0.0
    for order, items in ((shuffled, 16), (by_length, 8)):
        worst = max(worst, float(np.abs(chances(order, items) - alone).max()))
    bound = FLOAT16_COMPANY_BOUND if engine.precision == "float16" else COMPANY_BOUND
    _hold(worst, bound, f"{engine.precision}: a probability depends on the other texts of a batch")
    return worst, count


def run_all(
    engine: Engine, texts: Sequence[Sequence[int]], order: Sequence[int], *, items: int
) -> FloatArray:
    """Logits float32[n, labels] in the order of the texts, which are run in batches in the order given."""
    logits = np.empty((len(texts), engine.labels), dtype=np.float32)
    for start in range(0, len(order), items):
        chosen = list(order[start : start + items])
        logits[chosen] = engine.run(join([texts[index] for index in chosen]))
    return logits


def check_same_weights(model: PreTrainedModel, rebuilt: PreTrainedModel) -> None:
    """Holds the model read back from the file to the eager one, bit by bit. Raises ParityError."""
    ours, theirs = model.state_dict(), rebuilt.state_dict()
    different = sorted(set(ours) ^ set(theirs)) + [
        name for name in ours if name in theirs and not torch.equal(ours[name], theirs[name])
    ]
    if different:
        raise ParityError(f"the file gives back other weights: {different[0]} and {len(different) - 1} more")


def _random_text(vocabulary: Vocabulary, size: int, dice: np.random.Generator) -> list[int]:
    first, *last = vocabulary.special
    body = dice.choice(vocabulary.words, size - len(vocabulary.special)).tolist()
    return [first, *body, *last]


def _distance(logits: FloatArray, reference: FloatArray) -> float:
    if logits.shape != reference.shape:
        raise ParityError(f"logits of shape {logits.shape}, the eager model gives {reference.shape}")
    return float(np.abs(logits - reference).max())


def _hold(value: float, bound: float, what: str) -> None:
    # Written so that NaN fails.
    if not value <= bound:
        raise ParityError(f"{what}: {value:.2g}, and {bound:g} is allowed")


def _shape(batch: TokenBatch) -> str:
    return f"{len(batch)} texts of up to {int(batch.lengths.max())} tokens"
