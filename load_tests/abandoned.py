"""Clients that give up: 50 good requests, 200 whose clients hang up, 50 good ones. Does anything stay behind?

    VALENCE_DATA=<data sets> .venv/bin/python -m load_tests.abandoned

The 200 come while a large request keeps the lanes busy, and hang up before they are answered, half of them
with a reset. Exit code 1 when a goal is missed. Knows nothing of how the service notices.
"""

import argparse
import asyncio
import itertools
import socket
import statistics
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from load_tests import texts
from load_tests.http_client import Client, predict_request, scrape
from load_tests.open_loop import Run, closed_loop, percentile
from load_tests.service_process import ServiceProcess
from load_tests.verdict import Verdict, machine, note

GOOD = 50
ABANDONED = 200
LARGE = 256  # texts of the request that keeps the lanes busy
RATIO = 1.25  # of the medians, in the middle of the rounds; a busy machine moves one round by as much
SETTLE_S = 60.0
GAUGES = (
    'valence_http_requests_in_flight{route="/predict"}',
    "valence_queue_items",
    "valence_queue_tokens",
    "valence_lanes_busy",
)
RAN = "valence_batch_items_sum"
GONE = 'valence_http_requests_total{route="/predict",status="499"}'


@dataclass(slots=True)
class Abandoned:
    """What was seen.

    Attributes:
        first, third: the good requests, one after another.
        start, gone, end: the metrics before the second phase, when all its clients were seen to be gone, and
            when all is done.
        running: at most so many texts were under way in the moment of `gone`.
        large_texts, large_answered: the large request and its status.
    """

    first: Run
    third: Run
    start: dict[str, float]
    gone: dict[str, float]
    end: dict[str, float]
    running: int
    large_texts: int
    large_answered: int

    @property
    def abandoned_ran(self) -> int:
        """Texts of clients that gave up which ran all the same."""
        return int(self.end[RAN] - self.start[RAN]) - self.large_texts

    @property
    def could_have_started(self) -> int:
        """Texts that had run, or were running, when the last client was seen to be gone."""
        return int(self.gone[RAN] - self.start[RAN]) + self.running


async def _give_up(port: int, request: bytes, *, reset: bool) -> socket.socket:
    """Connect and send; closed by the caller."""
    one = socket.socket()
    one.setblocking(False)
    if reset:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    loop = asyncio.get_running_loop()
    await loop.sock_connect(one, ("127.0.0.1", port))
    await loop.sock_sendall(one, request)
    return one


async def _good(client: Client, bodies: Sequence[bytes]) -> Run:
    left = itertools.count(1)
    return await closed_loop(client, itertools.cycle(bodies), callers=1, go_on=lambda: next(left) <= GOOD)


async def _until_in_flight(client: Client, at_most: int) -> dict[str, float]:
    """The metrics once not more than so many predictions are in flight, or the last ones before giving up."""
    give_up_s = time.monotonic() + SETTLE_S
    while True:
        now = await scrape(client)
        if now[GAUGES[0]] <= at_most or time.monotonic() > give_up_s:
            return now
        await asyncio.sleep(0.005)


async def measure(server: ServiceProcess, *, max_batch_items: int, large_texts: int = LARGE) -> Abandoned:
    """The three phases, for a server with this setting, which must be ready."""
    client = Client(server.url)
    short = texts.sentences()
    bodies = [predict_request(text) for text in short[:GOOD]]
    large = predict_request((texts.reviews(120) * large_texts)[:large_texts])
    await _good(client, bodies)  # the first ones warm the way
    first = await _good(client, bodies)
    start = await _until_in_flight(client, 0)

    busy = asyncio.create_task(client.ask(large))
    while (await scrape(client))["valence_lanes_busy"] == 0 and not busy.done():
        pass
    sockets = [
        await _give_up(server.port, predict_request(text), reset=number % 2 == 0)
        for number, text in enumerate((short * ABANDONED)[:ABANDONED])
    ]
    for one in sockets:
        one.close()
    gone = await _until_in_flight(client, 1)
    answered = (await busy).status
    third = await _good(client, bodies)
    end = await _until_in_flight(client, 0)
    client.close()
    end[RAN] -= GOOD  # the third phase's own
    return Abandoned(
        first,
        third,
        start,
        gone,
        end,
        running=int(gone["valence_lanes"]) * max_batch_items,
        large_texts=large_texts,
        large_answered=answered,
    )


def judge(seen: Abandoned, verdict: Verdict) -> float:
    """Print the figures and goals of a round; gives how much slower the third phase was, by the medians."""
    before, after = (percentile(run.latencies_ms(200), 0.5) for run in (seen.first, seen.third))
    note(f"median of the good ones: {before:.1f} ms before, {after:.1f} ms after")
    statuses = [dict(run.statuses()) for run in (seen.first, seen.third)]
    verdict.goal(
        f"good requests are answered, before and after: {statuses}", met=statuses == [{"200": GOOD}] * 2
    )
    verdict.goal(f"the large request is answered: {seen.large_answered}", met=seen.large_answered == 200)
    moved = {
        name: (seen.start[name], seen.end[name]) for name in GAUGES if seen.start[name] != seen.end[name]
    }
    verdict.goal(f"gauges are where they were: {moved or 'all of them'}", met=not moved)
    gone = int(seen.end[GONE] - seen.start[GONE])
    ran = seen.abandoned_ran
    note(f"{gone} of {ABANDONED} were counted as gone; the others had their answer before")
    verdict.goal(
        f"{ran} of {ABANDONED} abandoned texts ran, none after the hanging up was seen: "
        f"{seen.could_have_started} of all texts had started by then",
        met=0 <= ran <= seen.could_have_started < ABANDONED,
    )
    return after / before


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args(arguments)
    print(machine())
    verdict, slower = Verdict(), []
    with ServiceProcess(request_timeout_s=300, max_batch_items=8) as server:
        server.wait_ready()
        for number in range(chosen.rounds):
            print(f"round {number + 1}", flush=True)
            slower.append(judge(uvloop.run(measure(server, max_batch_items=8)), verdict))
    middle = statistics.median(slower)
    verdict.goal(f"the third phase is as fast as the first: {middle:.2f} (<= {RATIO})", met=middle <= RATIO)
    return verdict.exit_code()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
