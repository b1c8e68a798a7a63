"""Remembers the predictions of texts, and lets a text that is being run be waited for, not run again.

A text is known by its hash alone. Knows nothing of tokens, queues or engines: the caller brings the way to
run the texts that nobody knows. All of it belongs to one event loop.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import add
from typing import NamedTuple, TypeAlias

from service.core import Prediction, Timings
from service.errors import DeadlineExceeded, ServiceError, TextTooLong
from service.metrics import Metrics

TextOutcome: TypeAlias = Prediction | ServiceError
Run: TypeAlias = Callable[[Sequence[str]], Awaitable[tuple[list[TextOutcome], Timings]]]
"""Runs texts: their outcomes in order, and the time it took. What it raises refuses the whole request."""

_KEY_BYTES = 16


class _Flight(NamedTuple):
    """A text that a request, its leader, is running.

    Attributes:
        chars: of all texts that the leader runs at this time.
        landed: the outcome of the text; None when the leader gave up before there was one.
    """

    chars: int
    landed: asyncio.Future[TextOutcome | None]


@dataclass(slots=True)
class _Asked:
    """The texts of a request, by their keys.

    Attributes:
        missing: what has no outcome yet.
        found: the outcomes of the others.
        alone: the keys that another request failed to predict: they are run whoever else runs them.
    """

    missing: dict[bytes, str]
    found: dict[bytes, TextOutcome] = field(default_factory=dict)
    alone: set[bytes] = field(default_factory=set)

    def find(self, key: bytes, outcome: TextOutcome) -> None:
        """The text of this key has its outcome."""
        del self.missing[key]
        self.found[key] = outcome


class Cache:
    """The predictions of the texts that were asked for last.

    Only predictions are kept, never errors. A request that asks for a text in flight waits for it; with what
    it waits for, it is bound by nothing but its own deadline:

    - A leader that gives up (its deadline, its client, a full queue) fails nobody by that: of those who wait,
      one is the new leader. He begins at the end of the queue, with the time that he has left.
    - An error of the text is the leader's own: each of the others then runs the text itself, waiting for no
      further leader.
    - A leader with more to run than the request would run itself is not waited for: one text does not wait
      for a list. Nor can two requests wait for each other, since each runs its own texts first.

    Args:
        items: how many predictions are kept, at least 1; the one goes first that was asked for longest ago.
        model: what names the model and whatever else decides its answers.
        secret: 64 bytes at most; who does not know it cannot look for two texts with the same hash.
        max_followers: how many texts may wait for those of others. Beyond it a text is run as if nobody else
            ran it, so that the queue refuses what is too much.
    """

    def __init__(
        self, items: int, metrics: Metrics, *, model: str, secret: bytes, max_followers: int = 1024
    ) -> None:
        if items < 1:
            raise ValueError(f"{items} items are no cache")
        self._items = items
        self._max_followers = max_followers
        self._followers = 0
        self._metrics = metrics
        self._hash = blake2b(model.encode() + b"\0", digest_size=_KEY_BYTES, key=secret)
        # Plain tuples, of which the garbage collector loses sight: a full collection with 100,000 items takes
        # half as long as with the named ones.
        self._known: OrderedDict[bytes, tuple[tuple[float, ...], tuple[float, ...], int, bool]] = (
            OrderedDict()
        )
        self._flights: dict[bytes, _Flight] = {}

    def __len__(self) -> int:
        """How many predictions are kept now."""
        return len(self._known)

    def key(self, text: str) -> bytes:
        """The hash (BLAKE2b, RFC 7693) of the model and the text, 16 bytes. Any str has one of its own."""
        mine = self._hash.copy()
        mine.update(text.encode(errors="surrogatepass"))  # lone ones, too: they are refused where others are
        return mine.digest()

    async def answer(
        self, texts: Sequence[str], run: Run, *, truncate: bool, deadline: float
    ) -> tuple[list[TextOutcome], Timings]:
        """The outcome of each text, in order; `run` is called with those only that must be run.

        Args:
            truncate: what `run` does with a long text; when it is false, a prediction of one that was cut is
                answered with TextTooLong.
            deadline: when the answer is no longer wanted, on the clock of the loop; `run` keeps it by itself.

        Returns:
            The outcomes, and the timings of `run`; a wait for others counts as time in the queue.

        Raises:
            DeadlineExceeded: it passed while a text of another request was waited for.
            ServiceError: what `run` raises.
        """
        keys = [self.key(text) for text in texts]
        asked = _Asked(dict(zip(keys, texts, strict=True)))
        if len(asked.missing) < len(keys):
            self._metrics.cache_used(shared=len(keys) - len(asked.missing))
        timings = Timings()
        while True:
            self._recall(asked)
            if not asked.missing:
                break
            timings = _sum(timings, await self._fetch(asked, run, deadline))
        outcomes = [asked.found[key] for key in keys]
        if not truncate:
            outcomes = [TextTooLong() if _is_cut(outcome) else outcome for outcome in outcomes]
        return outcomes, timings

    def _recall(self, asked: _Asked) -> None:
        """Find what is known."""
        known = [key for key in asked.missing if key in self._known]
        for key in known:
            self._known.move_to_end(key)
            asked.find(key, Prediction(*self._known[key]))
        if known:
            self._metrics.cache_used(hits=len(known))

    async def _fetch(self, asked: _Asked, run: Run, deadline: float) -> Timings:
        """Run what is missing or wait for it, once. What others gave up is missing still."""
        chars = sum(map(len, asked.missing.values()))
        joined = {
            key: flight.landed
            for key in asked.missing
            if key not in asked.alone
            and (flight := self._flights.get(key)) is not None
            and flight.chars <= chars
        }
        if self._followers + len(joined) > self._max_followers:
            joined = {}
        led = {key: text for key, text in asked.missing.items() if key not in joined}
        timings = Timings()
        self._followers += len(joined)
        try:
            if led:
                self._metrics.cache_used(misses=len(led))
                outcomes, timings = await self._lead(led, run)
                for key, outcome in outcomes.items():
                    asked.find(key, outcome)
            if joined:
                timings = _sum(timings, Timings(queue_s=await _wait(joined.values(), deadline)))
        finally:
            self._followers -= len(joined)
        if joined:
            for key, landed in joined.items():
                shared = landed.result()
                if isinstance(shared, Prediction):
                    self._metrics.cache_used(shared=1)
                    asked.find(key, shared)
                elif shared is not None:
                    asked.alone.add(key)
        return timings

    async def _lead(self, led: Mapping[bytes, str], run: Run) -> tuple[dict[bytes, TextOutcome], Timings]:
        """Run texts for oneself and for all who come to wait for them."""
        loop = asyncio.get_running_loop()
        chars = sum(map(len, led.values()))
        flights = {
            key: _Flight(chars, loop.create_future())
            for key in led
            if (other := self._flights.get(key)) is None or other.chars > chars
        }
        self._flights |= flights
        outcomes: dict[bytes, TextOutcome] = {}
        try:
            results, timings = await run(list(led.values()))
            outcomes = dict(zip(led, results, strict=True))
        finally:
            # All in one step of the loop, `_keep` too: nobody finds a flight that has landed, or misses a
            # prediction in between.
            for key, flight in flights.items():
                if self._flights.get(key) is flight:
                    del self._flights[key]
                flight.landed.set_result(outcomes.get(key))
        for key, outcome in outcomes.items():
            self._keep(key, outcome)
        return outcomes, timings

    def _keep(self, key: bytes, outcome: TextOutcome) -> None:
        if isinstance(outcome, Prediction):
            self._known[key] = (*outcome,)
            self._known.move_to_end(key)
            if len(self._known) > self._items:
                self._known.popitem(last=False)


async def _wait(landings: Iterable[asyncio.Future[TextOutcome | None]], deadline: float) -> float:
    """Wait until all have landed; the seconds it took. Who waits and is cancelled cancels no landing."""
    started_s = time.perf_counter()
    pending = [landed for landed in landings if not landed.done()]
    if pending:
        _, late = await asyncio.wait(pending, timeout=deadline - asyncio.get_running_loop().time())
        if late:
            raise DeadlineExceeded
    return time.perf_counter() - started_s


def _sum(first: Timings, then: Timings) -> Timings:
    return Timings(*map(add, first, then))


def _is_cut(outcome: TextOutcome) -> bool:
    return isinstance(outcome, Prediction) and outcome.truncated
