"""A fixed set of threads that run a blocking function, and how fast they are.

A lane that has made a call asks for the next one itself, and tells the loop of both in one message. Nothing
polls: an idle lane sleeps until a call is handed in. Where cores are scarce the loop goes before the lanes.
Knows nothing of queues, requests or deadlines.
"""

import asyncio
import contextlib
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from operator import itemgetter
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

I = TypeVar("I")  # noqa: E741 - the item
R = TypeVar("R")

_REMEMBERED_CALLS = 64
_ENOUGH_CALLS = 16  # fewer, the first and slowest among them, say little of what is usual
_RECENT_S = 10.0
_RUN_S: Callable[[tuple[float, int, float]], float] = itemgetter(2)

LANE = "lane"
"""How the threads are called, for who looks at a process from outside."""

STEP_BACK = 5
"""How much nicer a lane is than the loop that started it: of a core that both want the loop has 3/4."""


@dataclass(eq=False, slots=True)
class Call(Generic[I, R]):
    """One call of the function, and what came of it: as many results as items, or an error.

    Attributes:
        items, tokens: what the function is called with, and how long it is in all.
        started_s, ended_s: on the monotonic clock; the lane that takes the call up corrects the start.
    """

    items: Sequence[I]
    tokens: int
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    results: Sequence[R] = ()
    error: BaseException | None = None

    @property
    def run_s(self) -> float:
        return self.ended_s - self.started_s

    def make(self, run: Callable[[Sequence[I]], Sequence[R]]) -> None:
        """Call `run`. Whatever it raises, MemoryError and SystemExit too, is kept: the lane must live on."""
        self.started_s = time.monotonic()
        try:
            results = list(run(self.items))
            if len(results) != len(self.items):
                raise ValueError(f"{len(results)} results for {len(self.items)} items")  # noqa: TRY301
            self.results = results
        except BaseException as error:  # noqa: BLE001
            traceback.clear_frames(error.__traceback__)  # its places are kept, not the items on its way
            self.error = error
        self.ended_s = time.monotonic()


class DrainRate:
    """How fast the lanes work, measured over the last calls. Idle time does not count.

    Args:
        lanes: how many threads work at the same time.
        clock: seconds; what it shows does not matter, only that it goes on.
    """

    def __init__(self, lanes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._lanes = lanes
        self._clock = clock
        self._calls: deque[tuple[float, int, float]] = deque()
        self._tokens = 0  # of all that is remembered, and what it took
        self._run_s = 0.0
        self._usual_s: float | None = None  # worked out when it is asked for

    def called(self, tokens: int, run_s: float) -> None:
        """A call took `run_s` seconds of a lane and answered for `tokens` (0 when it failed)."""
        now = self._clock()
        calls = self._calls
        while calls and (len(calls) >= _REMEMBERED_CALLS or calls[0][0] < now - _RECENT_S):
            _, old_tokens, old_s = calls.popleft()
            self._tokens -= old_tokens
            self._run_s -= old_s
        calls.append((now, tokens, run_s))
        self._tokens += tokens
        self._run_s += run_s
        self._usual_s = None

    def seconds_for(self, tokens: float, *, running_s: float = 0.0) -> float:
        """How long all lanes together need for so many tokens; 0 while nothing is known.

        `running_s` is how long the calls under way have taken, summed: a lane that is stuck counts as slow.
        """
        if not self._calls:
            return 0.0
        return tokens * (self._run_s + running_s) / max(self._tokens, 1) / self._lanes

    def usual_seconds_for(self, tokens: float) -> float:
        """The same by the calls of the last seconds, without the slowest of each lane; 0 for too few of them.

        Time alone heals it: who was slow a while ago is not judged by it.
        """
        if len(self._calls) < _ENOUGH_CALLS or self._calls[-1][0] < self._clock() - _RECENT_S:
            return 0.0
        if self._usual_s is None:
            # A machine that stands still holds one call in each lane: these say nothing of the rest.
            slowest = nlargest(self._lanes, self._calls, key=_RUN_S)
            run_s = self._run_s - sum(map(_RUN_S, slowest))
            self._usual_s = run_s / max(self._tokens - sum(tokens for _, tokens, _ in slowest), 1)
        return tokens * self._usual_s / self._lanes


class Announced:
    """A death is announced: what is raised inside goes to `die`, and an Exception goes no further."""

    def __init__(self, die: Callable[[BaseException], None]) -> None:
        self._die = die

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if error is not None:
            self._die(error)
        return isinstance(error, Exception)


class Lanes(Generic[I, R]):
    """Threads that make calls. All methods belong to the loop on which `start` was called.

    Args:
        run: the blocking function; `count` threads may be in it at the same time.
        follow: called in a lane whose call went well: what it is to do next, or None. When all cores are busy
            the loop is late, and a lane that waited for it would be idle for that long.
        done: called on the loop with each call that was made.
        died: called on the loop with what ended a thread by accident.

    Attributes:
        under_way: the calls that were handed in and have not come back.
    """

    def __init__(
        self,
        run: Callable[[Sequence[I]], Sequence[R]],
        count: int,
        *,
        follow: Callable[[], Call[I, R] | None],
        done: Callable[[Call[I, R]], None],
        died: Callable[[BaseException], None],
    ) -> None:
        if count < 1:
            raise ValueError(f"lanes is {count}; at least one is needed")
        self.under_way: dict[Call[I, R], None] = {}
        self._run = run
        self._count = count
        self._follow = follow
        self._done = done
        self._died = died
        self._rate = DrainRate(count)
        self._inbox: SimpleQueue[Call[I, R] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._alive = 0
        self._broken = False
        self._ended = asyncio.Event()

    @property
    def free(self) -> int:
        """How many lanes have nothing to do; none once one has ended by accident."""
        return 0 if self._broken else self._count - len(self.under_way)

    def start(self) -> None:
        """Start the threads. When one cannot be started, those before it wait for `stop`."""
        loop = asyncio.get_running_loop()
        for number in range(self._count):
            # A daemon: a call that never comes back must not keep the process alive.
            thread = threading.Thread(target=self._serve, args=(loop,), name=f"{LANE}-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)
            self._alive += 1

    def hand_in(self, call: Call[I, R]) -> None:
        """A free lane makes this call."""
        self.under_way[call] = None
        self._inbox.put(call)

    def longest_run_s(self) -> float:
        """How long the call has been under way that was begun first; 0 when there is none."""
        now = time.monotonic()
        return now - min((call.started_s for call in self.under_way), default=now)

    def seconds_for(self, tokens: int) -> float:
        """How long the lanes will take for so many tokens, as fast as they have been lately."""
        now = time.monotonic()
        return self._rate.seconds_for(tokens, running_s=sum(now - call.started_s for call in self.under_way))

    def usual_seconds_for(self, tokens: float) -> float:
        """The same, whatever the calls under way take; 0 while too few have ended."""
        return self._rate.usual_seconds_for(tokens)

    def stop(self) -> None:
        """Each thread ends when it has nothing more to do. May be called again."""
        for _ in self._threads:
            self._inbox.put(None)
        if not self._alive:
            self._ended.set()

    async def ended(self) -> None:
        """Wait until `stop` has been called and every thread has ended."""
        await self._ended.wait()
        for thread in self._threads:
            thread.join()  # its last message has come: it is already on its way out

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            _step_back()
            while (call := self._inbox.get()) is not None:
                while call is not None:
                    call = self._make(loop, call)
        except BaseException as error:  # noqa: BLE001 - the death of a lane is announced
            _tell(loop, self._died, error)
        _tell(loop, self._lane_ended)

    def _make(self, loop: asyncio.AbstractEventLoop, call: Call[I, R]) -> Call[I, R] | None:
        """Make a call and hand it back, whatever becomes of this lane; gives the one that follows."""
        following = None
        call.make(self._run)
        try:
            if call.error is None:
                following = self._follow()
        except BaseException:
            self._broken = True  # before the message: nothing more is handed in
            raise
        finally:
            _tell(loop, self._back, call, following)
        return following

    def _back(self, call: Call[I, R], following: Call[I, R] | None) -> None:
        del self.under_way[call]
        if following is not None:
            self.under_way[following] = None
        self._rate.called(0 if call.error is not None else call.tokens, call.run_s)
        self._done(call)

    def _lane_ended(self) -> None:
        self._alive -= 1
        if not self._alive:
            self._ended.set()


def _step_back() -> None:
    """The calling thread lets its starter go first when both want a core. Where it may not, all the same."""
    if sys.platform == "linux":  # elsewhere niceness is of the whole process
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + STEP_BACK)


def _tell(loop: asyncio.AbstractEventLoop, step: Callable[..., None], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(step, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
