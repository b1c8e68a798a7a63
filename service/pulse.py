"""Whether the engine still answers: counts the requests that it failed in a row, and asks it itself then.

What callers send proves nothing alone. Texts that the engine cannot take, sent by one of them, would take an
instance away from all; and once nothing is sent here any more, nothing would bring it back. Knows nothing of
engines.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from service.classifier import Result
from service.core import Prediction
from service.logs import log_event

SUSPECT_AFTER = 8
"""Requests that failed in a row before the engine is asked."""
ASK_AGAIN_S = 1.0

logger = logging.getLogger(__name__)


class Pulse:
    """Watches the results of requests.

    Args:
        ask: has the engine predict a text that it could predict at the start. Whether it did; None when that
            cannot be told, as when there is no room.

    Attributes:
        failing: whether the engine fails on that text, too, and has given no prediction since.
    """

    def __init__(self, ask: Callable[[], Awaitable[bool | None]]) -> None:
        self._ask = ask
        self._failed = 0
        self._asking: asyncio.Task[None] | None = None
        self.failing = False

    def heard(self, results: Sequence[Result]) -> None:
        """What the engine said of the texts of one request."""
        if any(isinstance(one, Prediction) for one in results):
            self._failed = 0
            self._say(failing=False)
        elif results:
            self._failed += 1
            if self._failed >= SUSPECT_AFTER and self._asking is None:
                self._asking = asyncio.get_running_loop().create_task(self._ask_until_it_answers())

    def stop(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()

    async def _ask_until_it_answers(self) -> None:
        try:
            while self._failed:
                answered = await self._ask()
                if answered:
                    self._failed = 0
                else:
                    self._say(failing=self.failing or answered is False)
                    await asyncio.sleep(ASK_AGAIN_S)
        finally:
            self._asking = None
        self._say(failing=False)

    def _say(self, *, failing: bool) -> None:
        if failing is self.failing:
            return
        self.failing = failing
        if failing:
            log_event(logger, logging.ERROR, "the engine fails", requests=self._failed)
        else:
            log_event(logger, logging.WARNING, "the engine answers again")
