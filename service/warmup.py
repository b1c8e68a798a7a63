"""Proves a loaded engine before it serves: every shape is run, and the golden texts get their known answers.

Blocks. Knows nothing of queues, settings or HTTP.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from service.classifier import activate
from service.core import Encoding, FloatArray, TokenBatch
from service.engines import FORMATS, Engine
from service.errors import StartupError
from service.store import Manifest, form
from service.tokenizer import Tokenizer

SHORTEST = 3
COMPANY_BOUND = 1e-4
"""Largest change of a probability by the other texts of a batch."""
COMPANY_BOUNDS = {"bfloat16": 0.01, "float16": 0.005}
"""The same where it is computed with 8 and with 11 bits of fraction."""
MADE_AT_LOAD = {
    "openvino/bfloat16": ("onnx/float32", 0.1),
    "torchscript/float16": ("torchscript/float32", 0.05),
}
"""What an engine makes of the file of another form: that form, and how far the logits may be from its logits.

The bounds are measured in docs/adr/0011 and 0013.
"""


def shapes(*, max_tokens: int, max_batch_items: int, max_batch_tokens: int) -> list[tuple[int, int]]:
    """The (texts, length) that stand for all that batches can be, those of the most tokens first.

    Lengths double from the shortest text to the longest. Of each length there is one text, which always fits
    as in the batcher, and the most that fit: on a CPU the shapes in between cost nothing extra later.
    """
    pairs = {
        (count, length)
        for length in _doubling(SHORTEST, max_tokens)
        for count in (1, max(1, min(max_batch_items, max_batch_tokens // length)))
    }
    return sorted(pairs, key=lambda pair: pair[0] * pair[1], reverse=True)


def _doubling(start: int, end: int) -> Iterator[int]:
    value = min(start, end)
    while value < end:
        yield value
        value *= 2
    yield end


def warm_up(
    engine: Engine,
    grid: Sequence[tuple[int, int]],
    *,
    lanes: int,
    sample: Encoding,
    go_on: Callable[[], bool],
) -> None:
    """Run every shape in all lanes at the same time, the largest first, so that memory is at its peak.

    Args:
        sample: a text whose tokens fill the shapes.
        go_on: asked between two shapes; when it says no, the warm-up ends early.

    Raises:
        StartupError: the engine failed on a shape.
    """

    def run_grid() -> None:
        for count, length in grid:
            if go_on():
                ids = np.resize(np.array(sample.ids, dtype=np.int64), count * length)
                _run(engine, TokenBatch(ids, np.full(count, length, dtype=np.int64)))

    with ThreadPoolExecutor(lanes, thread_name_prefix="warm-up") as executor:
        for done in [executor.submit(run_grid) for _ in range(lanes)]:
            done.result()


def check_golden_texts(
    engine: Engine, tokenizer: Tokenizer, manifest: Manifest, *, max_batch_tokens: int = 1024
) -> None:
    """Compare what the engine says of the golden texts with what the manifest says, alone and in company.

    Args:
        max_batch_tokens: the largest batch that will be served; company is no larger, to need no more memory.

    Raises:
        StartupError: a logit is off by more than the bound of the file, a label is another one, or an answer
            depends on the other texts of its batch.
    """
    key, bound = _expectation(engine, manifest)
    company_bound = COMPANY_BOUNDS.get(engine.precision, COMPANY_BOUND)
    encodings = [tokenizer.encode(golden.text) for golden in manifest.golden_texts]
    expected = np.array([golden.logits[key] for golden in manifest.golden_texts], dtype=np.float32)
    alone = np.concatenate([_run(engine, TokenBatch.of([encoding])) for encoding in encodings])
    _compare(alone, expected, bound=bound)
    for places in companies([len(one) for one in encodings], max_batch_tokens):
        together = _run(engine, TokenBatch.of([encodings[place] for place in places]))
        chances = [
            activate(logits, manifest.activation, temperature=manifest.temperature)
            for logits in (alone[places], together)
        ]
        change = np.abs(chances[0] - chances[1]).max(axis=1)
        worst = int(change.argmax())
        if not change[worst] <= company_bound:
            raise StartupError(
                f"golden text {places[worst] + 1}: its probability changes by {change[worst]:.2g} in company "
                f"and {company_bound:g} is allowed: its answer depends on the other texts of a batch"
            )


def _expectation(engine: Engine, manifest: Manifest) -> tuple[str, float]:
    """The key of the logits that the engine must give, and how far off they may be.

    They are those of the file that it reads.

    Raises:
        StartupError: the version has no such file, or another number of labels.
    """
    bounds = {form(file): file.logit_bound for file in manifest.models}
    key = f"{FORMATS.get(engine.name, engine.name)}/{engine.precision}"
    key, own_bound = MADE_AT_LOAD.get(f"{engine.name}/{engine.precision}", (key, None))
    if key not in bounds or engine.labels != len(manifest.labels):
        raise StartupError(
            f"the engine gives {engine.labels} logits in {key}, which the version does not have"
        )
    return key, own_bound or bounds[key]


def companies(lengths: Sequence[int], max_batch_tokens: int) -> list[list[int]]:
    """Batches of several texts (by their places) that the service could run.

    Texts of like length go together. A longest one that is left over goes beside the shortest, whose row is
    then nearly all padding. A text too long for any company is left out.
    """
    batches: list[list[int]] = []
    order = sorted(range(len(lengths)), key=lambda place: lengths[place])
    for place in order:
        if batches and (len(batches[-1]) + 1) * lengths[place] <= max_batch_tokens:
            batches[-1].append(place)
        else:
            batches.append([place])
    if len(batches) > 1 and len(batches[-1]) == 1 and 2 * lengths[order[-1]] <= max_batch_tokens:
        batches[-1].append(order[0])
    return [batch for batch in batches if len(batch) > 1]


def _compare(logits: FloatArray, expected: FloatArray, *, bound: float) -> None:
    distance = np.abs(logits - expected).max(axis=1)
    worst = int(distance.argmax())
    if not distance[worst] <= bound:
        raise StartupError(
            f"golden text {worst + 1}: a logit is off by {distance[worst]:.2g}, and {bound:g} is allowed: "
            "the tokenizer, the model or this processor is not the one that the version was made with"
        )
    same = (
        (logits > 0) == (expected > 0) if expected.shape[1] == 1 else logits.argmax(1) == expected.argmax(1)
    )
    if not same.all():
        raise StartupError(
            f"golden text {int(same.argmin()) + 1}: its best label is not the one in the manifest"
        )


def _run(engine: Engine, batch: TokenBatch) -> FloatArray:
    try:
        return engine.run(batch)
    except Exception as error:
        longest = int(batch.lengths.max())
        raise StartupError(f"the engine failed on {len(batch)} × {longest} tokens: {error}") from error
