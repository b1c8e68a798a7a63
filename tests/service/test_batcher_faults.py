"""Faults that users of other services have reported (rows of the catalogue), put to the batcher alone."""

import asyncio
import re
import time
from collections.abc import Sequence

import pytest

from service.batcher import Limits
from service.errors import DeadlineExceeded, EngineFailed, QueueFull, ServiceError
from tests.service.by_hand import (
    SAFETY_S,
    Engine,
    idle,
    on_each_loop,
    run_on,
    running,
    send,
    turned_clock,
    turns,
    values,
)


@on_each_loop
async def test_r02_one_bad_item_fails_alone_wherever_it_is_in_the_batch() -> None:
    for bad_place in range(8):
        engine = Engine(is_open=True)
        engine.faults = {"bad": RuntimeError()}
        names = [f"good{place}" for place in range(8)]
        names[bad_place] = "bad"
        async with running(engine) as batcher:
            outcomes = [
                answer[0] for answer in await asyncio.gather(*(send(batcher, name) for name in names))
            ]
        assert engine.calls[0] == names, "they shared a batch"
        for name, outcome in zip(names, outcomes, strict=True):
            assert outcome.value == (None if name == "bad" else f"{name}!")
            assert isinstance(outcome.error, EngineFailed) == (name == "bad")


class FatalError(BaseException):
    """Not an Exception: an ordinary `except` lets it through."""


@pytest.mark.parametrize(
    "fault", [RuntimeError(), FatalError(), MemoryError(), SystemExit(), KeyboardInterrupt()]
)
def test_r03_r52_after_any_fault_the_next_item_is_served(fault: BaseException) -> None:
    async def test() -> None:
        engine = Engine(is_open=True)
        engine.faults = {"bad": fault}
        async with running(engine) as batcher:
            for _ in range(3):
                (outcome,) = await batcher.submit(["bad"], [1])
                assert isinstance(outcome.error, EngineFailed)
                assert outcome.error.__cause__ is fault
                assert values(await batcher.submit(["good"], [1])) == ["good!"]
            assert not batcher.load().dead

    run_on(asyncio.new_event_loop, test)


@on_each_loop
async def test_r04_every_caller_gets_exactly_his_own_results() -> None:
    engine = Engine(is_open=True)
    async with running(engine, lanes=3, limits=Limits(max_batch_items=7, max_batch_tokens=90)) as batcher:
        asked = [
            [f"{caller}-{place}" for place in range(3 if caller % 4 == 0 else 1)] for caller in range(64)
        ]
        answers = await asyncio.gather(
            *(send(batcher, *items, length=1 + caller % 30) for caller, items in enumerate(asked))
        )
    assert [values(answer) for answer in answers] == [[f"{item}!" for item in items] for items in asked]
    assert len(engine.calls) < len(asked), "some shared a batch"


@on_each_loop
async def test_r06_the_limit_counts_items_and_a_larger_request_is_split() -> None:
    engine = Engine()
    async with running(engine, limits=Limits(max_batch_items=8)) as batcher:
        tasks = [send(batcher, *(f"{caller}-{place}" for place in range(8))) for caller in range(10)]
        tasks.append(send(batcher, *(f"large-{place}" for place in range(9))))
        await turns()
        engine.open()
        answers = await asyncio.gather(*tasks)
    assert [len(answer) for answer in answers] == [8] * 10 + [9]
    assert max(map(len, engine.calls)) == 8


@on_each_loop
async def test_r07_r09_an_overflow_answers_everybody_and_leaves_nothing_behind() -> None:
    engine = Engine()
    async with running(engine, limits=Limits(max_queue_items=16)) as batcher:
        tasks = [send(batcher, "first")]
        await engine.entered(1)
        tasks += [send(batcher, str(number)) for number in range(500)]
        await turns()
        refused = [task for task in tasks if task.done()]
        assert len(refused) == 500 - 16, "refused while the lane is stuck"
        for task in refused:
            error = task.exception()
            assert isinstance(error, QueueFull)
            assert isinstance(error, ServiceError)
            assert error.status == 503
            assert error.retry_after_s is not None
            assert error.retry_after_s >= 1
        engine.open()
        served = [task for task in tasks if task not in refused]
        assert [values(await task) for task in served] == [
            ["first!"],
            *([f"{number}!"] for number in range(16)),
        ]
        load = batcher.load()
        assert (load.queued_items, load.queued_tokens, load.busy_lanes) == (0, 0, 0)


@on_each_loop
async def test_r08_one_rule_of_admission_for_one_item_and_for_many() -> None:
    engine = Engine()
    async with running(engine, limits=Limits(max_queue_items=2)) as batcher:
        send(batcher, "first")
        await engine.entered(1)
        send(batcher, "a", "b")
        await turns()
        for items in (["one"], ["one", "two"]):
            with pytest.raises(QueueFull):
                await batcher.submit(items, [1] * len(items))


@on_each_loop
async def test_r10_the_refusal_at_the_deadline_does_not_wait_for_the_stuck_call() -> None:
    engine = Engine()
    async with running(engine) as batcher:
        stuck = send(batcher, "stuck")
        await engine.entered(1)
        with pytest.raises(DeadlineExceeded):
            await batcher.submit(["late"], [1], deadline=asyncio.get_running_loop().time() + 0.05)
        assert not stuck.done()
        assert batcher.load().queued_items == 0
        engine.open()
        assert values(await stuck) == ["stuck!"]
        assert values(await batcher.submit(["next"], [1])) == ["next!"]
    assert engine.calls == [["stuck"], ["next"]]


@on_each_loop
async def test_r11_short_items_do_not_pay_for_a_long_one() -> None:
    engine = Engine()
    async with running(engine, limits=Limits(max_padding_tokens=4)) as batcher:
        tasks = [send(batcher, "first", length=8)]
        await engine.entered(1)
        tasks += [send(batcher, f"short{number}", length=8) for number in range(7)]
        tasks += [send(batcher, "long", length=512)]
        tasks += [send(batcher, f"short{number}", length=9) for number in range(7, 15)]
        await turns()
        engine.open()
        await asyncio.gather(*tasks)
    assert ["long"] in engine.calls
    assert len(engine.calls) <= 4, "and the short ones still share"


@on_each_loop
async def test_r12_a_lone_item_on_an_idle_batcher_waits_for_nothing() -> None:
    engine = Engine()
    async with running(engine) as batcher:
        for number in range(1, 20):
            lone = send(batcher, "lone")
            await engine.entered(number)  # no clock is turned, nobody else comes
            engine.let_through()
            assert values(await lone) == ["lone!"]


def test_r12_wait_counts_from_arrival() -> None:
    async def test() -> None:
        engine = Engine()
        async with running(engine, limits=Limits(linger_s=30, max_batch_items=2)) as batcher:
            first = send(batcher, "first", "one")
            await engine.entered(1)
            late = send(batcher, "late")
            await turns()
            clock.forward(31)
            engine.let_through()
            await engine.entered(2)  # it has waited as long as it may: the free lane takes it at once
            engine.open()
            assert values(await first + await late) == ["first!", "one!", "late!"]

    with turned_clock() as clock:
        run_on(asyncio.new_event_loop, test)


@on_each_loop
async def test_r14_counts_return_to_zero_when_callers_go_away() -> None:
    engine = Engine()
    async with running(engine, lanes=2, limits=Limits(max_batch_items=4)) as batcher:
        for round_number in range(3):
            tasks = [send(batcher, "a", "b", length=7) for _ in range(50)]
            await engine.entered(2 * (round_number + 1))
            for task in tasks:
                task.cancel()
            load = batcher.load()
            assert (load.queued_items, load.queued_tokens, load.oldest_age_s) == (0, 0, 0)
            engine.let_through(2)
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.wait_for(idle(batcher), SAFETY_S)
            assert all(task.cancelled() for task in tasks)
        assert len(engine.calls) == 6, "only what had begun was run"


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_r67_a_step_of_the_wall_clock_changes_nothing(step_s: float) -> None:
    async def test() -> None:
        engine = Engine()
        async with running(engine) as batcher:
            deadline = asyncio.get_running_loop().time() + 1800
            first, second = send(batcher, "a", deadline=deadline), send(batcher, "b", deadline=deadline)
            await engine.entered(1)
            with pytest.MonkeyPatch.context() as patch:
                real = time.time
                patch.setattr(time, "time", lambda: real() + step_s)
                load = batcher.load()
                engine.open()
                outcomes = await first + await second
                assert values(outcomes + await send(batcher, "c", deadline=deadline)) == ["a!", "b!", "c!"]
        assert 0 <= load.longest_run_s < 1800
        assert all(0 <= outcome.queue_s < 1800 and 0 <= outcome.run_s < 1800 for outcome in outcomes)

    run_on(asyncio.new_event_loop, test)


@on_each_loop
async def test_no_error_repeats_what_was_submitted() -> None:
    theirs = "nobody's business"

    def run(items: Sequence[str]) -> Sequence[str]:
        return [*items, "one too many"]

    async with running(run) as batcher:
        (outcome,) = await batcher.submit([theirs], [1])
        assert outcome.error is not None
        assert not re.search(theirs, f"{outcome.error} {outcome.error.detail} {outcome.error.__cause__}")
