"""Times an engine for the check of a GPU, alone and behind the service. Knows nothing of what is right."""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from load_tests import alone, driven
from load_tests.compare import wrk
from load_tests.service_process import ServiceProcess
from service.core import Encoding, TokenBatch
from service.engines import Engine

BY_LENGTH = (8, 32, 128)
LIST_TEXTS = 32
CONNECTIONS = 64


@dataclass(frozen=True, slots=True)
class Figure:
    """How fast a plan went: texts a second by the clock, and the median time of a call."""

    engine: str
    plan: str
    texts_per_s: float
    p50_ms: float


def bench(engine: Engine, name: str, texts: Sequence[Encoding], *, seconds: float) -> Iterator[Figure]:
    """One by one, then by length in 8, 32 and 128; each plan for about so many seconds, from one caller."""
    for items in (1, *BY_LENGTH):
        plan = "one by one" if items == 1 else f"by length, {items}"
        yield _time(engine, alone.batches(texts, items), names=(name, plan), seconds=seconds)


def _time(engine: Engine, batches: Sequence[TokenBatch], *, names: tuple[str, str], seconds: float) -> Figure:
    end_s = time.perf_counter() + seconds
    for batch in batches:  # shapes are seen before they are timed, as far as there is time
        engine.run(batch)
        if time.perf_counter() > end_s:
            break
    spent_s: list[float] = []
    count = 0
    end_s = time.perf_counter() + seconds
    for batch in cycle(batches):
        started_s = time.perf_counter()
        engine.run(batch)
        now_s = time.perf_counter()
        spent_s.append(now_s - started_s)
        count += len(batch)
        if now_s >= end_s:
            break
    return Figure(*names, texts_per_s=count / sum(spent_s), p50_ms=1e3 * statistics.median(spent_s))


def served(texts: Sequence[str], *, seconds: float, **settings: Any) -> list[Figure]:
    """The service with these settings under wrk: single texts over 64 connections, lists of 32 over 8.

    Raises:
        WrkError: wrk is not there.
        RuntimeError: the server did not start, or a request failed.
    """
    name = f"served, {settings.get('engine')}/{settings.get('precision')} on {settings.get('device')}"
    figures = []
    ways = (("single texts", 1, CONNECTIONS), (f"lists of {LIST_TEXTS}", LIST_TEXTS, 8))
    with tempfile.TemporaryDirectory(prefix="valence-gpu-") as folder, ServiceProcess(**settings) as server:
        server.wait_ready()
        for plan, items, connections in ways:
            bodies = Path(folder) / str(items)
            starts = range(0, len(texts) - items + 1, items)
            wrk.write_bodies(
                bodies,
                ({"inputs": list(texts[at : at + items]) if items > 1 else texts[at]} for at in starts),
            )
            load = driven.drive(server, bodies, connections=connections, seconds=seconds).load
            rate = load.requests * items / load.duration_s
            figures.append(Figure(name, f"{plan}, {connections} connections", rate, load.p50_ms))
    return figures
