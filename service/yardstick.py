"""Measures one way to run a model for a short time, on texts like those that callers send.

Goes the way of real requests without HTTP: many callers, the batcher, lanes, the classifier. Blocks.
Knows nothing of what is compared or chosen.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from service.batcher import Batcher, Limits
from service.classifier import Classifier, Result
from service.core import Encoding
from service.engines import Engine
from service.errors import EngineFailed
from service.metrics import Metrics
from service.settings import Settings
from service.store import Manifest

CALLERS = 32
SHORT_TOKENS = range(5, 61)
LONG_TOKENS = (200, 350, 512)
"""Lengths of the texts: one sentence of each, and a few reviews among them."""
LONE_TEXTS = 5
LEAST_ROUND_S = 0.02
OVERTIME = 3
"""A pass over the texts that takes so many times the time of its round is broken off."""

_CLOSE_S = 60.0


class Figures(NamedTuple):
    """Of one round: texts of mean length a second, seconds of a lone short text, CPU seconds a text."""

    texts_per_s: float
    lone_s: float
    cpu_s_per_text: float


class Yardstick:
    """Rounds that can be compared: the same texts and callers for whatever is measured.

    Args:
        golden: the golden texts of the version, of which the texts are made.
    """

    def __init__(self, manifest: Manifest, settings: Settings, golden: Sequence[Encoding]) -> None:
        self._manifest = manifest
        self._settings = settings
        self._metrics = Metrics()  # of its own: what is measured here was asked by nobody
        self._texts = texts_like_real_ones(golden, manifest.max_tokens)
        short = [text for text in self._texts if len(text) <= SHORT_TOKENS[-1]]
        self._lone = short[:LONE_TEXTS]

    def measure(self, engine: Engine, *, lanes: int, max_batch_tokens: int, seconds: float) -> Figures:
        """One round, of about so many seconds.

        Raises:
            EngineFailed: the engine had no answer for a text.
        """
        return asyncio.run(self._round(engine, lanes, max_batch_tokens, seconds))

    async def _round(self, engine: Engine, lanes: int, max_batch_tokens: int, seconds: float) -> Figures:
        manifest, settings = self._manifest, self._settings
        classify = Classifier(
            engine, self._metrics, activation=manifest.activation, temperature=manifest.temperature
        )
        limits = Limits(
            max_batch_items=settings.max_batch_items,
            max_batch_tokens=max_batch_tokens,
            max_padding_tokens=settings.max_padding_tokens,
            linger_s=settings.batch_linger_s,
        )
        batcher: Batcher[Encoding, Result] = Batcher(classify, lanes=lanes, limits=limits)
        await batcher.start()
        try:
            lone_s = [await _timed(batcher, one) for one in self._lone]
            left_s = max(LEAST_ROUND_S, seconds - sum(lone_s))
            started_s, cpu_started_s = time.perf_counter(), time.process_time()
            texts = _passes(self._texts, left_s)
            tokens = sum(await asyncio.gather(*(_call(batcher, texts) for _ in range(CALLERS))))
            took_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_started_s
        finally:
            await batcher.close(_CLOSE_S)
        # By tokens, so that a pass that was broken off counts for what was done of it.
        done = tokens * len(self._texts) / sum(map(len, self._texts))
        return Figures(done / took_s, median(lone_s), cpu_s / done)


def texts_like_real_ones(golden: Sequence[Encoding], max_tokens: int) -> list[Encoding]:
    """Texts of many lengths, cut from the tokens of the golden texts between their two special tokens.

    The long ones are spread, so that none is left over at the end, when the other lanes have no work.
    """
    tokens = [token for one in golden for token in (one.ids[1:-1] or one.ids)]
    first, last = golden[0].ids[0], golden[0].ids[-1]
    start = 0
    texts = []
    for wanted in (*SHORT_TOKENS, *LONG_TOKENS):
        length = min(wanted, max_tokens)
        body = [tokens[(start + place) % len(tokens)] for place in range(length - 2)]
        start += length
        texts.append(Encoding([first, *body, last]))
    short, long = texts[: len(SHORT_TOKENS)], texts[len(SHORT_TOKENS) :]
    random.Random(0).shuffle(short)  # noqa: S311 - always the same order
    for number, text in enumerate(long):
        short.insert(number * len(short) // len(long), text)
    return short


def _passes(texts: Sequence[Encoding], round_s: float) -> Iterator[Encoding]:
    """The texts again and again, until the time is over at the end of a pass."""
    started_s = time.perf_counter()
    yield texts[0]
    rest = texts[1:]
    while True:
        for one in rest:
            if time.perf_counter() - started_s > OVERTIME * round_s:
                return
            yield one
        if time.perf_counter() - started_s > round_s:
            return
        rest = texts


async def _call(batcher: Batcher[Encoding, Result], texts: Iterator[Encoding]) -> int:
    """Ask for one text after the other, and give the tokens of all."""
    tokens = 0
    for one in texts:
        await _timed(batcher, one)
        tokens += len(one)
    return tokens


async def _timed(batcher: Batcher[Encoding, Result], text: Encoding) -> float:
    started_s = time.perf_counter()
    [outcome] = await batcher.submit([text], [len(text)])
    if outcome.error is not None:
        raise outcome.error
    if isinstance(outcome.value, EngineFailed):
        raise outcome.value
    return time.perf_counter() - started_s
