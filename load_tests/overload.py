"""Three times the load that the service can carry: does it answer everybody, and go on working at full speed?

    VALENCE_DATA=<data sets> .venv/bin/python -m load_tests.overload [--texts long|sentences] [--seconds 60]

Starts the service, measures its capacity in a closed loop, then sends three times as much open loop, with
liveness polled on the side, then measures the capacity again: goodput is compared with the mean of both.
Exit code 1 when a goal is missed. Knows nothing of how the service queues.
"""

import argparse
import asyncio
import gc
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import uvloop

from load_tests import texts
from load_tests.http_client import Client, get_request, predict_request
from load_tests.open_loop import Run, Shot, arrivals, closed_loop, lasting, percentile, send, shoot
from load_tests.service_process import Footprint, ServiceProcess
from load_tests.verdict import Verdict, machine, note

CALLERS = 32
GOODPUT = {"long": 0.95, "sentences": 0.7}
LONG_TOKENS = 200
OBEY_EVERY = 50  # of those who are refused under load, so many do as Retry-After says
OBEY_LAST = 10  # of those who are refused last, all do
RECOVERY_S = 2.0
REFUSED_MS = 50


@dataclass(slots=True)
class Overload:
    """What was seen.

    Attributes:
        before, after: the capacity, closed loop; `after` begins with the last arrival of the overload.
        load: the overload.
        live: polls of liveness throughout.
        obeyed_under_load, obeyed_after: second attempts of refused clients, who waited as they were told.
        footprints: of the server before the overload, one third through it, at its end, and after all.
        alone_cpu_s: CPU of the server in `before`.
    """

    before: Run
    load: Run
    after: Run
    live: list[Shot]
    obeyed_under_load: list[Shot]
    obeyed_after: list[Shot]
    footprints: list[Footprint]
    alone_cpu_s: float

    @property
    def recovered_per_s(self) -> float:
        """Answers of 200 a second, the last ones to the overload included, from 2 s after it."""
        shots = [*self.after.shots, *self.load.shots, *self.obeyed_after]
        return Run(self.after.began_s + RECOVERY_S, self.after.ended_s, shots).good_per_s()

    @property
    def capacity_per_s(self) -> float:
        """Answers of 200 a second, the mean of before and after."""
        return (self.before.good_per_s() + self.recovered_per_s) / 2


class _Refused:
    """Remembers who was refused; some ask once more, when Retry-After says."""

    def __init__(self, client: Client, requests: Iterator[bytes]) -> None:
        self._client, self._requests = client, requests
        self._refused: list[Shot] = []
        self._again: list[asyncio.Task[Shot]] = []

    def ended(self, shot: Shot) -> None:
        if shot.status == 503 and shot.retry_after_s:
            self._refused.append(shot)
            if len(self._refused) % OBEY_EVERY == 0:
                self._again.append(asyncio.create_task(self._obey(shot)))

    def the_last_obey(self) -> "list[asyncio.Task[Shot]]":
        return [asyncio.create_task(self._obey(shot)) for shot in self._refused[-OBEY_LAST:]]

    async def under_load(self) -> list[Shot]:
        return list(await asyncio.gather(*self._again))

    async def _obey(self, shot: Shot) -> Shot:
        due_s = shot.ended_s + shot.retry_after_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        return await shoot(self._client, next(self._requests), due_s)


async def _poll(client: Client, path: str, until: asyncio.Event) -> list[Shot]:
    """Five times a second; over new connections, as a supervisor does."""
    shots: list[Shot] = []
    while not until.is_set():
        shots.append(await shoot(client, get_request(path)))
        await asyncio.sleep(0.2)
    client.close()
    return shots


async def measure(
    server: ServiceProcess,
    bodies: Sequence[bytes],
    *,
    factor: float,
    seconds: float,
    capacity_s: float,
    callers: int = CALLERS,
) -> Overload:
    """Capacity for `capacity_s`, `factor` times as much for `seconds`, capacity. The server must be ready."""
    client, requests = Client(server.url), itertools.cycle(bodies)
    await closed_loop(client, requests, callers=callers, go_on=lasting(capacity_s / 4))
    footprints = [server.footprint()]
    before = await closed_loop(client, requests, callers=callers, go_on=lasting(capacity_s))
    alone_cpu_s = server.footprint().cpu_s - footprints[0].cpu_s
    footprints = [server.footprint()]
    looks = asyncio.get_running_loop().call_later(seconds / 3, lambda: footprints.append(server.footprint()))
    over, refused = asyncio.Event(), _Refused(client, requests)
    polls = asyncio.create_task(_poll(Client(server.url, keep=False), "/health/live", over))
    due_s = arrivals(factor * before.good_per_s(), seconds, random.Random(3))  # noqa: S311 - seeded dice
    load, under_way = await send(client, requests, due_s, ended=refused.ended)
    looks.cancel()
    footprints.append(server.footprint())
    obeying = refused.the_last_obey()
    after = await closed_loop(client, requests, callers=callers, go_on=lasting(RECOVERY_S + capacity_s))
    footprints.append(server.footprint())
    load.shots = list(await asyncio.gather(*under_way))
    over.set()
    result = Overload(
        before,
        load,
        after,
        live=await polls,
        obeyed_under_load=await refused.under_load(),
        obeyed_after=list(await asyncio.gather(*obeying)),
        footprints=footprints,
        alone_cpu_s=alone_cpu_s,
    )
    client.close()
    return result


def print_figures(seen: Overload) -> None:
    """What no goal is about."""
    load = seen.load
    lag, admitted, refused = load.lag_ms(), load.latencies_ms(200), load.latencies_ms(503)
    first, _, last, end = seen.footprints
    note(
        f"capacity {seen.before.good_per_s():.1f}/s before, {seen.recovered_per_s:.1f}/s after; "
        f"offered {len(load.shots) / (load.ended_s - load.began_s):.1f}/s: {dict(load.statuses())}"
    )
    spent_s, after_s = load.ended_s - load.began_s, seen.after.ended_s - seen.after.began_s
    later = Run(seen.after.began_s, seen.after.ended_s, [*seen.after.shots, *load.shots, *seen.obeyed_after])
    good = [len(seen.before.shots), load.good_per_s() * spent_s, later.good_per_s() * after_s]
    cpu_s = [seen.alone_cpu_s, last.cpu_s - first.cpu_s, end.cpu_s - last.cpu_s]
    alone, under, after = (1e3 * spent / max(1, count) for spent, count in zip(cpu_s, good, strict=True))
    note(
        f"server CPU a good answer: {alone:.2f} ms alone, {under:.2f} ms under load, the refusals included, "
        f"{after:.2f} ms after"
    )
    note(
        f"server under load: {(last.cpu_s - first.cpu_s) / spent_s:.2f} cores, of which "
        f"{(last.loop_cpu_s - first.loop_cpu_s) / spent_s:.2f} the event loop"
    )
    note(
        f"generator: {load.generator_cores:.2f} cores, sent late by p50 {percentile(lag, 0.5):.1f} ms, "
        f"p99 {percentile(lag, 0.99):.1f} ms"
    )
    note(f"admitted: p50 {percentile(admitted, 0.5):.0f} ms, p99 {percentile(admitted, 0.99):.0f} ms")
    note(f"refused: p50 {percentile(refused, 0.5):.1f} ms, p99 {percentile(refused, 0.99):.1f} ms")
    told = sorted(shot.retry_after_s for shot in load.shots if shot.status == 503)
    note(f"Retry-After: p50 {percentile(told, 0.5)} s, longest {told[-1] if told else 0} s")
    again = [shot.status for shot in seen.obeyed_under_load]
    note(f"obeyed while the overload went on: {again.count(200)} of {len(again)} got an answer of 200")


def judge(seen: Overload, verdict: Verdict, *, goodput: float, deadline_s: float) -> None:
    """Print the figures and the goals."""
    print_figures(seen)
    _judge_answers(seen, verdict, deadline_s=deadline_s)
    _judge_health(seen, verdict)
    share = seen.load.good_per_s() / seen.capacity_per_s
    verdict.goal(
        f"goodput {seen.load.good_per_s():.1f}/s is {share:.3f} of the capacity (>= {goodput})",
        met=share >= goodput,
    )
    back = seen.recovered_per_s / seen.before.good_per_s()
    verdict.goal(
        f"from {RECOVERY_S:.0f} s after it, {back:.2f} of the speed before (>= 0.9)", met=back >= 0.9
    )


def _judge_answers(seen: Overload, verdict: Verdict, *, deadline_s: float) -> None:
    load = seen.load
    admitted, refused = load.latencies_ms(200), load.latencies_ms(503)
    unanswered = sum(shot.answer is None for shot in load.shots)
    verdict.goal(f"every request has an answer: {unanswered} have none", met=unanswered == 0)
    others = {status: n for status, n in load.statuses().items() if status not in {"200", "503"}}
    verdict.goal(f"each is a 200 or a 503: others {others}", met=not others)
    untold = sum(shot.status == 503 and not shot.retry_after_s for shot in load.shots)
    verdict.goal(f"each 503 has a Retry-After: {untold} have none", met=bool(refused) and untold == 0)
    verdict.goal(
        f"p99 of refusals {percentile(refused, 0.99):.1f} ms (< {REFUSED_MS} ms)",
        met=percentile(refused, 0.99) < REFUSED_MS,
    )
    p99_s = percentile(admitted, 0.99) / 1e3
    verdict.goal(
        f"p99 of the admitted {p99_s:.2f} s (< deadline of {deadline_s:.0f} s)", met=p99_s < deadline_s
    )
    last_ones = [shot.status for shot in seen.obeyed_after]
    verdict.goal(
        f"who was refused last and obeyed Retry-After: {last_ones.count(200)} of {len(last_ones)} admitted",
        met=bool(last_ones) and last_ones.count(200) == len(last_ones),
    )


def _judge_health(seen: Overload, verdict: Verdict) -> None:
    first, third, last, _ = seen.footprints
    live = sorted(shot.latency_s * 1e3 for shot in seen.live)
    dead = sum(shot.status != 200 for shot in seen.live)
    verdict.goal(
        f"liveness 200 throughout: {dead} of {len(live)} were not (longest {percentile(live, 1):.0f} ms)",
        met=dead == 0,
    )
    growth = last.rss_bytes / third.rss_bytes - 1
    verdict.goal(
        f"memory flat: {first.rss_mb:.0f} MB before, {third.rss_mb:.0f} after a third, {last.rss_mb:.0f} "
        f"at the end ({growth:+.1%}, <= 3 %)",
        met=growth <= 0.03,
    )


def bodies_of(kind: str) -> list[bytes]:
    """Requests of one text each."""
    chosen = texts.reviews(LONG_TOKENS) if kind == "long" else texts.sentences()
    return [predict_request(text) for text in chosen]


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--texts", choices=[*GOODPUT, "both"], default="both")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the overload")
    parser.add_argument("--capacity-seconds", type=float, default=20.0, help="length of each closed loop")
    parser.add_argument("--factor", type=float, default=3.0, help="load, in capacities")
    chosen = parser.parse_args(arguments)
    print(machine())
    verdict = Verdict()
    # To look through all that is kept of a run holds the generator for 0.3 s, and each request that is due
    # meanwhile would count as one that the service let wait.
    gc.disable()
    for kind in GOODPUT if chosen.texts == "both" else [chosen.texts]:
        with ServiceProcess() as server:
            server.wait_ready()
            print(
                f"{kind}, {texts.source()}, {chosen.factor:g} x capacity for {chosen.seconds:.0f} s",
                flush=True,
            )
            seen = uvloop.run(
                measure(
                    server,
                    bodies_of(kind),
                    factor=chosen.factor,
                    seconds=chosen.seconds,
                    capacity_s=chosen.capacity_seconds,
                )
            )
            judge(seen, verdict, goodput=GOODPUT[kind], deadline_s=10.0)
    return verdict.exit_code()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
