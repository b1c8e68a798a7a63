"""The engine that the service chooses, called with nothing before it: the bound on what can be served here.

Knows nothing of HTTP. Its CPU time is counted, beside its speed.
"""

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from load_tests.chosen import chosen_version
from service.core import Encoding, TokenBatch
from service.engines import EngineOptions, open_engine
from service.quota import cpu_quota, plan_lanes
from service.settings import Settings
from service.tokenizer import Tokenizer

LENGTH_ITEMS = 8  # of like length in a batch: what is fastest on a CPU


@dataclass(frozen=True, slots=True)
class Speed:
    """Texts a second of all callers, µs of CPU a text, and the median call."""

    texts_per_s: float
    cpu_us: float
    p50_ms: float


@dataclass(slots=True)
class _Calls:
    """The batches in turns, and what the callers have done."""

    batches: Sequence[TokenBatch]
    end_s: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    turn: int = 0
    texts: int = 0
    calls_s: list[float] = field(default_factory=list)

    def next(self) -> TokenBatch | None:
        with self.lock:
            self.turn += 1
            return None if time.perf_counter() >= self.end_s else self.batches[self.turn % len(self.batches)]

    def made(self, batch: TokenBatch, seconds: float) -> None:
        with self.lock:
            self.texts += len(batch)
            self.calls_s.append(seconds)


class Alone:
    """A version, with the engine, precision, lanes and threads that a server takes. `close` it."""

    def __init__(
        self, folder: Path | None = None, *, precision: str = "auto", lanes: int | None = None
    ) -> None:
        """Load the version in this folder, or the one that is served. StartupError: as the service.

        Args:
            lanes: instead of those that a server takes, so many of one thread each.
        """
        settings = Settings.model_construct()
        version = chosen_version(folder)
        manifest = version.manifest
        self._tokenizer = Tokenizer.load(
            version.read(manifest.tokenizer),
            max_tokens=manifest.max_tokens,
            max_text_chars=settings.max_text_chars,
        )
        plan = plan_lanes(cpu_quota(), lanes, None if lanes is None else 1)
        self.lanes = plan.lanes
        options = EngineOptions(precision=precision, lanes=plan.lanes, threads_per_lane=plan.threads_per_lane)
        self._engine = open_engine(version, options)
        self.about = (
            f"{self._engine.name} {self._engine.precision}, {plan.lanes} × {plan.threads_per_lane} threads"
        )

    def encode(self, texts: Sequence[str]) -> list[Encoding]:
        """As the service reads them."""
        return [self._tokenizer.encode(text) for text in texts]

    def run(self, batches: Sequence[TokenBatch], *, seconds: float, callers: int) -> Speed:
        """So many callers share the batches, in turns, for so long."""
        began_s, cpu_s = time.perf_counter(), time.process_time()
        calls = _Calls(batches, began_s + seconds)
        threads = [threading.Thread(target=self._call, args=(calls,)) for _ in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        cpu_s = time.process_time() - cpu_s
        rate = calls.texts / (time.perf_counter() - began_s)
        return Speed(rate, 1e6 * cpu_s / calls.texts, 1e3 * statistics.median(calls.calls_s))

    def run_cpu_s(self, batch: TokenBatch) -> float:
        """CPU seconds of one call."""
        began_s = time.process_time()
        self._engine.run(batch)
        return time.process_time() - began_s

    def close(self) -> None:
        """Let the model go."""
        self._tokenizer.close()
        self._engine.close()

    def _call(self, calls: _Calls) -> None:
        while (batch := calls.next()) is not None:
            began_s = time.perf_counter()
            self._engine.run(batch)
            calls.made(batch, time.perf_counter() - began_s)


def batches(texts: Sequence[Encoding], items: int) -> list[TokenBatch]:
    """Batches of so many texts of like length, in mixed order; single texts in their own order."""
    ordered = list(texts) if items == 1 else sorted(texts, key=len)
    made = [TokenBatch.of(ordered[start : start + items]) for start in range(0, len(ordered), items)]
    # A short run must not meet the short ones alone: every 7th, from each start.
    return made if items == 1 else [batch for first in range(7) for batch in made[first::7]]
