"""Who is refused at once, since he would most likely wait past his deadline: point 2, by time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from service.batcher import Batcher, Limits
from service.errors import QueueFull
from tests.service.by_hand import Clock, Engine, run_on, running, send, turned_clock, turns, values

CALLS = 16


@asynccontextmanager
async def one_token_a_second(clock: Clock, engine: Engine) -> AsyncIterator[Batcher[str, str]]:
    """A batcher with one lane that has made enough calls of one token and one second, and is busy."""
    async with running(engine, limits=Limits(max_batch_items=1)) as batcher:
        for number in range(CALLS):
            call = send(batcher, "usual")
            await engine.entered(number + 1)
            clock.forward(1.0)
            engine.let_through()
            await call
        send(batcher, "under way")
        await engine.entered(CALLS + 1)
        yield batcher


def in_s(seconds: float) -> float:
    """A deadline."""
    return asyncio.get_running_loop().time() + seconds


def test_p02_who_would_wait_past_his_deadline_is_refused_at_once() -> None:
    async def test() -> None:
        engine = Engine()
        async with one_token_a_second(clock, engine) as batcher:
            waiting = [send(batcher, f"{number}") for number in range(10)]
            await turns()
            with pytest.raises(QueueFull) as refused:
                await batcher.submit(["hurried"], [1], deadline=in_s(15))  # ten seconds are most of it
            assert refused.value.retry_after_s in {10, 11, 12}  # the clock goes on by itself, too
            with pytest.raises(QueueFull):
                batcher.refuse_when_full(1, 1, in_s(15))
            patient = send(batcher, "patient", deadline=in_s(40))
            no_deadline = send(batcher, "no deadline")
            await turns()
            assert batcher.load().queued_items == 12
            engine.open()
            await asyncio.gather(*waiting)
            assert values(await patient) == ["patient!"]
            assert values(await no_deadline) == ["no deadline!"]
        assert "hurried" not in engine.seen

    with turned_clock() as clock:
        run_on(asyncio.new_event_loop, test)


def test_p05_many_items_of_one_request_do_not_have_others_refused() -> None:
    async def test() -> None:
        engine = Engine()
        async with one_token_a_second(clock, engine) as batcher:
            large = send(batcher, *[f"{number}" for number in range(100)])
            await turns()
            with pytest.raises(QueueFull):
                await batcher.submit(["a", "lot"] * 50, [1] * 100, deadline=in_s(15))
            single = send(batcher, "single", deadline=in_s(15))  # it has its turn after one of the hundred
            await turns()
            engine.open()
            assert values(await single) == ["single!"]
            await large

    with turned_clock() as clock:
        run_on(asyncio.new_event_loop, test)


def test_p02_an_empty_queue_admits_whatever_the_deadline() -> None:
    async def test() -> None:
        engine = Engine()
        async with one_token_a_second(clock, engine) as batcher:
            hurried = send(batcher, "hurried", length=1000, deadline=in_s(15))
            await turns()
            engine.open()
            assert values(await hurried) == ["hurried!"]

    with turned_clock() as clock:
        run_on(asyncio.new_event_loop, test)
