"""Hundreds of callers that come, fail, give up and run late at random; the books are right all the same."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from service.batcher import Batcher, Limits, Outcome
from service.errors import DeadlineExceeded, EngineFailed, QueueFull
from tests.service.by_hand import LOOPS, SAFETY_S, run_on, turns


@dataclass(frozen=True)
class Job:
    caller: int
    place: int
    length: int
    fails: bool


@dataclass
class World:
    """The function under the batcher, which the test may hold, and what was seen of it."""

    rng: random.Random
    calls: list[list[Job]] = field(default_factory=list)
    inside: int = 0
    abandoned: set[Job] = field(default_factory=set)
    go: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, jobs: Sequence[Job]) -> Sequence[str]:
        with self.lock:
            self.calls.append(list(jobs))
            self.inside += 1
        self.go.wait()
        with self.lock:
            self.inside -= 1
        if any(job.fails for job in jobs):
            if len(jobs) % 2:
                raise MemoryError
            return []
        return [f"{job.caller}-{job.place}" for job in jobs]


async def call(batcher: Batcher[Job, str], world: World, jobs: list[Job]) -> str:
    """One caller: how it ended, after a look at whether it ended rightly."""
    rng, loop = world.rng, asyncio.get_running_loop()
    await turns(rng.randrange(30))
    deadline = None
    if rng.random() < 0.2:
        deadline = loop.time() + rng.choice([-1.0, 0.001, 0.005, 0.02])
    work = asyncio.ensure_future(batcher.submit(jobs, [job.length for job in jobs], deadline=deadline))
    if rng.random() < 0.2:
        await turns(rng.randrange(60))
        work.cancel()
    try:
        outcomes: list[Outcome[str]] = await work
    except DeadlineExceeded:
        assert deadline is not None
        world.abandoned.update(jobs)
        return "late"
    except asyncio.CancelledError:
        world.abandoned.update(jobs)
        return "cancelled"
    except QueueFull:
        return "refused"
    assert len(outcomes) == len(jobs)
    for job, outcome in zip(jobs, outcomes, strict=True):
        assert outcome.queue_s >= 0
        assert outcome.run_s >= 0
        if job.fails:
            assert isinstance(outcome.error, EngineFailed)
            assert isinstance(outcome.error.__cause__, MemoryError | ValueError)
        else:
            assert (outcome.value, outcome.error) == (f"{job.caller}-{job.place}", None)
    return "answered"


async def wave(batcher: Batcher[Job, str], world: World, number: int) -> list[str]:
    """150 callers; while they come and go the function is held, and then let go."""
    rng = world.rng
    callers = [
        [
            Job(number * 1000 + caller, place, rng.randint(1, 60), fails=rng.random() < 0.02)
            for place in range(rng.choice([1, 1, 1, 3, 12]))
        ]
        for caller in range(150)
    ]
    world.go.clear()
    tasks = [asyncio.ensure_future(call(batcher, world, jobs)) for jobs in callers]
    await turns(rng.randrange(100))
    while batcher.load().busy_lanes != world.inside:  # noqa: ASYNC110 - what is cut is on its way to a lane
        await asyncio.sleep(0)
    abandoned, begun = set(world.abandoned), len(world.calls)
    world.go.set()
    ends = await asyncio.gather(*tasks)
    run_later = {job for jobs in world.calls[begun:] for job in jobs}
    assert not abandoned & run_later, "abandoned before the cut"
    load = batcher.load()
    assert (load.queued_items, load.queued_tokens, load.oldest_age_s, load.dead) == (0, 0, 0, False)
    return ends


@pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_the_books_are_right(
    seed: int, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    rng = random.Random(seed)
    limits = Limits(
        max_batch_items=rng.choice([1, 5, 16]),
        max_batch_tokens=rng.choice([40, 200]),
        max_queue_items=rng.choice([40, 300]),
        max_queue_tokens=rng.choice([500, 10_000]),
        max_padding_tokens=rng.choice([None, 4]),
        linger_s=rng.choice([0.0, 0.0, 0.001]),
    )
    world = World(rng)
    ends: Counter[str] = Counter()

    async def test() -> None:
        batcher: Batcher[Job, str] = Batcher(world.run, lanes=rng.randint(1, 3), limits=limits)
        await batcher.start()
        try:
            for number in range(3):
                ends.update(await wave(batcher, world, number))
        finally:
            world.go.set()
            await batcher.close(SAFETY_S)
        load = batcher.load()
        assert (load.busy_lanes, load.running_items, load.longest_run_s) == (0, 0, 0)

    run_on(new_loop, test)
    assert ends.total() == 450
    assert ends["answered"] > 0
    for jobs in world.calls:
        assert 1 <= len(jobs) <= limits.max_batch_items
        assert len(jobs) == 1 or max(job.length for job in jobs) * len(jobs) <= limits.max_batch_tokens
    for job, times in Counter(job for jobs in world.calls for job in jobs).items():
        assert times <= 2, f"{job} was run once, and once more alone at most"
