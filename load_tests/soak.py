"""Mixed load for a long time, then rest: does anything grow?

    VALENCE_DATA=<data sets> .venv/bin/python -m load_tests.soak --minutes 20

Texts of 1 to 512 tokens in requests of 1 to 64, from eight callers; resident memory, open files and threads
every few seconds, at moments at which nothing is asked. Prints the plateau and its slope over the last half.
Exit code 1 when a goal is missed.
"""

import argparse
import asyncio
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import uvloop

from load_tests import texts
from load_tests.http_client import Client, predict_request, scrape
from load_tests.open_loop import Run, closed_loop, lasting
from load_tests.service_process import Footprint, ServiceProcess
from load_tests.verdict import Verdict, machine, note

CALLERS = 8
LENGTHS = (1, 8, 24, 64, 200, 512)  # tokens, about
SIZES = (1, 1, 1, 2, 7, 32, 64)  # texts of a request
CALM_S = 30.0  # at most, before a look, for closed connections to be noticed
SLOPE_MB_AN_HOUR = 6.0
SLOPE_ERRORS = 3.0  # a slope is noise within so many of its standard errors


@dataclass(slots=True)
class Soak:
    """What was seen: a look at the server between two stretches of load, and one after the rest.

    Attributes:
        at_s: when each look was, from the start.
        looks: the server before any load, then after each stretch.
        rested: the server after the rest; `rest_cores` is the CPU it used in it.
        runs: the load.
    """

    at_s: list[float]
    looks: list[Footprint]
    rested: Footprint
    rest_cores: float
    runs: list[Run]

    def last_half(self) -> tuple[list[float], list[float]]:
        """Hours and megabytes of the looks in the last half."""
        pairs = [
            (at_s / 3600, look.rss_mb)
            for at_s, look in zip(self.at_s, self.looks, strict=True)
            if at_s >= self.at_s[-1] / 2
        ]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def robust_slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """The median of the slopes of all pairs (Theil 1950, Sen 1968), and its standard error.

    The error is that of a least-squares line with the same residuals, their spread taken from the median of
    their sizes (× 1.4826, Gauss). NaN for fewer than three points.
    """
    slopes = [
        (y[j] - y[i]) / (x[j] - x[i]) for i in range(len(x)) for j in range(i + 1, len(x)) if x[j] != x[i]
    ]
    if len(x) < 3 or not slopes:
        return math.nan, math.nan
    slope = statistics.median(slopes)
    level = statistics.median(b - slope * a for a, b in zip(x, y, strict=True))
    spread = 1.4826 * statistics.median(abs(b - slope * a - level) for a, b in zip(x, y, strict=True))
    middle = statistics.fmean(x)
    return slope, spread / math.sqrt(sum((a - middle) ** 2 for a in x))


def mixed(dice: random.Random) -> Iterator[bytes]:
    """Requests without end."""
    by_length = [texts.reviews(tokens) for tokens in LENGTHS]
    while True:
        size = dice.choice(SIZES)
        chosen = [dice.choice(dice.choice(by_length)) for _ in range(size)]
        yield predict_request(chosen[0] if size == 1 else chosen)


async def _calm_look(server: ServiceProcess, files: int) -> Footprint:
    """The server once it has closed the connections that its clients have closed, or after `CALM_S`."""
    give_up_s = time.monotonic() + CALM_S
    while True:
        look = server.footprint()
        if look.files <= files or time.monotonic() > give_up_s:
            return look
        await asyncio.sleep(0.02)


async def measure(
    server: ServiceProcess, *, seconds: float, every_s: float, rest_s: float, seed: int = 4
) -> Soak:
    """Load in stretches of `every_s`, a look after each, then a rest. The server must be ready."""
    client = Client(server.url)
    requests = mixed(random.Random(seed))  # noqa: S311 - seeded dice
    began_s = time.monotonic()
    await scrape(client)  # what is made on the first request is there before the first look
    client.close()
    await asyncio.sleep(0.5)
    at_s, looks, runs = [0.0], [server.footprint()], []
    while time.monotonic() - began_s < seconds:
        runs.append(await closed_loop(client, requests, callers=CALLERS, go_on=lasting(every_s)))
        client.close()
        at_s.append(time.monotonic() - began_s)
        looks.append(await _calm_look(server, looks[0].files))
    await asyncio.sleep(rest_s)
    rested = server.footprint()
    rest_cores = (rested.cpu_s - looks[-1].cpu_s) / max(rest_s, 1e-9)
    return Soak(at_s, looks, rested, rest_cores, runs)


def judge(seen: Soak, verdict: Verdict, *, long: bool) -> None:
    """Print the figures and the goals; what a short run cannot tell from noise is only printed."""
    hours, megabytes = seen.last_half()
    slope, error = robust_slope(hours, megabytes)
    peak = max(look.rss_mb for look in seen.looks)
    shots = [shot for run in seen.runs for shot in run.shots]
    statuses = dict(Run(0.0, shots=shots).statuses())
    note(f"{len(shots)} requests: {statuses}")
    note(
        f"resident: {seen.looks[0].rss_mb:.0f} MB ready, plateau {statistics.median(megabytes):.0f} MB, "
        f"peak {peak:.0f} MB, {seen.rested.rss_mb:.0f} MB after the rest"
    )
    slope_text = f"slope over the last half {slope:+.1f} ± {error:.1f} MB an hour"
    rest_text = f"{seen.rest_cores:.2%} of a core at rest"
    verdict.goal(f"every request has its answer: {statuses}", met=set(statuses) == {"200"})
    loaded = seen.looks[1:]
    files = sorted({look.files for look in loaded} | {seen.rested.files})
    verdict.goal(f"open files constant: {files}", met=len(files) == 1)
    late = [look for at_s, look in zip(seen.at_s, seen.looks, strict=True) if at_s >= seen.at_s[-1] / 2]
    threads = sorted({look.threads for look in (*late, seen.rested)})
    if long:
        verdict.goal(f"threads constant over the last half: {threads}", met=len(threads) == 1)
        verdict.goal(
            f"{slope_text} (0 within {SLOPE_ERRORS:g} errors, or < {SLOPE_MB_AN_HOUR:g})",
            met=slope <= max(SLOPE_ERRORS * error, SLOPE_MB_AN_HOUR),
        )
        verdict.goal(f"{rest_text} (< 2 %)", met=seen.rest_cores < 0.02)
    else:
        note(f"{slope_text}; {rest_text}; threads {threads}")


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds of load between two looks")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds without load at the end")
    chosen = parser.parse_args(arguments)
    print(f"{machine()}; {texts.source()}")
    verdict = Verdict()
    with ServiceProcess(request_timeout_s=300) as server:
        server.wait_ready()
        seen = uvloop.run(
            measure(server, seconds=chosen.minutes * 60, every_s=chosen.every, rest_s=chosen.rest)
        )
        judge(seen, verdict, long=chosen.minutes >= 10)
    return verdict.exit_code()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
