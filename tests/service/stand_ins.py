"""An engine for tests: a real one behind a gate that the test opens, with faults that the test puts in."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

from service.core import FloatArray, TokenBatch
from service.engines import Engine, EngineOptions, open_engine
from service.store import Version

SAFETY_S = 60  # a test that hangs fails; nothing waits for this


class GatedEngine:
    """A real engine; every call waits for the gate, which is open at first.

    Attributes:
        calls: the lengths and ids of each call, in the order in which the calls began.
        fault: called with each batch before it is run; may raise.
        change: what is made of the logits of a batch.
        closed: set by `close`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name, self.precision, self.device = engine.name, engine.precision, engine.device
        self.labels, self.max_tokens = engine.labels, engine.max_tokens
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[tuple[list[int], list[int]]] = []
        self.fault: Callable[[TokenBatch], object] = lambda _: None
        self.change: Callable[[FloatArray], FloatArray] = lambda logits: logits
        self.closed = threading.Event()
        self._entered = threading.Condition()

    def run(self, batch: TokenBatch) -> FloatArray:
        with self._entered:
            self.calls.append((batch.lengths.tolist(), batch.ids.tolist()))
            self._entered.notify_all()
        assert self.gate.wait(SAFETY_S)
        self.fault(batch)
        return self.change(self._engine.run(batch))

    def close(self) -> None:
        self._engine.close()
        self.closed.set()

    async def entered(self, calls: int) -> None:
        """Wait until so many calls have begun."""

        def wait() -> bool:
            with self._entered:
                return self._entered.wait_for(lambda: len(self.calls) >= calls, SAFETY_S)

        assert await asyncio.to_thread(wait)

    def has_seen(self, ids: Sequence[int]) -> bool:
        """Whether a text with these tokens was ever run alone or with others."""
        wanted = list(ids)
        return any(
            seen[i : i + len(wanted)] == wanted
            for _, seen in self.calls
            for i in range(len(seen) - len(wanted) + 1)
        )


class Opener:
    """Stands in for `open_engine`: opens the real engine behind a gate.

    Attributes:
        engine: what was opened.
        may_open: the opening waits for it; set at first.
        opening, opened: set when the opening begins and ends.
        prepare: called with the new engine before anyone uses it.
    """

    def __init__(self, prepare: Callable[[GatedEngine], Any] = lambda _: None) -> None:
        self.engine: GatedEngine
        self.may_open = threading.Event()
        self.may_open.set()
        self.opening = threading.Event()
        self.opened = threading.Event()
        self.prepare = prepare

    def __call__(self, version: Version, options: EngineOptions) -> GatedEngine:
        self.opening.set()
        assert self.may_open.wait(SAFETY_S)
        self.engine = GatedEngine(open_engine(version, options))
        self.prepare(self.engine)
        self.opened.set()
        return self.engine
