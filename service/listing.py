"""Reads the list of the store's versions off the loop: once for all who ask meanwhile, and for so long.

A store on a network may never answer. Who asks is told in time, no second thread is lost to it, and no end
of the process waits for it. Knows nothing of HTTP.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from service.errors import DeadlineExceeded
from service.store import Listing, list_models

LISTING = "listing"
"""Name of the thread; it is still there at the end only when the store did not answer."""


class StoreList:
    """The versions in a store, as they are when somebody asks."""

    def __init__(self, store: Path, *, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=LISTING)
        self._reading: asyncio.Future[list[Listing]] | None = None

    async def start(self) -> None:
        """Have the thread: later there may be no room for another."""
        await asyncio.get_running_loop().run_in_executor(self._thread, int)

    async def read(self) -> list[Listing]:
        """Every version. Raises DeadlineExceeded: the store has not answered in time."""
        if self._reading is None or self._reading.done():
            loop = asyncio.get_running_loop()
            self._reading = loop.run_in_executor(self._thread, list_models, self._store)
        reading = self._reading
        done, _ = await asyncio.wait([reading], timeout=self._timeout_s)
        if not done:
            raise DeadlineExceeded("The model store did not answer in time.")
        return reading.result()

    def close(self) -> None:
        """Read no more. Does not wait."""
        self._thread.shutdown(wait=False, cancel_futures=True)
