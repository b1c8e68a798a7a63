"""What the service does of what its engine could: texts a second, and the latency of a lone request.

    VALENCE_DATA=… python -m load_tests.served [--seconds 5] [--rounds 3]

Alternating in one run: the engine alone by length and one by one, and `valence serve` driven by wrk with
single texts at 64 connections, lists of 32 at 8, and single texts at one. Ratios are taken within a round.
Knows nothing of how the service batches.
"""

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from load_tests import record, texts
from load_tests.alone import LENGTH_ITEMS, Alone, Speed, batches
from load_tests.compare import wrk
from load_tests.cpu_time import CpuTime
from load_tests.driven import drive
from load_tests.http_client import Client, scrape
from load_tests.record import Record
from load_tests.service_process import ServiceProcess
from load_tests.verdict import EXIT_CANNOT_RUN

LIST_TEXTS = 32
WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class Way:
    """A way to ask: so many texts a request, over so many connections."""

    name: str
    texts: int
    connections: int


SINGLES = Way("single texts, 64 connections", 1, 64)
LISTS = Way(f"lists of {LIST_TEXTS}, 8 connections", LIST_TEXTS, 8)
LONE = Way("single texts, 1 connection", 1, 1)


@dataclass(frozen=True, slots=True)
class Served:
    """One run of wrk. CPU in µs a text, padding as a share of the real tokens."""

    texts_per_s: float
    p50_ms: float
    p99_ms: float
    loop_us: float
    lanes_us: float
    generator_us: float
    batch_items: float
    padding: float


@dataclass(frozen=True, slots=True)
class Round:
    """One round: the engine alone by length, one by one, and by one caller; then the service."""

    by_length: Speed
    one_by_one: Speed
    lone: Speed
    served: dict[str, Served]


@dataclass(slots=True)
class Seen:
    """All rounds, and the share of a core that the idle server took before them."""

    engine: str
    idle_share: float
    rounds: list[Round] = field(default_factory=list)


def ask(server: ServiceProcess, way: Way, bodies: Path, *, seconds: float) -> Served:
    """wrk on the service for so long. Raises WrkError, and RuntimeError when a request failed."""
    metrics = _scrape(server.url)
    driven = drive(server, bodies, connections=way.connections, seconds=seconds)
    after, load = _scrape(server.url), driven.load
    _settle(server.url)
    count = load.requests * way.texts
    each = 1e6 / max(1, count)

    def grown(name: str) -> float:
        return after[name] - metrics[name]

    real = 'valence_tokens_total{kind="real"}', 'valence_tokens_total{kind="padding"}'
    return Served(
        texts_per_s=count / load.duration_s,
        p50_ms=load.p50_ms,
        p99_ms=load.p99_ms,
        loop_us=driven.cpu.main_s * each,
        lanes_us=driven.cpu.others_s * each,
        generator_us=load.cpu_s * each,
        batch_items=grown("valence_batch_items_sum") / max(1.0, grown("valence_batch_items_count")),
        padding=grown(real[1]) / max(1.0, grown(real[0])),
    )


def _settle(url: str) -> None:
    """Wait until nothing is run for clients that have gone: the next measurement would pay for it."""
    while (now := _scrape(url))["valence_queue_items"] or now["valence_lanes_busy"]:
        time.sleep(0.02)


def _scrape(url: str) -> dict[str, float]:
    async def look() -> dict[str, float]:
        client = Client(url)
        try:
            return await scrape(client)
        finally:
            client.close()

    return asyncio.run(look())


def measure(*, seconds: float, rounds: int) -> Seen:
    """Raises WrkError; RuntimeError: the server did not start, or a request failed."""
    chosen = texts.sentences()
    with (
        tempfile.TemporaryDirectory(prefix="valence-served-") as folder,
        contextlib.closing(Alone()) as engine,
        ServiceProcess() as server,
    ):
        bodies = {way: Path(folder) / str(way.texts) for way in (SINGLES, LISTS, LONE)}
        wrk.write_bodies(bodies[SINGLES], ({"inputs": text} for text in chosen))
        starts = range(0, len(chosen) - LIST_TEXTS + 1, LIST_TEXTS)
        wrk.write_bodies(bodies[LISTS], ({"inputs": chosen[at : at + LIST_TEXTS]} for at in starts))
        server.wait_ready()
        cpu, began_s = CpuTime.of(server.pid), time.perf_counter()
        time.sleep(seconds)  # an idle server is what is measured
        idle_s = (CpuTime.of(server.pid) - cpu).all_s
        seen = Seen(engine.about, idle_s / (time.perf_counter() - began_s))
        encodings = engine.encode(chosen)
        by_length, singles = batches(encodings, LENGTH_ITEMS), batches(encodings, 1)
        engine.run(by_length, seconds=WARM_UP_S, callers=engine.lanes)
        ask(server, SINGLES, bodies[SINGLES], seconds=WARM_UP_S)
        for _ in range(rounds):
            seen.rounds.append(
                Round(
                    by_length=engine.run(by_length, seconds=seconds, callers=engine.lanes),
                    served={
                        way.name: ask(server, way, file, seconds=seconds) for way, file in bodies.items()
                    },
                    one_by_one=engine.run(singles, seconds=seconds, callers=engine.lanes),
                    lone=engine.run(singles, seconds=seconds, callers=1),
                )
            )
    return seen


def report(seen: Seen) -> Record:
    """Medians of the rounds; each ratio is the median of those within a round."""
    made = Record(f"Served over the engine alone ({seen.engine})")
    made.figures = asdict(seen)
    alone = [
        ("by length in 8, all cores", [one.by_length for one in seen.rounds]),
        ("one by one, all cores", [one.one_by_one for one in seen.rounds]),
        ("one by one, one caller", [one.lone for one in seen.rounds]),
    ]
    made.table(
        ["engine alone", "texts/s", "CPU, µs a text", "p50, ms"],
        [[name, *_medians(runs, "texts_per_s:.0f", "cpu_us:.0f", "p50_ms:.2f")] for name, runs in alone],
    )
    served = {way: [one.served[way.name] for one in seen.rounds] for way in (SINGLES, LISTS, LONE)}
    columns = (
        "texts_per_s:.0f",
        "p50_ms:.1f",
        "p99_ms:.1f",
        "loop_us:.0f",
        "lanes_us:.0f",
        "generator_us:.0f",
    )
    head = "served", "texts/s", "p50, ms", "p99, ms", "loop, µs a text", "lanes", "generator"
    made.table(
        [*head, "texts a batch", "padding"],
        [
            [way.name, *_medians(runs, *columns, "batch_items:.1f", "padding:.1%")]
            for way, runs in served.items()
        ],
    )
    lanes = [_ratio(seen, partial(_lanes_share, way=way)) for way in (SINGLES, LISTS)]
    singles = _ratio(seen, lambda one: one.served[SINGLES.name].texts_per_s / one.one_by_one.texts_per_s)
    made.say(
        "CPU a text in the lanes over the engine alone by length in 8, its best: "
        f"{lanes[0]:.2f} for single texts, {lanes[1]:.2f} for lists. "
        f"Single texts a second over the engine one by one: {singles:.2f}."
    )
    made.goals = {
        "served singles": _ratio(seen, lambda one: _share(one, SINGLES)),
        "served lists": _ratio(seen, lambda one: _share(one, LISTS)),
        "lone latency": _ratio(seen, lambda one: one.served[LONE.name].p50_ms / one.lone.p50_ms),
        "idle": 100 * seen.idle_share,
    }
    return made


def _medians(runs: Sequence[Speed] | Sequence[Served], *columns: str) -> list[str]:
    """`name:format` of each column, the median of the runs."""
    pairs = (column.split(":") for column in columns)
    return [f"{statistics.median(getattr(one, name) for one in runs):{form}}" for name, form in pairs]


def _ratio(seen: Seen, of: Callable[[Round], float]) -> float:
    return statistics.median(map(of, seen.rounds))


def _lanes_share(one: Round, way: Way) -> float:
    return one.served[way.name].lanes_us / one.by_length.cpu_us


def _share(one: Round, way: Way) -> float:
    return one.served[way.name].texts_per_s / one.by_length.texts_per_s


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 when all goals are met, 1 when one is missed, 2 when it cannot run."""
    options = record.parser(__doc__, seconds=5.0, rounds=3).parse_args(arguments)
    try:
        seen = measure(seconds=options.seconds, rounds=options.rounds)
    except (wrk.WrkError, RuntimeError) as error:
        print(f"cannot run: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    return report(seen).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
