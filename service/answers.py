"""The answer to one submission, gathered item by item, and what is known of it until it is given.

Knows nothing of queues, threads or what a result is.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from service.errors import EngineFailed, ServiceError

R = TypeVar("R")
E = TypeVar("E", bound=ServiceError)


class Outcome(NamedTuple, Generic[R]):
    """The result of one item: `value`, or the `error` that only this item met.

    `queue_s` is the wait from arrival to the start of its (last) run, `run_s` the time of that run.
    """

    value: R | None
    error: EngineFailed | None
    queue_s: float
    run_s: float


class Answer(asyncio.Future[list[Outcome[R]]], Generic[R]):
    """What one caller of `submit` waits for.

    Args:
        loop: where it is awaited.
        items: how many outcomes make it complete.
        leave: called, once at most, when the caller gives up before the answer is given.

    Attributes:
        arrived_s: when it was made, on the monotonic clock.
        deadline: when it is no longer wanted, on the clock of the loop; infinity if never.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, items: int, leave: "Callable[[Answer[R]], None]"
    ) -> None:
        super().__init__(loop=loop)
        self.arrived_s = time.monotonic()
        self.deadline = math.inf
        self._outcomes: list[Outcome[R] | None] = [None] * items
        self._missing = items
        self._leave = leave

    def add(self, place: int, outcome: Outcome[R]) -> bool:
        """Keep the outcome of the item at this place; True when it was the last one to come."""
        self._outcomes[place] = outcome
        self._missing -= 1
        return not self._missing

    def give(self) -> None:
        """Wake the caller with the outcomes, in the order of his items."""
        self.set_result([outcome for outcome in self._outcomes if outcome is not None])

    def cancel(self, msg: Any | None = None) -> bool:
        """Called by `cancel` of the waiting task: the items leave now, not a turn of the loop later."""
        if not self.done():
            self._leave(self)
        return super().cancel(msg)


def chained(error: E, cause: BaseException) -> E:
    """The error, with what caused it."""
    error.__cause__ = cause
    return error
