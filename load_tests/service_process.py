"""Starts `python -m service serve`, or what stands in for it, in a process of its own and looks at it.

Knows nothing of load. Linux only.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parent.parent
SERVE = ("-m", "service", "serve")
START_S = 120.0  # a busy machine loads slowly; a start that takes longer has failed


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds: resident bytes, open files, threads, and the CPU seconds it has used.

    `loop_cpu_s` is the share of its main thread, which runs the event loop.
    """

    rss_bytes: int
    files: int
    threads: int
    cpu_s: float
    loop_cpu_s: float

    @property
    def rss_mb(self) -> float:
        """Resident memory in MB (10^6 bytes)."""
        return self.rss_bytes / 1e6


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServiceProcess:
    """One server process; killed at the end of the `with` if it still runs.

    Args:
        port: to listen on; a free one when None.
        command: for Python; something else to serve, which reads the same settings.
        settings: further settings, `max_queue_items=64` for `VALENCE_MAX_QUEUE_ITEMS`. Those of the caller's
            environment are not passed on.
    """

    def __init__(self, *, port: int | None = None, command: Sequence[str] = SERVE, **settings: Any) -> None:
        self._command = command
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self._settings = {"log_format": "json", "host": "127.0.0.1", "port": self.port} | settings
        self._folder = tempfile.TemporaryDirectory(prefix="valence-load-")
        self.temporary = Path(self._folder.name) / "tmp"
        self._log = Path(self._folder.name) / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._folder.cleanup()

    def start(self) -> None:
        """Start it (again). Returns at once; `wait_ready` waits. RuntimeError: it runs already."""
        if self.runs():
            raise RuntimeError("it runs already")
        self.temporary.mkdir(exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("VALENCE_")}
        own = {f"VALENCE_{name.upper()}": str(value) for name, value in self._settings.items()}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._command],
                cwd=ROOT,
                env=kept | own | {"TMPDIR": str(self.temporary)},
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        return self._started().pid

    def log(self) -> list[dict[str, Any]]:
        """The whole lines of its log since the last start; one that is no JSON is an event itself."""
        lines = self._log.read_bytes().decode().split("\n")[:-1]
        return [json.loads(line) if line.startswith("{") else {"event": line} for line in lines]

    def status(self, path: str) -> int:
        """Of a GET; 0 when nobody answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        except OSError:
            return 0

    def wait_ready(self) -> None:
        """RuntimeError: it has ended, or is not ready within `START_S`."""
        give_up_s = time.monotonic() + START_S
        while self.status("/health/ready") != 200:
            if not self.runs():
                raise RuntimeError(f"the service ended with code {self.exit_code()}: {self.log()[-1:]}")
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"the service is not ready after {START_S:.0f} s")
            time.sleep(0.02)

    def runs(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def exit_code(self, timeout_s: float = 60.0) -> int:
        """Wait for its end."""
        return self._started().wait(timeout_s)

    def ask_to_stop(self) -> None:
        """SIGTERM."""
        self._started().send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            raise RuntimeError("it was never started")
        return self._process

    def footprint(self) -> Footprint:
        """What it holds now. Needs the extra dev."""
        import psutil  # noqa: PLC0415 - scripts/gpu_check starts services without it

        process = psutil.Process(self.pid)
        with process.oneshot():
            times = process.cpu_times()
            main = next(thread for thread in process.threads() if thread.id == self.pid)
            return Footprint(
                process.memory_info().rss,
                process.num_fds(),
                process.num_threads(),
                times.user + times.system,
                main.user_time + main.system_time,
            )
