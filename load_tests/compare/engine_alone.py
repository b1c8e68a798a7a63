"""What the engine does with the same texts when nothing stands before it: the bound on any server here.

The service's own engine, called from as many threads as there are cores. Knows nothing of HTTP or of servers.
"""

import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from load_tests.chosen import chosen_version
from service.core import TokenBatch
from service.engines import EngineOptions
from service.engines.onnx import OnnxEngine, open_engine
from service.tokenizer import Tokenizer

LENGTH_ITEMS = 8
MAX_TEXT_CHARS = 32_768


@dataclass(frozen=True, slots=True)
class Bound:
    """One round of the engine alone.

    Attributes:
        single_rate: texts a second, one by one, on all cores.
        length_rate: texts a second, in batches of 8 of like length, on all cores.
        lone_p50_ms: of one call with one text, nothing beside it.
    """

    single_rate: float
    length_rate: float
    lone_p50_ms: float


class EngineAlone:
    """The int8 file of a version and the tokens of the texts, ready to run. `close` it."""

    def __init__(self, version: Path, texts: Sequence[str], *, cores: int) -> None:
        opened = chosen_version(version)
        tokenizer = Tokenizer.load(
            opened.read(opened.manifest.tokenizer),
            max_tokens=opened.manifest.max_tokens,
            max_text_chars=MAX_TEXT_CHARS,
        )
        encodings = [tokenizer.encode(text) for text in texts]
        tokenizer.close()
        ordered = sorted(encodings, key=len)
        starts = range(0, len(ordered), LENGTH_ITEMS)
        self._single = [TokenBatch.of([one]) for one in encodings]
        self._by_length = [TokenBatch.of(ordered[start : start + LENGTH_ITEMS]) for start in starts]
        # A run that ends before the list does must not have seen the short ones only.
        random.Random(1).shuffle(self._by_length)  # noqa: S311 - seeded dice
        self._cores = cores
        self._engine: OnnxEngine = open_engine(opened, EngineOptions(precision="int8", lanes=cores))
        for batch in [*self._single[:50], *self._by_length[:10]]:
            self._engine.run(batch)

    def measure(self, seconds: float) -> Bound:
        """Each of the three ways for so long."""
        lone_s = self._run(self._single, seconds, callers=1)[1]
        return Bound(
            single_rate=self._run(self._single, seconds, callers=self._cores)[0],
            length_rate=self._run(self._by_length, seconds, callers=self._cores)[0],
            lone_p50_ms=statistics.median(lone_s) * 1e3,
        )

    def close(self) -> None:
        """Let the model go."""
        self._engine.close()

    def _run(
        self, batches: Sequence[TokenBatch], seconds: float, *, callers: int
    ) -> tuple[float, list[float]]:
        """Texts a second, and the seconds of each call, of callers that share the batches in turns."""
        turns = _Turns(batches)
        calls_s: list[float] = []
        counts = [0] * callers
        together = threading.Barrier(callers)

        def call(caller: int) -> None:
            together.wait()
            end_s = time.perf_counter() + seconds
            now_s = time.perf_counter()
            while now_s < end_s:
                batch = next(turns)
                began_s = now_s
                self._engine.run(batch)
                now_s = time.perf_counter()
                calls_s.append(now_s - began_s)
                counts[caller] += len(batch)

        threads = [threading.Thread(target=call, args=(caller,)) for caller in range(callers)]
        began_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts) / (time.perf_counter() - began_s), calls_s


class _Turns(Iterator[TokenBatch]):
    """The batches again and again, for several threads: a generator cannot be shared."""

    def __init__(self, batches: Sequence[TokenBatch]) -> None:
        self._batches = batches
        self._next = 0
        self._lock = threading.Lock()

    def __next__(self) -> TokenBatch:
        with self._lock:
            batch = self._batches[self._next % len(self._batches)]
            self._next += 1
        return batch
