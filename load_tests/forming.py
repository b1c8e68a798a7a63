"""What it costs to form a batch, beside what it costs to run it, on queues of 10 to 10,000 texts.

    VALENCE_DATA=… python -m load_tests.forming [--batches 200] [--queues 10 100 1000 10000]

Texts join the line one a request and a batch is taken, as the service does between two calls of its engine;
the line is kept at its length. CPU time of both, for the same batches. Knows nothing of threads and HTTP.
"""

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from load_tests import texts
from load_tests.alone import Alone
from load_tests.record import Record
from service.core import Encoding, TokenBatch
from service.settings import Settings
from service.waiting import Limits, WaitingRoom

QUEUES = (10, 100, 1_000, 10_000)
RUN_AT_MOST = (
    50  # batches of each queue; they are alike, and a run costs a thousand times as much as a choice
)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of the batches of one queue, in µs of CPU. `add_us` is for as many texts as a batch has."""

    queue: int
    batch_items: float
    add_us: float
    take_us: float
    run_us: float

    @property
    def share(self) -> float:
        """Joining and choosing, of running."""
        return (self.add_us + self.take_us) / self.run_us


def limits() -> Limits:
    """Those of a server with its defaults, and room for the longest queue."""
    settings = Settings.model_construct()
    return Limits(
        max_batch_items=settings.max_batch_items,
        max_batch_tokens=settings.max_batch_tokens,
        max_padding_tokens=settings.max_padding_tokens,
    )


def measure(engine: Alone, encodings: Sequence[Encoding], queue: int, *, batches: int) -> Row:
    """Take so many batches from a line that stays so long, and run them."""
    room: WaitingRoom[int, Encoding] = WaitingRoom(limits())
    waiting, numbers = itertools.cycle(encodings), itertools.count()
    add_s: list[float] = []
    take_s: list[float] = []
    taken: list[list[Encoding]] = []

    def join(count: int) -> float:
        arriving = [next(waiting) for _ in range(count)]
        began_s = time.perf_counter()
        for one in arriving:
            room.add(next(numbers), [one], [len(one)])
        return time.perf_counter() - began_s

    join(queue)
    for _ in range(batches):
        began_s = time.perf_counter()
        batch = room.take(share=queue)
        take_s.append(time.perf_counter() - began_s)
        taken.append(batch)
        add_s.append(join(len(batch)))
    run_s = [engine.run_cpu_s(TokenBatch.of(batch)) for batch in taken[:RUN_AT_MOST]]
    return Row(
        queue,
        batch_items=statistics.mean(map(len, taken)),
        add_us=1e6 * statistics.median(add_s),
        take_us=1e6 * statistics.median(take_s),
        run_us=1e6 * statistics.median(run_s),
    )


def report(rows: Sequence[Row]) -> Record:
    """A row a queue."""
    made = Record("Forming a batch")
    made.figures = {"rows": [asdict(row) | {"share": row.share} for row in rows]}
    made.table(
        ["texts that wait", "texts a batch", "joining, µs a batch", "choosing, µs", "running, µs", "share"],
        [
            [
                f"{row.queue:,}",
                f"{row.batch_items:.1f}",
                *(f"{cost_us:.0f}" for cost_us in (row.add_us, row.take_us, row.run_us)),
                f"{row.share:.2%}",
            ]
            for row in rows
        ],
    )
    made.goals["forming"] = 100 * max(row.share for row in rows)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 when the goal is met, 1 when it is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batches", type=int, default=200, help="taken from each queue")
    parser.add_argument("--queues", type=int, nargs="+", default=list(QUEUES), help="texts that wait")
    parser.add_argument("--json", type=Path, help="keep the figures in this file, too")
    options = parser.parse_args(arguments)
    with contextlib.closing(Alone()) as engine:
        encodings = engine.encode(texts.sentences())
        rows = [measure(engine, encodings, queue, batches=options.batches) for queue in options.queues]
    return report(rows).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
