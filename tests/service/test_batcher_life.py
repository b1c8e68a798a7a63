"""The batcher's contract, points 9 and 10: start, close, idleness and load."""

import asyncio
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from service.batcher import Batcher, Limits
from service.errors import QueueFull, Stopping
from service.load import Load
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

ROOT = Path(__file__).parent.parent.parent

# --- 9. close ---------------------------------------------------------------------------------------------


@on_each_loop
async def test_p09_close_finishes_what_is_queued_and_ends_the_threads() -> None:
    before = lane_threads()
    engine = Engine()
    batcher: Batcher[str, str] = Batcher(engine, lanes=2, limits=Limits(max_batch_items=2))
    await batcher.start()
    accepted = send(batcher, *(str(number) for number in range(9)))
    await engine.entered(2)
    lanes = lane_threads() - before
    assert len(lanes) == 2
    closing = asyncio.create_task(batcher.close(SAFETY_S))
    await turns()
    with pytest.raises(Stopping):
        await batcher.submit(["new"], [1])
    assert not closing.done()
    engine.open()
    await closing
    assert values(await accepted) == [f"{number}!" for number in range(9)]
    assert not any(lane.is_alive() for lane in lanes)
    assert "new" not in engine.seen


@on_each_loop
async def test_p09_after_the_timeout_the_remaining_waiters_fail_and_a_stuck_lane_is_left() -> None:
    before = lane_threads()
    engine = Engine()
    batcher: Batcher[str, str] = Batcher(engine, lanes=1, limits=Limits())
    await batcher.start()
    running_one = send(batcher, "running")
    await engine.entered(1)
    queued = send(batcher, "queued")
    await turns()
    (lane,) = lane_threads() - before
    await batcher.close(0.01)
    for waiter in (running_one, queued):
        with pytest.raises(Stopping):
            await waiter
    assert lane.is_alive()
    engine.open()
    await batcher.close(SAFETY_S)
    assert not lane.is_alive()
    assert engine.calls == [["running"]]


@on_each_loop
async def test_p09_close_may_be_called_again_and_at_the_same_time() -> None:
    engine = Engine()
    batcher: Batcher[str, str] = Batcher(engine, lanes=1, limits=Limits())
    await batcher.start()
    accepted = send(batcher, "a")
    await engine.entered(1)
    closing = [asyncio.create_task(batcher.close(SAFETY_S)) for _ in range(3)]
    await turns()
    engine.open()
    await asyncio.gather(*closing)
    await batcher.close(0)
    assert values(await accepted) == ["a!"]


@on_each_loop
async def test_p09_close_does_not_wait_for_company() -> None:
    engine = Engine(is_open=True)
    batcher: Batcher[str, str] = Batcher(engine, lanes=1, limits=Limits(linger_s=3600))
    await batcher.start()
    accepted = send(batcher, "a")
    await turns()
    await batcher.close(SAFETY_S)
    assert values(await accepted) == ["a!"]


@on_each_loop
async def test_p09_a_batcher_is_started_once_and_before_use() -> None:
    batcher: Batcher[str, str] = Batcher(Engine(), lanes=1, limits=Limits())
    with pytest.raises(RuntimeError, match="before start"):
        await batcher.submit(["a"], [1])
    await batcher.start()
    with pytest.raises(RuntimeError, match="once"):
        await batcher.start()
    await batcher.close(SAFETY_S)
    with pytest.raises(RuntimeError, match="close"):
        await batcher.start()
    closed: Batcher[str, str] = Batcher(Engine(), lanes=1, limits=Limits())
    await closed.close(0)
    with pytest.raises(RuntimeError, match="close"):
        await closed.start()
    with pytest.raises(Stopping):
        await closed.submit(["a"], [1])


def test_p09_a_lane_needs_to_be() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Batcher(Engine(), lanes=0, limits=Limits())


def test_p09_a_stuck_lane_does_not_keep_the_process_alive() -> None:
    program = """
        import asyncio, threading
        from service.batcher import Batcher, Limits
        from service.errors import Stopping

        entered = threading.Event()

        def run(items):
            entered.set()
            threading.Event().wait()

        async def main():
            batcher = Batcher(run, lanes=1, limits=Limits())
            await batcher.start()
            waiter = asyncio.create_task(batcher.submit(["a"], [1]))
            await asyncio.to_thread(entered.wait)
            await batcher.close(0.01)
            try:
                await waiter
            except Stopping:
                print("told")

        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=SAFETY_S,
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "told\n", "")


@on_each_loop
async def test_p09_a_result_that_comes_after_the_loop_is_gone_harms_nobody() -> None:
    """The lane is left behind with its call; the fixture of this test closes the loop under it."""
    before = lane_threads()
    engine = Engine()
    inner = asyncio.new_event_loop()

    def other_loop() -> None:
        async def leave_a_stuck_lane() -> None:
            batcher: Batcher[str, str] = Batcher(engine, lanes=1, limits=Limits())
            await batcher.start()
            waiter = send(batcher, "a")
            await engine.entered(1)
            await batcher.close(0)
            with pytest.raises(Stopping):
                await waiter
            await asyncio.get_running_loop().shutdown_default_executor()

        inner.run_until_complete(leave_a_stuck_lane())
        inner.close()

    await asyncio.to_thread(other_loop)
    (lane,) = lane_threads() - before
    engine.open()
    lane.join(SAFETY_S)  # an error in the thread would fail the test as a warning
    assert not lane.is_alive()


def test_p09_idle_costs_nothing() -> None:
    async def test() -> None:
        loop = watched_loop()
        before = lane_threads()
        async with running(Engine(is_open=True), lanes=2) as batcher:
            await asyncio.gather(*(send(batcher, name) for name in "abcdef"))
            lanes = lane_threads() - before
            clocks = [time.pthread_getcpuclockid(lane.ident) for lane in lanes if lane.ident]
            asked = -1
            while loop.asked != asked:  # what the work itself left to do
                asked = loop.asked + 1
                await asyncio.sleep(0)
            assert len(clocks) == 2
            used: list[float] = []
            for _ in range(100):  # a lane may still be on its way to rest
                before_s, used = used, [time.clock_gettime(clock) for clock in clocks]
                if used == before_s:
                    break
                time.sleep(0.02)  # noqa: ASYNC251
            time.sleep(0.1)  # noqa: ASYNC251 - idle time is what is looked at
            assert [time.clock_gettime(clock) for clock in clocks] == used, "a lane did something"
            await asyncio.sleep(0)
            assert loop.asked == asked + 1, "only this test's own sleep"

    run_on(WatchedLoop, test)


# --- 10. load ---------------------------------------------------------------------------------------------


def test_p10_load_tells_depth_age_and_how_long_a_call_has_been_under_way() -> None:
    async def test() -> None:
        engine = Engine()
        async with running(engine, lanes=2, limits=Limits(max_batch_items=2)) as batcher:
            assert batcher.load() == Load(
                queued_items=0, queued_tokens=0, oldest_age_s=0, busy_lanes=0, longest_run_s=0, dead=False
            )
            tasks = [send(batcher, "a", "b")]
            await engine.entered(2)
            clock.forward(100)
            tasks += [send(batcher, "c", "d", length=20)]
            await turns()
            clock.forward(10)
            tasks += [send(batcher, "e", length=5)]
            await turns()
            load = batcher.load()
            assert (load.queued_items, load.queued_tokens, load.busy_lanes, load.running_items) == (
                3,
                45,
                2,
                2,
            )
            assert 10 <= load.oldest_age_s < 100
            assert 110 <= load.longest_run_s < 1000
            engine.let_through()
            await engine.entered(3)
            assert batcher.load().longest_run_s >= 110, "the other one is still under way"
            engine.open()
            await asyncio.gather(*tasks)
            load = batcher.load()
            assert (load.queued_items, load.queued_tokens, load.oldest_age_s) == (0, 0, 0)
            assert (load.busy_lanes, load.running_items, load.longest_run_s) == (0, 0, 0)

    with turned_clock() as clock:
        run_on(asyncio.new_event_loop, test)


def test_p10_outcomes_tell_the_wait_and_the_run() -> None:
    async def test() -> None:
        engine = Engine()
        async with running(engine, limits=Limits(max_batch_items=1)) as batcher:
            tasks = [send(batcher, "a")]
            await engine.entered(1)
            tasks += [send(batcher, "b")]
            await turns()
            clock.forward(50)
            engine.let_through()
            await engine.entered(2)
            clock.forward(7)
            engine.open()
            (first,), (second,) = await asyncio.gather(*tasks)
        assert 0 <= first.queue_s < 10
        assert 50 <= first.run_s < 57
        assert 50 <= second.queue_s < 57
        assert 7 <= second.run_s < 50

    with turned_clock() as clock:
        run_on(asyncio.new_event_loop, test)


@on_each_loop
async def test_p10_a_full_queue_is_not_death() -> None:
    engine = Engine()
    async with running(engine, limits=Limits(max_queue_items=1)) as batcher:
        tasks = [send(batcher, "a")]
        await engine.entered(1)
        tasks += [send(batcher, "b")]
        await turns()
        with pytest.raises(QueueFull):
            await batcher.submit(["c"], [1])
        assert not batcher.load().dead
        engine.open()
        await asyncio.gather(*tasks)
