"""What the cache is worth: texts a second through the predictor, without HTTP, when texts come again.

Each caller asks for one text after another, drawn from real sentences by Zipf's law: the text of rank r comes
with a weight of 1 / r^skew, so that 0 is no favourite at all. The same draws with the cache off and on, in
turns. Also times the lane without twins and the cache's own work. Knows nothing of servers.

    VALENCE_DATA=… python -m load_tests.cache_bench [--seconds 3] [--callers 32] [--skews 0 0.8 1.1]
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import uvloop

from load_tests.texts import sentences, source
from load_tests.verdict import machine
from service.cache import Cache, TextOutcome
from service.core import Encoding, Prediction, Timings
from service.metrics import Metrics
from service.predictor import Predictor
from service.settings import Settings

ROOT = Path(__file__).parent.parent
SHAPES = ((32, 8), (32, 32), (8, 128), (2, 512))


@dataclass(frozen=True, slots=True)
class Row:
    """One run: texts a second, and the shares of them that were remembered or joined in flight."""

    texts_per_s: float
    hits: float
    shared: float


async def measure(
    settings: Settings, texts: Sequence[str], *, skew: float, seconds: float, callers: int
) -> Row:
    """Ask for `seconds`, `callers` at a time, of a fresh predictor."""
    metrics = Metrics()
    predictor = Predictor(settings, metrics)
    await predictor.start()
    weights = list(accumulate(1 / rank**skew for rank in range(1, len(texts) + 1)))
    answered = 0
    started_s = time.perf_counter()

    async def call(seed: int) -> None:
        nonlocal answered
        dice = random.Random(seed)  # noqa: S311
        while time.perf_counter() < started_s + seconds:
            for text in dice.choices(texts, cum_weights=weights, k=64):
                answer = await predictor.predict([text])
                assert isinstance(answer.outcomes[0], Prediction)  # noqa: S101
                answered += 1
                if time.perf_counter() >= started_s + seconds:
                    break
            await asyncio.sleep(0)  # who finds all remembered lets the others ask, too

    await asyncio.gather(*map(call, range(callers)))
    took_s = time.perf_counter() - started_s
    await predictor.stop(60)
    hits, shared = (
        (metrics.registry.get_sample_value(f"valence_cache_{name}_total") or 0) / answered
        for name in ("hits", "shared")
    )
    return Row(answered / took_s, hits, shared)


def twin_search_us(items: int, tokens: int) -> float:
    """Microseconds that a lane spends on the search for twins in a batch that has none; the least of many."""
    dice = random.Random(7)  # noqa: S311
    batch = [Encoding([dice.randrange(30_000) for _ in range(tokens)]) for _ in range(items)]

    def search() -> float:
        started_s = time.perf_counter()
        numbers: dict[tuple[int, ...], int] = {}
        _ = [numbers.setdefault(tuple(one.ids), len(numbers)) for one in batch]
        return time.perf_counter() - started_s

    return min(search() for _ in range(200)) * 1e6


async def hit_us(text: str) -> float:
    """Microseconds that the cache needs for a text that it knows; the least of many."""
    cache = Cache(1, Metrics(), model="model", secret=b"")

    async def run(texts: Sequence[str]) -> tuple[list[TextOutcome], Timings]:
        return [Prediction((1.0, -1.0), (0.9, 0.1), 9, truncated=False) for _ in texts], Timings()

    async def ask() -> float:
        started_s = time.perf_counter()
        await cache.answer([text], run, truncate=True, deadline=float("inf"))
        return time.perf_counter() - started_s

    await ask()
    return min([await ask() for _ in range(200)]) * 1e6


async def compare(options: argparse.Namespace) -> None:
    """Print the table."""
    texts = sentences()
    print(
        f"{machine()}; {len(texts)} texts: {source()}; {options.callers} callers, {options.seconds} s each\n"
    )
    print("| skew | cache | texts/s, median (all) | hits | joined in flight |")
    print("|---|---|---|---|---|")
    for skew in options.skews:
        rows: dict[int, list[Row]] = {0: [], options.items: []}
        for _ in range(options.rounds):
            for items, kept in rows.items():
                settings = Settings(model_store=ROOT / "model_store", device="cpu", cache_items=items)
                kept.append(
                    await measure(
                        settings, texts, skew=skew, seconds=options.seconds, callers=options.callers
                    )
                )
        for items, kept in rows.items():
            median = statistics.median(one.texts_per_s for one in kept)
            each = ", ".join(f"{one.texts_per_s:,.0f}" for one in kept)
            hits, shared = kept[-1].hits, kept[-1].shared
            print(
                f"| {skew} | {items or 'off'} | {median:,.0f} ({each}) | {hits:.0%} | {shared:.0%} |",
                flush=True,
            )
    print()
    for items, tokens in SHAPES:
        print(f"search for twins, {items} × {tokens} tokens: {twin_search_us(items, tokens):.0f} µs")
    for text in (texts[0], "x" * 2_000, "x" * 32_000):
        print(f"a hit, {len(text)} characters: {await hit_us(text):.1f} µs")


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description="The predictor with the cache off and on.")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--items", type=int, default=400, help="of the cache")
    parser.add_argument("--skews", type=float, nargs="*", default=[0.0, 0.8, 1.1])
    uvloop.run(compare(parser.parse_args()))


if __name__ == "__main__":
    main()
