"""Threads that make calls, and the measure of their speed."""

import asyncio
import hashlib
import os
import sys
import threading
import time
from collections.abc import Sequence

import pytest

from service.lanes import STEP_BACK, Call, DrainRate, Lanes
from tests.service.by_hand import SAFETY_S, on_each_loop, run_on, turned_clock

NICEST = 19
BUSY_S = 0.2  # of CPU


def nothing() -> None:
    """No call follows."""


def test_nothing_is_known_before_the_first_call() -> None:
    assert DrainRate(lanes=2).seconds_for(1000) == 0


def test_the_rate_is_tokens_by_the_time_that_calls_took_over_all_lanes() -> None:
    rate = DrainRate(lanes=2)
    rate.called(100, 1.0)
    rate.called(300, 1.0)
    assert rate.seconds_for(4000) == pytest.approx(10)


def test_what_failed_takes_time_and_drains_nothing() -> None:
    rate = DrainRate(lanes=1)
    rate.called(100, 1.0)
    rate.called(0, 1.0)
    assert rate.seconds_for(100) == pytest.approx(2)


def test_a_lane_that_is_stuck_lowers_the_rate() -> None:
    rate = DrainRate(lanes=1)
    rate.called(100, 1.0)
    assert rate.seconds_for(100, running_s=9.0) == pytest.approx(10)


def test_the_distant_past_is_forgotten() -> None:
    rate = DrainRate(lanes=1)
    rate.called(1, 1000.0)
    for _ in range(64):
        rate.called(100, 1.0)
    assert rate.seconds_for(100) == pytest.approx(1)


def test_what_is_usual_is_known_after_sixteen_calls() -> None:
    rate = DrainRate(lanes=1)
    for _ in range(15):
        rate.called(100, 1.0)
    assert rate.usual_seconds_for(1000) == 0
    rate.called(100, 1.0)
    assert rate.usual_seconds_for(1000) == pytest.approx(10)


@on_each_loop
async def test_calls_come_back_on_the_loop_and_lanes_outlive_what_they_raise() -> None:
    class FatalError(BaseException):
        pass

    fatal = FatalError()

    def run(values: Sequence[int]) -> Sequence[int]:
        if 0 in values:
            raise fatal
        return [value * 2 for value in values]

    done: asyncio.Queue[Call[int, int]] = asyncio.Queue()
    died: list[BaseException] = []
    lanes: Lanes[int, int] = Lanes(run, 1, follow=nothing, done=done.put_nowait, died=died.append)
    lanes.start()
    for values in ([0], [3, 4]):
        lanes.hand_in(Call(values, tokens=1))
    failed, made = await done.get(), await done.get()
    assert failed.error is fatal
    assert (made.results, made.error) == ([6, 8], None)
    assert failed.ended_s <= made.started_s <= made.ended_s
    assert lanes.under_way == {}
    lanes.stop()
    await lanes.ended()
    assert died == []


@on_each_loop
async def test_a_lane_goes_on_without_the_loop_unless_its_call_failed() -> None:
    ready: list[Call[int, int]] = [Call([number], tokens=1) for number in (4, 3, 2)]
    made: list[int] = []
    enough = threading.Event()

    def run(values: Sequence[int]) -> Sequence[int]:
        made.extend(values)
        if 3 in values:
            enough.set()
            raise RuntimeError
        return values

    back: asyncio.Queue[Call[int, int]] = asyncio.Queue()
    lanes: Lanes[int, int] = Lanes(run, 1, follow=ready.pop, done=back.put_nowait, died=raise_it)
    lanes.start()
    lanes.hand_in(Call([1], tokens=1))
    assert enough.wait(SAFETY_S), "the loop stands still, and three calls were made"
    assert [(await back.get()).items for _ in range(3)] == [[1], [2], [3]]
    assert (made, lanes.free, len(ready)) == ([1, 2, 3], 1, 1)
    lanes.stop()
    await lanes.ended()


@on_each_loop
async def test_a_lane_that_dies_after_its_call_hands_it_back_and_is_not_free() -> None:
    defect = MemoryError()

    def follow() -> None:
        raise defect

    back: asyncio.Queue[tuple[Sequence[int], int]] = asyncio.Queue()
    died: asyncio.Queue[BaseException] = asyncio.Queue()
    lanes: Lanes[int, int] = Lanes(
        lambda values: values,
        1,
        follow=follow,
        done=lambda call: back.put_nowait((call.results, lanes.free)),
        died=died.put_nowait,
    )
    lanes.start()
    lanes.hand_in(Call([1], tokens=1))
    assert await back.get() == ([1], 0), "nothing more may be handed in to it"
    assert await died.get() is defect
    lanes.stop()
    await lanes.ended()


def test_the_estimate_counts_failed_calls_and_one_that_is_stuck_as_slow() -> None:
    go = threading.Event()

    def run(values: Sequence[str]) -> Sequence[str]:
        if "fails" in values:
            raise RuntimeError
        if "stuck" in values:
            go.wait()
        return values

    async def test() -> None:
        done: asyncio.Queue[Call[str, str]] = asyncio.Queue()
        lanes: Lanes[str, str] = Lanes(run, 1, follow=nothing, done=done.put_nowait, died=raise_it)
        lanes.start()
        lanes.hand_in(Call(["fails"], tokens=1000))
        failed = await done.get()
        assert lanes.seconds_for(1000) > 100 * failed.run_s
        lanes.hand_in(Call(["works"], tokens=1000))
        await done.get()
        before_s = lanes.seconds_for(1000)
        lanes.hand_in(Call(["stuck"], tokens=1))
        clock.forward(500)
        assert lanes.seconds_for(1000) >= before_s + 500
        go.set()
        await done.get()
        lanes.stop()
        await lanes.ended()

    with turned_clock() as clock:
        run_on(asyncio.new_event_loop, test)


def raise_it(error: BaseException) -> None:
    raise error


def test_a_slow_spell_is_forgotten_with_time() -> None:
    now_s = 0.0
    rate = DrainRate(lanes=2, clock=lambda: now_s)
    for _ in range(64):
        rate.called(100, 5.0)
    assert rate.usual_seconds_for(1000) == pytest.approx(25)
    now_s = 11.0
    assert rate.usual_seconds_for(1000) == 0
    rate.called(100, 1.0)
    assert rate.seconds_for(1000) == pytest.approx(5)


def test_one_call_that_stood_still_in_each_lane_does_not_make_the_others_slow() -> None:
    rate = DrainRate(lanes=2)
    for _ in range(40):
        rate.called(100, 0.1)
    rate.called(100, 600.0)
    rate.called(100, 600.0)
    assert rate.usual_seconds_for(1000) == pytest.approx(0.5)


where_a_thread_can_be_nicer = pytest.mark.skipif(
    sys.platform != "linux" or os.getpriority(os.PRIO_PROCESS, 0) > NICEST - STEP_BACK,
    reason="niceness is of the whole process here, or the tests are about as nice as can be",
)


@where_a_thread_can_be_nicer
@on_each_loop
async def test_a_lane_is_nicer_than_its_loop_which_stays_as_it_was() -> None:
    own_niceness = os.getpriority(os.PRIO_PROCESS, 0)

    def run(values: Sequence[int]) -> Sequence[int]:
        return [os.getpriority(os.PRIO_PROCESS, 0) for _ in values]

    done: asyncio.Queue[Call[int, int]] = asyncio.Queue()
    lanes: Lanes[int, int] = Lanes(run, 2, follow=nothing, done=done.put_nowait, died=raise_it)
    lanes.start()
    lanes.hand_in(Call([1], tokens=1))
    assert (await done.get()).results == [own_niceness + STEP_BACK]
    assert os.getpriority(os.PRIO_PROCESS, 0) == own_niceness
    lanes.stop()
    await lanes.ended()


@where_a_thread_can_be_nicer
def test_a_loop_with_much_to_do_gets_more_of_a_core_than_the_lane_beside_it() -> None:
    """Both compute without the global lock, on one and the same core."""
    core = {min(os.sched_getaffinity(0))}
    begun, enough = threading.Event(), threading.Event()
    clocks: list[int] = []

    def run(values: Sequence[int]) -> Sequence[int]:
        os.sched_setaffinity(0, core)
        clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
        begun.set()
        while not enough.is_set():
            compute()
        return values

    async def test() -> None:
        done: asyncio.Queue[Call[int, int]] = asyncio.Queue()
        lanes: Lanes[int, int] = Lanes(run, 1, follow=nothing, done=done.put_nowait, died=raise_it)
        lanes.start()
        lanes.hand_in(Call([1], tokens=1))
        assert begun.wait(SAFETY_S)
        own_s, lane_s = time.thread_time(), time.clock_gettime(clocks[0])
        while time.thread_time() - own_s < BUSY_S:
            compute()
        lane_s = time.clock_gettime(clocks[0]) - lane_s
        enough.set()
        await done.get()
        lanes.stop()
        await lanes.ended()
        assert lane_s < 0.7 * BUSY_S, "equals would have had the same"

    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, core)
    try:
        run_on(asyncio.new_event_loop, test)
    finally:
        os.sched_setaffinity(0, before)


def compute() -> None:
    """About a millisecond in C, without the global lock."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1000)
