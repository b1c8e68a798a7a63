"""What a short text waits for: alone, beside texts of 512 tokens, and beside lists of 256 sentences.

    VALENCE_DATA=… python -m load_tests.fairness [--seconds 5] [--rounds 3]

Short texts are sent open loop at a low rate, while callers in a closed loop keep the others in flight: long
texts in every lane, then four times as many, and one caller with lists. The growth of the short texts' p95 is
compared with the mean time of one call for the others alone, from /metrics. Knows nothing of how the service
takes turns.
"""

import asyncio
import itertools
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import uvloop

from load_tests import record, texts
from load_tests.http_client import Client, predict_request, scrape
from load_tests.open_loop import Run, arrivals, closed_loop, lasting, open_loop, percentile
from load_tests.record import Record
from load_tests.service_process import ServiceProcess
from load_tests.verdict import EXIT_CANNOT_RUN
from service.quota import cpu_quota, plan_lanes

LONG_TOKENS = 700  # more than a model reads, so that each is cut to the longest there is
LIST_TEXTS = 256
SHORT_PER_S = 20.0


@dataclass(frozen=True, slots=True)
class Company:
    """What runs beside the short texts: so many callers, each with the next of these requests."""

    name: str
    requests: list[bytes]
    callers: int
    goal: str | None = None


@dataclass(slots=True)
class Seen:
    """Of all rounds: latencies of the short texts, and in each the mean call of their company, in ms."""

    latencies_ms: list[float] = field(default_factory=list)
    calls_ms: list[float] = field(default_factory=list)

    @property
    def p95_ms(self) -> float:
        return percentile(sorted(self.latencies_ms), 0.95)

    def growth(self, alone: "Seen") -> float:
        """Of p95, in calls of the company."""
        return (self.p95_ms - alone.p95_ms) / statistics.median(self.calls_ms)


def companies(lanes: int) -> list[Company]:
    """None, long texts in every lane, a queue of them, and lists."""
    long = [predict_request(text) for text in texts.reviews(LONG_TOKENS)]
    chosen = itertools.cycle(texts.sentences())
    lists = [predict_request(list(itertools.islice(chosen, LIST_TEXTS))) for _ in range(4)]
    return [
        Company("alone", [], 0),
        Company(f"{lanes} long texts in flight, one a lane", long, lanes, "short beside long"),
        Company(f"{4 * lanes} long texts in flight", long, 4 * lanes),
        Company(f"a list of {LIST_TEXTS} in flight", lists, 1, "single beside list"),
    ]


async def measure(
    server: ServiceProcess, beside: Sequence[Company], *, seconds: float, rounds: int
) -> list[Seen]:
    """All companies in turns, what was seen beside each. RuntimeError: a request failed."""
    client = Client(server.url)
    sentences = sorted(texts.sentences(), key=len)
    short = itertools.cycle([predict_request(text) for text in sentences[: len(sentences) // 4]])
    found = [Seen() for _ in beside]
    for number in range(rounds):
        due_s = list(arrivals(SHORT_PER_S, seconds, random.Random(number)))  # noqa: S311 - seeded dice
        for company, seen in zip(beside, found, strict=True):
            if company.callers:
                seen.calls_ms.append(await _call_ms(client, company, seconds=seconds / 2))
            seen.latencies_ms += (await _together(client, short, due_s, company)).latencies_ms(200)
    client.close()
    return found


async def _call_ms(client: Client, company: Company, *, seconds: float) -> float:
    """The mean call of the engine while the company has the service for itself."""
    before = await scrape(client)
    _all_good(company, await _keep_asking(client, company, lasting(seconds)))
    after = await scrape(client)
    busy, batches = "valence_lane_busy_seconds_total", "valence_batch_items_count"
    return 1e3 * (after[busy] - before[busy]) / (after[batches] - before[batches])


async def _together(client: Client, short: Iterator[bytes], due_s: Sequence[float], company: Company) -> Run:
    """Short texts at these moments, and their company until the last of them was answered."""
    over = asyncio.Event()
    others = asyncio.create_task(_keep_asking(client, company, lambda: not over.is_set()))
    run = await open_loop(client, short, due_s)
    over.set()
    _all_good(company, run)
    _all_good(company, await others)
    return run


async def _keep_asking(client: Client, company: Company, go_on: Callable[[], bool]) -> Run:
    requests = itertools.cycle(company.requests)
    return await closed_loop(client, requests, callers=company.callers, go_on=go_on)


def _all_good(company: Company, run: Run) -> None:
    if set(run.statuses()) - {"200"}:
        raise RuntimeError(f"{company.name}: {dict(run.statuses())}")


def report(beside: Sequence[Company], found: Sequence[Seen]) -> Record:
    """A row for each company."""
    made = Record("Fairness")
    made.say(f"Short texts open loop, {SHORT_PER_S:g} a second; the company in a closed loop.")
    alone, rows = found[0], []
    for company, seen in zip(beside, found, strict=True):
        values = sorted(seen.latencies_ms)
        cells = [company.name, *(f"{percentile(values, share):.1f}" for share in (0.5, 0.95, 0.99))]
        if company.callers:
            growth = seen.growth(alone)
            cells += [f"{statistics.median(seen.calls_ms):.1f}", f"{growth:.2f}"]
            if company.goal is not None:
                made.goals[company.goal] = growth
        rows.append([*cells, "", ""][:6])
        made.figures[company.name] = asdict(seen)
    head = "beside", "short text: p50, ms", "p95", "p99", "one call of the company, ms", "p95 grew by, calls"
    made.table(head, rows)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 when both goals are met, 1 when one is missed, 2 when it could not run."""
    options = record.parser(__doc__, seconds=5.0, rounds=3).parse_args(arguments)
    beside = companies(plan_lanes(cpu_quota(), None, None).lanes)
    try:
        with ServiceProcess() as server:
            server.wait_ready()
            found = uvloop.run(measure(server, beside, seconds=options.seconds, rounds=options.rounds))
    except RuntimeError as error:
        print(f"cannot run: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    return report(beside, found).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
