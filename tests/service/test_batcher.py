"""The batcher's contract, points 1 to 5: who is admitted, when a batch is cut and what is in it."""

import asyncio

import pytest

from service.batcher import Limits
from service.errors import DeadlineExceeded, QueueFull
from tests.service.by_hand import (
    Engine,
    WatchedLoop,
    on_each_loop,
    run_on,
    running,
    send,
    turned_clock,
    turns,
    values,
    watched_loop,
)

# --- 1. all or nothing ------------------------------------------------------------------------------------


@on_each_loop
async def test_p01_all_or_nothing() -> None:
    engine = Engine()
    async with running(engine, limits=Limits(max_queue_items=4)) as batcher:
        first = send(batcher, "first")
        await engine.entered(1)
        waiting = send(batcher, "a", "b", "c")
        await turns()
        with pytest.raises(QueueFull):
            await batcher.submit(["d", "e"], [1, 1])
        assert batcher.load().queued_items == 3
        fits = send(batcher, "f")
        engine.open()
        assert values(await first + await waiting + await fits) == ["first!", "a!", "b!", "c!", "f!"]
    assert "d" not in engine.seen
    assert "e" not in engine.seen


@on_each_loop
async def test_p01_outcomes_come_in_the_order_of_the_items() -> None:
    engine = Engine(is_open=True)
    async with running(engine, limits=Limits(max_batch_items=2)) as batcher:
        items = ["long", "s", "longer", "t", "longest"]
        assert values(await batcher.submit(items, [40, 1, 60, 1, 70])) == [f"{item}!" for item in items]
    assert ["s", "t"] in engine.calls, "the run order was not the order of the items"


@on_each_loop
async def test_p01_no_items_no_outcomes() -> None:
    engine = Engine()
    async with running(engine) as batcher:
        assert await batcher.submit([], []) == []
    assert engine.calls == []


@on_each_loop
async def test_p01_lengths_must_fit_the_items() -> None:
    async with running(Engine()) as batcher:
        with pytest.raises(ValueError, match="2 items"):
            await batcher.submit(["a", "b"], [1])
        with pytest.raises(ValueError, match="at least 1"):
            await batcher.submit(["a"], [0])
        assert batcher.load().queued_items == 0


# --- 2. full ----------------------------------------------------------------------------------------------


@on_each_loop
async def test_p02_full_of_items_or_tokens_is_refused_at_once() -> None:
    engine = Engine()
    async with running(engine, limits=Limits(max_queue_items=2, max_queue_tokens=100)) as batcher:
        send(batcher, "first")
        await engine.entered(1)
        send(batcher, "a", length=60)
        await turns()
        turned: list[bool] = []
        asyncio.get_running_loop().call_soon(turned.append, True)
        with pytest.raises(QueueFull):
            await batcher.submit(["b"], [41])
        with pytest.raises(QueueFull):
            await batcher.submit(["b", "c"], [1, 1])
        assert not turned, "the refusal waited for something"
        fits = send(batcher, "b", length=40)
        engine.open()
        assert values(await fits) == ["b!"]


@on_each_loop
async def test_p02_cancelled_items_make_room_in_the_same_turn() -> None:
    engine = Engine()
    async with running(engine, limits=Limits(max_queue_items=2)) as batcher:
        send(batcher, "first")
        await engine.entered(1)
        gone = send(batcher, "gone", "too")
        await turns()
        gone.cancel()
        admitted = send(batcher, "a", "b")  # its first step is run before that of the cancelled task
        engine.open()
        assert values(await admitted) == ["a!", "b!"]
        assert gone.cancelled()


def test_p02_overdue_items_make_room_though_their_timer_has_not_run() -> None:
    async def test() -> None:
        engine = Engine()
        async with running(engine, limits=Limits(max_queue_items=2)) as batcher:
            send(batcher, "first")
            await engine.entered(1)
            late = send(batcher, "late", "too", deadline=asyncio.get_running_loop().time() + 10)
            await turns()
            clock.forward(11)
            coroutine = batcher.submit(["a", "b"], [1, 1])
            coroutine.send(None)  # admitted without a turn of the loop in which the timer could run
            coroutine.close()
            with pytest.raises(DeadlineExceeded):
                await late
        assert "late" not in engine.seen

    with turned_clock() as clock:
        run_on(asyncio.new_event_loop, test)


@on_each_loop
async def test_p02_an_empty_queue_admits_what_is_over_the_tokens_but_never_over_the_items() -> None:
    engine = Engine(is_open=True)
    async with running(engine, limits=Limits(max_queue_items=2, max_queue_tokens=100)) as batcher:
        assert values(await batcher.submit(["a", "b"], [400, 500])) == ["a!", "b!"]
        with pytest.raises(ValueError, match="never fit"):
            await batcher.submit(["a", "b", "c"], [1, 1, 1])


@on_each_loop
async def test_p02_the_wait_that_is_asked_for_follows_what_waits() -> None:
    engine = Engine()
    limits = Limits(max_queue_items=1, max_queue_tokens=10**15)
    async with running(engine, limits=limits) as batcher:

        async def asked_for(waiting_tokens: int) -> int | None:
            waiting = send(batcher, "waits", length=waiting_tokens)
            await turns()
            with pytest.raises(QueueFull) as refused:
                await batcher.submit(["x"], [1])
            waiting.cancel()
            return refused.value.retry_after_s

        send(batcher, "unmeasured")
        await engine.entered(1)
        assert await asked_for(10**12) == 1, "nothing is known yet"
        engine.let_through()
        send(batcher, "measured")
        await engine.entered(2)
        assert await asked_for(1) == 1
        assert await asked_for(10**12) == 60, "a token took some time: so many take longer than the bound"


# --- 3. cut when a lane is free ---------------------------------------------------------------------------


@on_each_loop
async def test_p03_the_next_batch_grows_while_the_lane_is_busy() -> None:
    engine = Engine()
    async with running(engine) as batcher:
        tasks = [send(batcher, "first")]
        await engine.entered(1)
        for name in "abc":
            tasks.append(send(batcher, name))
            await turns()
        assert engine.calls == [["first"]]
        engine.open()
        await asyncio.gather(*tasks)
    assert engine.calls == [["first"], ["a", "b", "c"]]


@on_each_loop
async def test_p03_what_arrives_in_one_turn_shares_a_batch() -> None:
    engine = Engine(is_open=True)
    async with running(engine) as batcher:
        await asyncio.gather(*(send(batcher, name) for name in "abcd"))
    assert engine.calls == [["a", "b", "c", "d"]]


@on_each_loop
async def test_p03_no_lane_stays_free_while_another_gets_all_the_work() -> None:
    engine = Engine()
    async with running(engine, lanes=3) as batcher:
        tasks = [send(batcher, str(number)) for number in range(7)]
        await engine.entered(3)
        assert sorted(map(len, engine.calls)) == [2, 2, 3]
        engine.open()
        await asyncio.gather(*tasks)


def test_p03_no_timer_is_needed() -> None:
    async def test() -> None:
        loop = watched_loop()
        before = len(loop.timers)
        async with running(Engine(is_open=True)) as batcher:
            for _ in range(10):
                await asyncio.gather(send(batcher, "a"), send(batcher, "b", "c"))
            assert len(loop.timers) == before

    run_on(WatchedLoop, test)


def test_p03_one_cut_is_asked_for_however_many_arrive() -> None:
    async def test() -> None:
        async with running(Engine(is_open=True)) as batcher:
            loop = watched_loop()
            arrivals = [batcher.submit([name], [1]) for name in "abc"]
            before = loop.asked
            for arrival in arrivals:
                arrival.send(None)
            assert loop.asked == before + 1
            for arrival in arrivals:
                arrival.close()

    run_on(WatchedLoop, test)


def test_p03_linger_counts_from_the_oldest_arrival() -> None:
    async def test() -> None:
        engine = Engine()
        async with running(engine, limits=Limits(linger_s=60)) as batcher:
            first = send(batcher, "first")
            await turns()
            clock.forward(59)
            younger = send(batcher, "younger")
            await turns()
            assert engine.calls == []
            clock.forward(2)
            await engine.entered(1)
            assert engine.calls == [["first", "younger"]], "the younger does not begin the wait anew"

            waits = send(batcher, "waits")
            await turns()
            clock.forward(61)  # its wait is over before a lane is free
            engine.open()
            await asyncio.gather(first, younger, waits)
        assert engine.calls[1:] == [["waits"]]

    with turned_clock() as clock:
        run_on(asyncio.new_event_loop, test)


def test_p03_who_has_little_time_lingers_for_half_of_it() -> None:
    async def test() -> None:
        engine = Engine()
        loop = asyncio.get_running_loop()
        async with running(engine, limits=Limits(linger_s=3600)) as batcher:
            patient = send(batcher, "patient")
            await turns()
            hurried = send(batcher, "hurried", deadline=loop.time() + 100)
            await turns()
            clock.forward(49)
            await turns()
            assert engine.calls == []
            clock.forward(2)
            await engine.entered(1)
            engine.open()
            await asyncio.gather(patient, hurried)
        assert engine.calls == [["patient", "hurried"]]

    with turned_clock() as clock:
        run_on(asyncio.new_event_loop, test)


@on_each_loop
async def test_p03_linger_ends_when_the_batch_is_full() -> None:
    engine = Engine(is_open=True)
    limits = Limits(linger_s=3600, max_batch_items=3, max_batch_tokens=100)
    async with running(engine, limits=limits) as batcher:
        lone = send(batcher, "a")
        await turns()
        await asyncio.gather(lone, send(batcher, "b", "c"))
        full, rest = send(batcher, "long", length=60), send(batcher, "longer", length=70)
        await full
        assert not rest.done()
    assert engine.calls == [["a", "b", "c"], ["long"], ["longer"]]


# --- 4. neighbours in length ------------------------------------------------------------------------------


@on_each_loop
async def test_p04_a_batch_is_built_of_neighbours_in_length() -> None:
    engine = Engine()
    async with running(engine, limits=Limits(max_batch_items=3)) as batcher:
        tasks = [send(batcher, "first")]
        await engine.entered(1)
        tasks += [send(batcher, f"t{length}", length=length) for length in (20, 90, 5, 21, 91, 18)]
        await turns()
        engine.open()
        await asyncio.gather(*tasks)
    assert [sorted(call) for call in engine.calls] == [["first"], ["t18", "t20", "t21"], ["t5", "t90", "t91"]]


@on_each_loop
async def test_p04_longest_times_count_stays_within_the_tokens() -> None:
    engine = Engine()
    async with running(engine, limits=Limits(max_batch_tokens=100)) as batcher:
        tasks = [send(batcher, "first")]
        await engine.entered(1)
        tasks += [send(batcher, f"{name}{length}", length=length) for name in "ab" for length in (30, 40, 10)]
        await turns()
        engine.open()
        await asyncio.gather(*tasks)
    assert engine.calls[1:] == [["a30", "b30", "a10"], ["a40", "b40"], ["b10"]]


@on_each_loop
async def test_p04_a_lone_oversize_item_still_goes() -> None:
    engine = Engine(is_open=True)
    async with running(engine, limits=Limits(max_batch_tokens=100)) as batcher:
        await asyncio.gather(send(batcher, "huge", length=500), send(batcher, "small"))
    assert engine.calls == [["huge"], ["small"]]


@on_each_loop
async def test_p04_the_oldest_does_not_starve_behind_a_stream_of_others() -> None:
    engine = Engine()
    async with running(engine, limits=Limits(max_batch_items=2)) as batcher:
        tasks = [send(batcher, "first"), send(batcher, "short"), send(batcher, "long", length=500)]
        await engine.entered(1)
        for number in range(4):  # there are always enough short ones for a full batch
            tasks += [send(batcher, f"{number}a"), send(batcher, f"{number}b")]
            await turns()
            engine.let_through()
            await engine.entered(number + 2)
        assert "long" in [item for call in engine.calls[:3] for item in call]
        engine.open()
        await asyncio.gather(*tasks)


# --- 5. turns ---------------------------------------------------------------------------------------------


@on_each_loop
async def test_p05_a_large_request_does_not_hold_back_a_small_one() -> None:
    engine = Engine()
    async with running(engine, limits=Limits(max_batch_items=4)) as batcher:
        large = send(batcher, *(f"large{number}" for number in range(200)))
        await engine.entered(1)
        small = send(batcher, "small", length=100)
        later = send(batcher, "later", length=300)
        await turns()
        engine.let_through(4)
        await engine.entered(5)
        assert values(await small + await later) == ["small!", "later!"]
        assert not large.done()
        engine.open()
        assert len(await large) == 200
