"""What the batcher's tests share: an engine opened by hand, a clock that is turned, and both event loops."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context
from typing import Any, TypeVarTuple

import pytest
import uvloop

from service.batcher import Batcher, Limits, Outcome

Ts = TypeVarTuple("Ts")

SAFETY_S = 60  # a test that hangs fails; nothing waits for this
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


class Engine:
    """A blocking function that answers `x` with `x!`. Each call waits until the test lets it through.

    Attributes:
        calls: what each call was given, in the order in which the calls began.
        faults: what is raised when an item of this name is in the call.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self.calls: list[list[str]] = []
        self.faults: dict[str, BaseException] = {}
        self._is_open = is_open
        self._allowed = 0
        self._changed = threading.Condition()

    def __call__(self, items: Sequence[str]) -> Sequence[str]:
        with self._changed:
            self.calls.append(list(items))
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_open or self._allowed)
            self._allowed -= not self._is_open
        for item in items:
            if item in self.faults:
                raise self.faults[item]
        return [item + "!" for item in items]

    @property
    def seen(self) -> list[str]:
        """Every item that was ever given to the function."""
        return [item for call in self.calls for item in call]

    def let_through(self, calls: int = 1) -> None:
        with self._changed:
            self._allowed += calls
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    async def entered(self, calls: int) -> None:
        """Wait until so many calls have begun."""

        def wait() -> None:
            with self._changed:
                assert self._changed.wait_for(lambda: len(self.calls) >= calls, SAFETY_S)

        await asyncio.to_thread(wait)


@asynccontextmanager
async def running(
    engine: Callable[[Sequence[str]], Sequence[str]], *, lanes: int = 1, limits: Limits | None = None
) -> AsyncIterator[Batcher[str, str]]:
    """A started batcher. At the end the engine is opened, and everything must end well."""
    batcher: Batcher[str, str] = Batcher(engine, lanes=lanes, limits=limits or Limits())
    await batcher.start()
    try:
        yield batcher
    finally:
        if isinstance(engine, Engine):
            engine.open()
        await batcher.close(SAFETY_S)


def send(
    batcher: Batcher[str, str], *items: str, length: int = 1, deadline: float | None = None
) -> asyncio.Task[list[Outcome[str]]]:
    """Submit items of one length in a task of their own."""
    return asyncio.create_task(batcher.submit(items, [length] * len(items), deadline=deadline))


async def turns(count: int = 3) -> None:
    """Let the loop turn: tasks made before have submitted, and a cut that was due is made."""
    for _ in range(count):
        await asyncio.sleep(0)


async def idle(batcher: Batcher[str, str]) -> None:
    """Let the loop turn until no call is under way."""
    while batcher.load().busy_lanes:  # noqa: ASYNC110 - the batcher tells nobody when it is idle
        await asyncio.sleep(0)


def values(outcomes: Sequence[Outcome[str]]) -> list[str | None]:
    return [outcome.value for outcome in outcomes]


def on_each_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on asyncio's loop and on uvloop; an error that only the loop hears of fails it."""

    @pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])
    def on_loop(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        run_on(new_loop, test)

    on_loop.__name__ = test.__name__
    on_loop.__doc__ = test.__doc__
    on_loop.__module__ = test.__module__
    return on_loop


def run_on(
    new_loop: Callable[[], asyncio.AbstractEventLoop], test: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    unheard: list[dict[str, Any]] = []

    async def guarded() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unheard.append(context))
        running_test = asyncio.ensure_future(test())
        # Not a timer of the loop: the test may turn its clock.
        safety = threading.Timer(SAFETY_S, loop.call_soon_threadsafe, (running_test.cancel, "the test hangs"))
        safety.start()
        try:
            await running_test
        finally:
            safety.cancel()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(guarded())
    assert unheard == []


class Clock:
    """The monotonic clock, which the test may put forward."""

    def __init__(self) -> None:
        self._ahead_s = 0.0
        self._real = time.monotonic

    def forward(self, seconds: float) -> None:
        self._ahead_s += seconds

    def __call__(self) -> float:
        return self._real() + self._ahead_s


@contextmanager
def turned_clock() -> Iterator[Clock]:
    """For tests on asyncio's own loop, whose clock is `time.monotonic`."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(time, "monotonic", clock)
        yield clock


class WatchedLoop(asyncio.SelectorEventLoop):
    """Counts what it is asked to do, and sees what comes from a lane.

    Attributes:
        asked, timers: how often anything was asked for, and the timers that were.
        handed_back: set when a lane has left its message for the loop.
        fault: raised once in a lane that hands something back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.timers: list[asyncio.TimerHandle] = []
        self.handed_back = threading.Event()
        self.fault: BaseException | None = None

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self.asked += 1
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self.asked += 1
        self.timers.append(super().call_at(when, callback, *args, context=context))
        return self.timers[-1]

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        from_a_lane = threading.current_thread().name.startswith("lane-")
        if from_a_lane and self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        self.asked += 1
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        if from_a_lane:
            self.handed_back.set()
        return handle


def watched_loop() -> WatchedLoop:
    """The running loop of a test that runs on one."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, WatchedLoop)
    return loop


def lane_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("lane-")}
