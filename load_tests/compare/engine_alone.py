"""What the engine does with the same texts when nothing stands before it: the bound on any server here.

The service's own engine, called from as many threads as there are cores. Knows nothing of HTTP or of servers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from load_tests.alone import LENGTH_ITEMS, Alone, batches

WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class Bound:
    """One round of the engine alone.

    Attributes:
        single_rate: texts a second, one by one, on all cores.
        length_rate: texts a second, in batches of 8 of like length, on all cores.
        lone_p50_ms: of one call with one text, nothing beside it.
    """

    single_rate: float
    length_rate: float
    lone_p50_ms: float


class EngineAlone:
    """The int8 file of a version and the tokens of the texts, ready to run. `close` it."""

    def __init__(self, version: Path, texts: Sequence[str], *, cores: int) -> None:
        self._engine = Alone(version, precision="int8", lanes=cores)
        encodings = self._engine.encode(texts)
        self._single, self._by_length = batches(encodings, 1), batches(encodings, LENGTH_ITEMS)
        for ready in (self._single, self._by_length):
            self._engine.run(ready, seconds=WARM_UP_S, callers=cores)

    def measure(self, seconds: float) -> Bound:
        """Each of the three ways for so long."""
        lone = self._engine.run(self._single, seconds=seconds, callers=1)
        single = self._engine.run(self._single, seconds=seconds, callers=self._engine.lanes)
        by_length = self._engine.run(self._by_length, seconds=seconds, callers=self._engine.lanes)
        return Bound(single.texts_per_s, by_length.texts_per_s, lone.p50_ms)

    def close(self) -> None:
        """Let the model go."""
        self._engine.close()
