"""Threads that make calls, and the measure of their speed."""

import asyncio
from collections.abc import Sequence

import pytest

from service.lanes import Call, DrainRate, Lanes
from tests.service.by_hand import on_each_loop


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
    lanes: Lanes[int, int] = Lanes(run, 1, done=done.put_nowait, died=died.append)
    lanes.start()
    for values in ([0], [3, 4]):
        lanes.hand_in(Call(values, tokens=1))
    failed, made = await done.get(), await done.get()
    assert failed.error is fatal
    assert (made.results, made.error) == ([6, 8], None)
    assert failed.ended_s <= made.started_s <= made.ended_s
    lanes.stop()
    await lanes.ended()
    assert died == []
