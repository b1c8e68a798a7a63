"""Load on one server: open loop (by the clock) and closed loop (by the answer).

Open loop: each request has its moment, whatever became of those before it, and its latency counts from that
moment. A closed loop waits for the answer before it asks again, and so hides a server that stands still.
Knows nothing of texts or of what a good figure is.
"""

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from load_tests.http_client import Answer, Client


@dataclass(slots=True)
class Shot:
    """One request and what became of it. Times are those of `time.monotonic`.

    Attributes:
        intended_s: when it was to be sent; the latency counts from here.
        sent_s: when it was sent, which is later when the generator lags.
        answer: None when there was none; `problem` then says why.
    """

    intended_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    answer: Answer | None = None
    problem: str = ""

    @property
    def status(self) -> int:
        """Of the answer; 0 for none."""
        return 0 if self.answer is None else self.answer.status

    @property
    def retry_after_s(self) -> int:
        """What the answer said; 0 when it said nothing."""
        return (self.answer.retry_after_s if self.answer else None) or 0

    @property
    def latency_s(self) -> float:
        """From the intended start."""
        return self.ended_s - self.intended_s


@dataclass(slots=True)
class Run:
    """The shots of one phase, and what the generator itself took.

    Attributes:
        began_s, ended_s: of the phase; answers may come later in an open loop.
        generator_cores: CPU seconds of this process for each second of the phase.
    """

    began_s: float
    ended_s: float = 0.0
    shots: list[Shot] = field(default_factory=list)
    generator_cores: float = 0.0

    def good_per_s(self, began_s: float | None = None, ended_s: float | None = None) -> float:
        """Answers of 200 that came within the phase (or between these moments), a second."""
        began_s = self.began_s if began_s is None else began_s
        ended_s = self.ended_s if ended_s is None else ended_s
        good = sum(shot.status == 200 and began_s <= shot.ended_s < ended_s for shot in self.shots)
        return good / (ended_s - began_s)

    def statuses(self) -> Counter[str]:
        """How many of each status, or of each reason why there was no answer."""
        return Counter(str(shot.status) if shot.answer else shot.problem for shot in self.shots)

    def latencies_ms(self, status: int) -> list[float]:
        """Of the shots with this status, sorted."""
        return sorted(shot.latency_s * 1e3 for shot in self.shots if shot.status == status)

    def lag_ms(self) -> list[float]:
        """How late the generator sent, sorted."""
        return sorted((shot.sent_s - shot.intended_s) * 1e3 for shot in self.shots)


def percentile(values: Sequence[float], share: float) -> float:
    """Of sorted values, by nearest rank; NaN of none."""
    return values[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan


async def shoot(client: Client, request: bytes, intended_s: float | None = None) -> Shot:
    """Ask, and keep what went wrong as the outcome."""
    now_s = time.monotonic()
    shot = Shot(now_s if intended_s is None else intended_s, now_s)
    try:
        shot.answer = await client.ask(request)
    except (OSError, TimeoutError) as error:
        shot.problem = type(error).__name__
    shot.ended_s = time.monotonic()
    return shot


def arrivals(rate_per_s: float, duration_s: float, dice: random.Random | None = None) -> Iterator[float]:
    """Seconds from the start: every 1/rate, or with `dice` as a Poisson process of that rate."""
    if dice is None:
        yield from (number / rate_per_s for number in range(round(rate_per_s * duration_s)))
        return
    due_s = dice.expovariate(rate_per_s)
    while due_s < duration_s:
        yield due_s
        due_s += dice.expovariate(rate_per_s)


async def send(
    client: Client,
    requests: Iterator[bytes],
    due_s: Iterable[float],
    *,
    ended: Callable[[Shot], None] | None = None,
) -> tuple[Run, list[asyncio.Task[Shot]]]:
    """Send the next request at each of these moments, in seconds from now; back at the last one.

    Returns:
        The run, its shots still missing, and the shots under way. `ended` is called with each as it ends.
    """
    run, cpu_s = Run(time.monotonic()), time.process_time()
    tasks: list[asyncio.Task[Shot]] = []
    for due in due_s:
        intended_s = run.began_s + due
        if (left_s := intended_s - time.monotonic()) > 0:
            await asyncio.sleep(left_s)
        task = asyncio.create_task(shoot(client, next(requests), intended_s))
        if ended is not None:
            task.add_done_callback(_calling(ended))
        tasks.append(task)
    run.ended_s = time.monotonic()
    run.generator_cores = (time.process_time() - cpu_s) / max(run.ended_s - run.began_s, 1e-9)
    return run, tasks


def _calling(ended: Callable[[Shot], None]) -> Callable[[asyncio.Task[Shot]], None]:
    return lambda task: None if task.cancelled() else ended(task.result())


async def open_loop(client: Client, requests: Iterator[bytes], due_s: Iterable[float]) -> Run:
    """`send`, and wait for every outcome."""
    run, tasks = await send(client, requests, due_s)
    run.shots = list(await asyncio.gather(*tasks))
    return run


async def closed_loop(
    client: Client,
    requests: Iterator[bytes],
    *,
    callers: int,
    go_on: Callable[[], bool],
    pause_s: float = 0.05,
) -> Run:
    """So many callers, each of which asks again when it has its answer; one that was refused pauses."""
    run, cpu_s = Run(time.monotonic()), time.process_time()

    async def caller() -> None:
        while go_on():
            shot = await shoot(client, next(requests))
            run.shots.append(shot)
            if shot.status != 200:
                await asyncio.sleep(pause_s)

    await asyncio.gather(*(caller() for _ in range(callers)))
    run.ended_s = time.monotonic()
    run.generator_cores = (time.process_time() - cpu_s) / max(run.ended_s - run.began_s, 1e-9)
    return run


def lasting(seconds: float) -> Callable[[], bool]:
    """True for so long from now on."""
    end_s = time.monotonic() + seconds
    return lambda: time.monotonic() < end_s
