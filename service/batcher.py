"""Groups concurrent submissions for a blocking function.

The function runs in lanes (threads); who waits for an answer is the loop's alone. Knows no text or HTTP.

    submit ──> WaitingRoom ──_next, when a lane is free──> Lanes: run(items) ──> _finish ──> Answer
     loop                       loop, or that lane            a thread            loop       loop
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from service.alarm import Alarm
from service.answers import Answer, Outcome, chained
from service.errors import DeadlineExceeded, EngineDead, EngineFailed, QueueFull, ServiceError, Stopping
from service.lanes import Announced, Call, Lanes
from service.load import Load
from service.waiting import Limits, WaitingRoom

__all__ = ["Batcher", "Limits", "Outcome"]

T = TypeVar("T")
R = TypeVar("R")

log = logging.getLogger(__name__)

_LONGEST_RETRY_S = 60
_PATIENCE = 0.5  # share of its time that a submission may be expected to wait: the lanes may get slower
_TIMER_GRAIN_S = 0.001  # uvloop counts in whole milliseconds and may call that much early


@dataclass(eq=False, slots=True)
class _Item(Generic[T, R]):
    value: T
    length: int
    place: int
    answer: Answer[R]


class Batcher(Generic[T, R]):
    """Runs a blocking function over the items of concurrent submissions, in batches of similar length.

    Args:
        run: called in a lane with the values of a batch; gives as many results, in their order.
        lanes: how many threads, and so how many calls at the same time.
        limits: bounds of the queue and of a batch.

    All methods belong to the loop on which `start` was called.
    """

    def __init__(self, run: Callable[[Sequence[T]], Sequence[R]], *, lanes: int, limits: Limits) -> None:
        self._run = run
        self._limits = limits
        self._lanes: Lanes[_Item[T, R], R] = Lanes(
            self._call, lanes, follow=self._follow, done=self._finish, died=self._die
        )
        self._room: WaitingRoom[Answer[R], _Item[T, R]] = WaitingRoom(limits)
        self._open: set[Answer[R]] = set()
        self._cut_is_due = False
        self._linger: asyncio.TimerHandle | None = None
        self._alarm = Alarm(self._expire)  # nobody waits with an earlier deadline
        self._started = False
        self._stopping = False
        self._dead: BaseException | None = None
        self._all_answered = asyncio.Event()
        self._announced = Announced(self._die)

    async def start(self) -> None:
        """Start the lanes, on the running loop. RuntimeError: started before, closed, or no threads."""
        if self._started or self._stopping:
            raise RuntimeError("a batcher is started once, and not after close()")
        self._started = True
        try:
            self._lanes.start()
        except BaseException as error:
            self._die(error)
            raise

    async def submit(
        self, items: Sequence[T], lengths: Sequence[int], *, deadline: float | None = None
    ) -> list[Outcome[R]]:
        """Run all items, and give their outcomes in order. Cancelled, it abandons what is not under way.

        Args:
            items: what the function is called with, in batches with others.
            lengths: tokens of each item, at least 1.
            deadline: when the answer is no longer wanted, on the clock of the loop.

        Raises:
            QueueFull: at once, with the seconds after which the queue should have drained; also when so much
                waits already that the deadline would most likely pass first.
            DeadlineExceeded: at the deadline, whatever the lanes do; at once when it has passed already.
            Stopping: after close(). EngineDead: the batcher has died, chained to what killed it.
            ValueError: lengths do not fit the items, or more items than `max_queue_items`: they never fit.
        """
        if not items:
            return []
        self._check(items, lengths, deadline)
        return await self._admit(items, lengths, deadline)

    def refuse_when_full(self, items: int, tokens: int, deadline: float | None = None) -> None:
        """Raises QueueFull when so much may not be added now, or is unlikely to be answered by the deadline.

        For who wants to know before work is done.
        """
        if not self._admits(items, tokens, deadline):
            self._expire()
            if not self._admits(items, tokens, deadline):
                drained_s = min(self._lanes.seconds_for(self._room.tokens), _LONGEST_RETRY_S)
                raise QueueFull(retry_after_s=max(1, math.ceil(drained_s)))

    def load(self) -> Load:
        """What waits and runs now."""
        now = time.monotonic()
        return Load(
            queued_items=self._room.items,
            queued_tokens=self._room.tokens,
            oldest_age_s=now - min((answer.arrived_s for answer in self._room.groups()), default=now),
            busy_lanes=len(self._lanes.under_way),
            longest_run_s=self._lanes.longest_run_s(),
            dead=self._dead is not None,
            running_items=sum(len(call.items) for call in self._lanes.under_way),
        )

    async def close(self, timeout_s: float) -> None:
        """Refuse new work, finish what is queued, end the threads. May be called again.

        After `timeout_s` seconds those that still wait fail with Stopping, and a lane whose call does not
        come back is left behind: it ends with that call or with the process, whichever is first.
        """
        self._stopping = True
        if not self._started:
            return
        give_up = asyncio.get_running_loop().time() + timeout_s
        self._cut()  # what lingers need not wait for company any more
        if not self._open:
            self._all_answered.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(give_up):
                await self._all_answered.wait()
        for answer in list(self._open):
            self._fail(answer, Stopping())
        self._lanes.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(give_up):
                await self._lanes.ended()

    def _check(self, items: Sequence[T], lengths: Sequence[int], deadline: float | None) -> None:
        """Refuse what cannot be admitted; see `submit` for the errors."""
        if self._dead is not None:
            raise EngineDead from self._dead
        if self._stopping:
            raise Stopping
        if not self._started:
            raise RuntimeError("submit() before start()")
        if len(items) != len(lengths) or min(lengths) < 1:
            raise ValueError(f"{len(items)} items want as many lengths of at least 1, not {len(lengths)}")
        if len(items) > self._limits.max_queue_items:
            raise ValueError(f"{len(items)} items never fit into a queue of {self._limits.max_queue_items}")
        if deadline is not None and deadline <= asyncio.get_running_loop().time():
            raise DeadlineExceeded
        self.refuse_when_full(len(items), sum(lengths), deadline)
        if self._dead is not None:  # of making room
            raise EngineDead from self._dead

    def _admits(self, items: int, tokens: int, deadline: float | None) -> bool:
        if not self._room.admits(items, tokens):
            return False
        if deadline is None or not self._room.items:  # what an empty queue refused would be refused for ever
            return True
        left_s = deadline - asyncio.get_running_loop().time()
        return self._lanes.usual_seconds_for(self._room.tokens_before(items)) <= _PATIENCE * left_s

    def _admit(self, items: Sequence[T], lengths: Sequence[int], deadline: float | None) -> Answer[R]:
        loop = asyncio.get_running_loop()
        answer: Answer[R] = Answer(loop, items=len(items), leave=self._settle)
        places = range(len(items))
        entries = [_Item(items[place], lengths[place], place, answer) for place in places]
        if deadline is not None:
            answer.deadline = deadline
            if deadline < self._alarm.when:
                self._alarm.set(deadline)
        self._open.add(answer)
        with self._announced:
            self._room.add(answer, entries, lengths)
        if self._lanes.free and not self._cut_is_due:
            # Not at once: others that arrive in this turn of the loop share the batch.
            self._cut_is_due = True
            loop.call_soon(self._cut)
        return answer

    def _cut(self) -> None:
        """Give each free lane a batch."""
        self._cut_is_due = False
        with self._announced:
            self._expire()
            while (free := self._lanes.free) and not self._lingers() and (call := self._next(free)):
                self._lanes.hand_in(call)

    def _follow(self) -> Call[_Item[T, R], R] | None:
        """What a lane that has made its call is to do next. Called by that lane."""
        if self._limits.linger_s and not self._room.fills_a_batch():
            return None  # the loop knows how long to wait for company
        return self._next(self._lanes.free + 1)

    def _next(self, free: int) -> Call[_Item[T, R], R] | None:
        """A batch for one of so many free lanes: work that would leave one free is shared out evenly.

        What is past its deadline is left out. It is failed on the loop, by its alarm.
        """
        while waiting := self._room.items:
            now = time.monotonic()
            taken = self._room.take(share=math.ceil(waiting / free))
            items = [item for item in taken if item.answer.deadline > now]
            if items:
                return Call(items, tokens=sum(item.length for item in items))
        return None

    def _lingers(self) -> bool:
        """Whether a free lane is to wait for company; a timer then cuts later."""
        if not self._limits.linger_s or not self._room.items or self._stopping or self._room.fills_a_batch():
            return False
        left_s = min(map(self._lingers_until, self._room.groups()), default=0.0) - time.monotonic()
        if left_s < _TIMER_GRAIN_S:
            return False
        if self._linger is not None:
            self._linger.cancel()
        self._linger = asyncio.get_running_loop().call_later(left_s, self._cut)
        return True

    def _lingers_until(self, answer: Answer[R]) -> float:
        """When it has had enough of waiting: who is short of time has less of it to give."""
        patience_s = _PATIENCE * (answer.deadline - answer.arrived_s)
        return answer.arrived_s + min(self._limits.linger_s, patience_s)

    def _expire(self) -> None:
        """Fail those who are past their deadline. The alarm alone would be late when the loop lags."""
        now = asyncio.get_running_loop().time()
        if now >= self._alarm.when:
            for answer in [answer for answer in self._open if answer.deadline <= now]:
                self._fail(answer, DeadlineExceeded())
            self._alarm.set(min((answer.deadline for answer in self._open), default=math.inf))

    def _call(self, items: Sequence[_Item[T, R]]) -> Sequence[R]:
        """What a lane calls."""
        return self._run([item.value for item in items])

    def _finish(self, call: Call[_Item[T, R], R]) -> None:
        """A lane has made a call. What failed together is tried again item by item, before all else."""
        with self._announced:
            for number, item in enumerate(call.items):
                if item.answer.done():
                    continue  # abandoned, or late, or the batcher has died
                if call.error is not None and len(call.items) > 1:
                    self._room.add_alone(item.answer, item, item.length)
                elif item.answer.add(item.place, _outcome(call, number)):
                    self._settle(item.answer)
                    item.answer.give()
        call.items, call.error = (), None  # which an error names by its frames: a ring else
        self._cut()

    def _fail(self, answer: Answer[R], error: ServiceError) -> None:
        if not answer.done():
            self._settle(answer)
            answer.set_exception(error)

    def _settle(self, answer: Answer[R]) -> None:
        """The answer is about to be given, or nobody waits for it any more: its items leave the queue."""
        self._open.discard(answer)
        if not self._open:
            self._alarm.set(math.inf)
        with self._announced:
            self._room.remove(answer)
        if self._stopping and not self._open:
            self._all_answered.set()

    def _die(self, cause: BaseException) -> None:
        """A defect: the queue can no longer be trusted. Everybody is told, now and at each `submit`."""
        if self._dead is None:
            self._dead = cause
            log.critical("the batcher is dead", exc_info=cause)
        self._room = WaitingRoom(self._limits)
        for answer in list(self._open):
            self._fail(answer, chained(EngineDead(), cause))
        self._lanes.stop()


def _outcome(call: Call[_Item[T, R], R], number: int) -> Outcome[R]:
    queue_s = call.started_s - call.items[number].answer.arrived_s
    if call.error is None:
        return Outcome(call.results[number], None, queue_s, call.run_s)
    return Outcome(None, chained(EngineFailed(), call.error), queue_s, call.run_s)
