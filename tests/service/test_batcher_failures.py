"""The batcher's contract, points 6 to 8: what is abandoned, what fails, and what kills."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from service.batcher import Batcher, Limits
from service.errors import DeadlineExceeded, EngineDead, EngineFailed
from tests.service.by_hand import (
    SAFETY_S,
    Engine,
    WatchedLoop,
    lane_threads,
    on_each_loop,
    run_on,
    running,
    send,
    turned_clock,
    turns,
    values,
    watched_loop,
)

# --- 6. abandoned -----------------------------------------------------------------------------------------


@on_each_loop
async def test_p06_cancelled_items_are_not_run() -> None:
    engine = Engine()
    async with running(engine) as batcher:
        first = send(batcher, "first")
        await engine.entered(1)
        gone, stays = send(batcher, "gone", "too"), send(batcher, "stays")
        await turns()
        gone.cancel()
        assert batcher.load().queued_items == 1
        engine.open()
        assert values(await first + await stays) == ["first!", "stays!"]
    assert engine.calls == [["first"], ["stays"]]


@on_each_loop
async def test_p06_the_rest_of_a_cancelled_request_is_not_run_and_late_results_are_dropped() -> None:
    engine = Engine()
    async with running(engine, limits=Limits(max_batch_items=2)) as batcher:
        gone = send(batcher, "a", "b", "c", "d")
        await engine.entered(1)
        gone.cancel()
        engine.open()
        assert values(await send(batcher, "next")) == ["next!"]
        assert gone.cancelled()
    assert engine.calls == [["a", "b"], ["next"]]


@on_each_loop
async def test_p06_the_deadline_is_kept_while_the_lane_is_stuck() -> None:
    engine = Engine()
    async with running(engine, limits=Limits(max_batch_items=1)) as batcher:
        soon = asyncio.get_running_loop().time() + 0.05
        begun = send(batcher, "begun", "late", deadline=soon)
        waits = send(batcher, "waits", deadline=soon)
        patient = send(batcher, "patient")
        await engine.entered(1)
        for late in (begun, waits):
            with pytest.raises(DeadlineExceeded):
                await late
        assert batcher.load().queued_items == 1
        engine.open()
        assert values(await patient) == ["patient!"]
    assert engine.calls == [["begun"], ["patient"]]


@on_each_loop
async def test_p06_a_deadline_that_has_passed_is_refused_at_once() -> None:
    engine = Engine()
    async with running(engine) as batcher:
        turned: list[bool] = []
        asyncio.get_running_loop().call_soon(turned.append, True)
        with pytest.raises(DeadlineExceeded):
            await batcher.submit(["a"], [1], deadline=asyncio.get_running_loop().time() - 1)
        assert not turned
    assert engine.calls == []


def test_p06_no_timer_outlives_its_request() -> None:
    async def test() -> None:
        loop = watched_loop()
        engine = Engine()
        async with running(engine) as batcher:
            before = len(loop.timers)
            answered, gone = (
                send(batcher, name, deadline=loop.time() + 3600) for name in ("answered", "gone")
            )
            await engine.entered(1)
            gone.cancel()
            engine.open()
            await answered
            deadlines = loop.timers[before:]
            assert len(deadlines) == 1  # for both: the earliest
            assert all(timer.cancelled() for timer in deadlines)

    run_on(WatchedLoop, test)


@on_each_loop
async def test_p06_each_of_many_is_told_at_its_own_deadline() -> None:
    """In whatever order they come, though there is one timer for all."""
    engine = Engine()
    async with running(engine, limits=Limits(max_batch_items=1)) as batcher:
        now = asyncio.get_running_loop().time()
        told: list[float] = []
        waiting = []

        def note(after_s: float, _: object) -> None:
            told.append(after_s)

        for after_s in (0.15, 0.05, 3600.0, 0.1, 0.05):
            one = send(batcher, f"{after_s}", deadline=now + after_s)
            one.add_done_callback(partial(note, after_s))
            waiting.append(one)
        await engine.entered(1)
        for number in (1, 4, 3, 0):
            with pytest.raises(DeadlineExceeded):
                await waiting[number]
        assert told == [0.05, 0.05, 0.1, 0.15]
        engine.open()
        assert values(await waiting[2]) == ["3600.0!"]


def test_p06_what_is_overdue_at_the_cut_is_not_run_though_its_timer_has_not_fired() -> None:
    async def test() -> None:
        engine = Engine()
        loop = watched_loop()
        async with running(engine) as batcher:
            first = send(batcher, "first")
            await engine.entered(1)
            late = send(batcher, "late", deadline=loop.time() + 10)
            await turns()
            clock.forward(11)
            engine.let_through()
            loop.handed_back.wait()  # the loop hangs: the lane is alone with what waits
            with pytest.raises(DeadlineExceeded):
                await late
            assert values(await first) == ["first!"]
        assert engine.calls == [["first"]]

    with turned_clock() as clock:
        run_on(WatchedLoop, test)


def test_p06_what_is_overdue_when_the_loop_cuts_is_not_run() -> None:
    """A lane whose call failed leaves the next cut to the loop, and there it comes before the timers."""

    async def test() -> None:
        engine = Engine()
        engine.faults = {"first": RuntimeError("first")}
        loop = watched_loop()
        async with running(engine) as batcher:
            first = send(batcher, "first")
            await engine.entered(1)
            late = send(batcher, "late", deadline=loop.time() + 10)
            await turns()
            engine.let_through()
            loop.handed_back.wait()
            clock.forward(11)
            with pytest.raises(DeadlineExceeded):
                await late
            assert values(await first) == [None]
        assert engine.calls == [["first"]]

    with turned_clock() as clock:
        run_on(WatchedLoop, test)


# --- 7. failures ------------------------------------------------------------------------------------------


@on_each_loop
async def test_p07_only_what_fails_alone_fails() -> None:
    engine = Engine(is_open=True)
    engine.faults = {"bad": RuntimeError("bad"), "worse": MemoryError("worse")}
    async with running(engine) as batcher:
        both, good, worse = await asyncio.gather(
            send(batcher, "a", "bad"), send(batcher, "b"), send(batcher, "worse")
        )
        assert (values(both), values(good), values(worse)) == (["a!", None], ["b!"], [None])
        assert isinstance(both[1].error, EngineFailed)
        assert both[1].error.__cause__ is engine.faults["bad"]
        assert isinstance(worse[0].error, EngineFailed)
        assert worse[0].error.__cause__ is engine.faults["worse"]
        assert both[0].error is None
    assert engine.calls == [["a", "bad", "b", "worse"], ["a"], ["bad"], ["b"], ["worse"]]


@on_each_loop
async def test_p07_each_waiter_has_an_error_of_his_own() -> None:
    class BrokenError(Exception):
        pass

    broken = BrokenError()

    def run(items: Sequence[str]) -> Sequence[str]:
        raise broken

    async with running(run) as batcher:
        outcomes = await batcher.submit(["a", "b", "c"], [1, 1, 1])
    errors = [outcome.error for outcome in outcomes]
    assert len({id(error) for error in errors}) == 3
    assert all(isinstance(error, EngineFailed) and error.__cause__ is broken for error in errors)


@pytest.mark.parametrize("wrong", [lambda items: items[1:], lambda items: [*items, "more"], lambda _: None])
def test_p07_a_wrong_number_of_results_is_a_failure(wrong: Callable[[Sequence[str]], Sequence[str]]) -> None:
    def run(items: Sequence[str]) -> Sequence[str]:
        return wrong(items) if "bad" in items else items

    async def test() -> None:
        async with running(run) as batcher:
            outcomes = await batcher.submit(["a", "bad", "c"], [1, 1, 1])
            assert values(outcomes) == ["a", None, "c"]
            assert isinstance(outcomes[1].error, EngineFailed)
            assert isinstance(outcomes[1].error.__cause__, ValueError | TypeError)

    run_on(asyncio.new_event_loop, test)


@on_each_loop
async def test_p07_what_was_abandoned_meanwhile_is_not_tried_again() -> None:
    engine = Engine()
    engine.faults = {"bad": RuntimeError()}
    async with running(engine) as batcher:
        gone, bad = send(batcher, "gone"), send(batcher, "bad")
        soon = send(batcher, "soon", deadline=asyncio.get_running_loop().time() + 0.05)
        await engine.entered(1)
        gone.cancel()
        with pytest.raises(DeadlineExceeded):
            await soon
        engine.open()
        assert isinstance((await bad)[0].error, EngineFailed)
    assert engine.calls == [["gone", "bad", "soon"], ["bad"]]


@on_each_loop
async def test_p07_one_that_is_tried_again_can_still_be_abandoned() -> None:
    engine = Engine()
    engine.faults = {"bad": RuntimeError()}
    async with running(engine) as batcher:
        bad, gone = send(batcher, "bad"), send(batcher, "gone")
        await engine.entered(1)
        engine.let_through()
        await engine.entered(2)
        assert batcher.load().queued_items == 1
        gone.cancel()
        assert batcher.load().queued_items == 0
        engine.open()
        await bad
    assert engine.calls == [["bad", "gone"], ["bad"]]


@on_each_loop
async def test_p07_what_is_tried_again_does_not_linger() -> None:
    engine = Engine(is_open=True)
    engine.faults = {"bad": RuntimeError()}
    async with running(engine, limits=Limits(linger_s=3600, max_batch_items=4)) as batcher:
        outcomes = await batcher.submit(["a", "b", "c", "bad"], [1, 1, 1, 1])
        assert values(outcomes) == ["a!", "b!", "c!", None]


# --- 8. death ---------------------------------------------------------------------------------------------


class Poison(int):
    """A length that cannot be counted with once it is armed: a defect inside the queue."""

    armed = False


def _raising_when_armed(operation: Callable[..., Any]) -> Callable[..., Any]:
    def operate(self: Poison, *args: Any) -> Any:
        if self.armed:
            raise ArithmeticError("armed")
        return operation(self, *args)

    return operate


for _name in (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "eq",
    "lt",
    "le",
    "gt",
    "ge",
    "hash",
    "bool",
    "index",
):
    setattr(Poison, f"__{_name}__", _raising_when_armed(getattr(int, f"__{_name}__")))


@on_each_loop
async def test_p08_when_the_queue_itself_dies_everybody_is_told() -> None:
    engine = Engine()
    poison = Poison(7)
    async with running(engine, lanes=2, limits=Limits(max_batch_items=1)) as batcher:
        first, running_too = send(batcher, "first"), send(batcher, "running", "and waiting")
        await engine.entered(2)
        poisoned = asyncio.create_task(batcher.submit(["poisoned"], [poison]))
        others = [
            send(batcher, "other"),
            send(batcher, "another", deadline=asyncio.get_running_loop().time() + 3600),
        ]
        await turns()
        assert not batcher.load().dead
        poison.armed = True
        engine.let_through(1)
        for waiter in (poisoned, running_too, *others):
            with pytest.raises(EngineDead) as told:
                await waiter
            assert isinstance(told.value.__cause__, ArithmeticError)
        with pytest.raises(EngineDead) as told:
            await batcher.submit(["new"], [1])
        assert isinstance(told.value.__cause__, ArithmeticError)
        assert batcher.load().dead
        assert batcher.load().queued_items == 0
        first.cancel()
    assert "new" not in engine.seen


def test_p08_the_log_has_what_the_queue_died_of(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        engine = Engine()
        poison = Poison(7)
        async with running(engine, limits=Limits(max_batch_items=1)) as batcher:
            first = send(batcher, "first")
            await engine.entered(1)
            poisoned = asyncio.create_task(batcher.submit(["poisoned"], [poison]))
            await turns()
            poison.armed = True
            engine.let_through(1)
            with pytest.raises(EngineDead):
                await poisoned
            await asyncio.gather(first, return_exceptions=True)

    run_on(asyncio.new_event_loop, test)
    [record] = [one for one in caplog.records if one.getMessage() == "the batcher is dead"]
    assert record.exc_info is not None
    assert record.exc_info[0] is ArithmeticError


@on_each_loop
async def test_p08_each_waiter_is_told_by_an_error_of_his_own() -> None:
    engine = Engine()
    poison = Poison(7)
    async with running(engine) as batcher:
        await_first = send(batcher, "first")
        await engine.entered(1)
        waiting = [
            asyncio.create_task(batcher.submit(["x"], [poison])),
            send(batcher, "a"),
            send(batcher, "b"),
        ]
        await turns()
        poison.armed = True
        engine.open()
        assert values(await await_first) == ["first!"], "what has been run is answered"
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in errors] == [EngineDead] * 3
        assert len({id(error) for error in errors}) == 3


def test_p08_who_comes_while_room_is_made_by_a_queue_that_dies_is_told() -> None:
    async def test() -> None:
        engine = Engine()
        loop = asyncio.get_running_loop()
        poison = Poison(7)
        async with running(engine, limits=Limits(max_queue_items=1)) as batcher:
            first = send(batcher, "first")
            await engine.entered(1)
            late = asyncio.create_task(batcher.submit(["late"], [poison], deadline=loop.time() + 10))
            await turns()
            poison.armed = True
            clock.forward(11)  # the alarm has not rung yet: who comes now looks who is late
            with pytest.raises(EngineDead):
                await batcher.submit(["comes"], [1])
            with pytest.raises(DeadlineExceeded):
                await late
            engine.open()
            await asyncio.gather(first, return_exceptions=True)
        assert engine.calls == [["first"]]

    with turned_clock() as clock:
        run_on(asyncio.new_event_loop, test)


@on_each_loop
async def test_p08_a_dead_batcher_ends_its_threads() -> None:
    before = lane_threads()
    engine = Engine()
    poison = Poison(7)
    async with running(engine, lanes=3) as batcher:
        tasks = [send(batcher, *"abc")]
        await engine.entered(3)
        tasks.append(asyncio.create_task(batcher.submit(["x"], [poison])))
        await turns()
        poison.armed = True
        lanes = lane_threads() - before
        engine.open()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert batcher.load().dead
        assert len(lanes) == 3
        for lane in lanes:  # not only at the close
            await asyncio.to_thread(lane.join, SAFETY_S)
            assert not lane.is_alive()


def test_p08_when_a_lane_dies_it_is_told() -> None:
    async def test() -> None:
        engine = Engine()
        async with running(engine) as batcher:
            waiter = send(batcher, "a")
            await engine.entered(1)
            watched_loop().fault = MemoryError()
            engine.open()
            with pytest.raises(EngineDead) as told:
                await waiter
            assert isinstance(told.value.__cause__, MemoryError)
            assert batcher.load().dead

    run_on(WatchedLoop, test)


@on_each_loop
async def test_p08_a_thread_that_cannot_be_started_is_no_start() -> None:
    before = lane_threads()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "lane-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    batcher: Batcher[str, str] = Batcher(Engine(), lanes=3, limits=Limits())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            await batcher.start()
    assert batcher.load().dead
    with pytest.raises(EngineDead):
        await batcher.submit(["a"], [1])
    await batcher.close(SAFETY_S)
    assert lane_threads() == before
