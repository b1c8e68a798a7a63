"""CPU that a process has used: its main thread, which runs the event loop, apart from its other threads.

Counted in nanoseconds by the scheduler; the clock that `ps` reads ticks a hundred times a second, too seldom
for a window of a second. Linux only. Knows nothing of servers.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds of the main thread and of all others that live."""

    main_s: float
    others_s: float

    @classmethod
    def of(cls, pid: int) -> Self:
        """What a process has used until now."""
        main_s, others_s = 0.0, 0.0
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                seconds = int((thread / "schedstat").read_text().split()[0]) / 1e9
                if thread.name == str(pid):
                    main_s = seconds
                else:
                    others_s += seconds
        return cls(main_s, others_s)

    def __sub__(self, other: "CpuTime") -> "CpuTime":
        return CpuTime(self.main_s - other.main_s, self.others_s - other.others_s)

    @property
    def all_s(self) -> float:
        """Both together."""
        return self.main_s + self.others_s
