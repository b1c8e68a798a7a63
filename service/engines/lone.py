"""Which of two ways to run a batch: on one thread beside other lanes, or on all cores when there are none.

Knows nothing of onnxruntime, lanes or settings.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from service.core import FloatArray
from service.engines import IntegerArray

LONG_TOKENS = 256
"""From here on a second thread pays: with MiniLM-L6, int8, ×1.33 at 256 tokens, 1.47 at 512."""

Run = Callable[[Any, Mapping[str, IntegerArray]], list[FloatArray]]


class LoneLong:
    """Runs one long text that is alone in the engine by `wide`, and all else by `narrow`.

    Two ways of one model: they give the same answers. Called from several threads at once.

    Args:
        narrow: what a lane runs beside others.
        wide: the same with more threads.
    """

    def __init__(self, narrow: Run, wide: Run) -> None:
        self._narrow = narrow
        self._wide = wide
        self._lock = threading.Lock()
        self._running = 0

    def __call__(self, outputs: Any, feed: Mapping[str, IntegerArray]) -> list[FloatArray]:
        """Run a batch; raises what the way raises."""
        texts, tokens = feed["input_ids"].shape
        with self._lock:
            run = self._wide if texts == 1 and tokens >= LONG_TOKENS and not self._running else self._narrow
            self._running += 1
        try:
            return run(outputs, feed)
        finally:
            with self._lock:
                self._running -= 1
