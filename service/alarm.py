"""One timer for many deadlines: it fires at the earliest of them.

A timer of its own for each request would cost more than keeping the deadline. Knows nothing of what is due.
"""

import asyncio
import math
from collections.abc import Callable

_GRAIN_S = 0.001  # uvloop counts in whole milliseconds and may call that much early


class Alarm:
    """Calls `ring` on the loop when the time has come, and again until it is set to a later one.

    Attributes:
        when: on the clock of the loop; infinity when nothing is due.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self.when = math.inf
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, when: float) -> None:
        """Fire at this time, and at no other; never, if it is infinity."""
        if self._timer is not None:
            self._timer.cancel()
        self.when, self._timer = when, None
        if when < math.inf:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(when, loop.time() + _GRAIN_S), self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._ring()
        if self._timer is None:  # nothing is due any more, or it was called a little early
            self.set(self.when)
