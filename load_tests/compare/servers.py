"""Starts a server with all its processes, waits until it answers, holds it still, counts its CPU, ends it.

Knows nothing of what is served or measured. Linux only.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

START_S = 180.0  # the first import of torch from a cold disk takes long
STOP_S = 3.0
TRY_S = 30.0
LOG_LINES = 30
SETTLE_S = 30.0
LOOK_S = 0.3
RESTING_SHARE = 0.2  # of a core: some poll when they have nothing to do


class ServerError(Exception):
    """A server ended, was not ready in time, or answered what it should not; holds the end of its log."""


class Server:
    """One server; in the `with` its processes run, after it none does.

    Args:
        environment: all of it, nothing is inherited.
        url: where texts are posted.
        log: file for all that it prints.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], url: str, cwd: Path, log: Path
    ) -> None:
        self.url = url
        self._command = list(command)
        self._environment = dict(environment)
        self._cwd = cwd
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            # A session of its own: Ctrl-C reaches us alone, and we end the server.
            self._process = subprocess.Popen(
                self._command,
                cwd=self._cwd,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def wait_ready(self, body: object) -> None:
        """Post the body until it is answered with 200. Raises ServerError."""
        give_up_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):  # refused, or a status that is an error
                self.ask(body)
                return
            if self._process is None or self._process.poll() is not None:
                raise ServerError(f"it has ended.\n{self.last_lines()}")
            if time.monotonic() > give_up_s:
                raise ServerError(f"it is not ready after {START_S:.0f} s.\n{self.last_lines()}")
            time.sleep(0.2)

    def ask(self, body: object) -> Any:
        """The answer to one body, read as JSON. Raises OSError: no answer, or none with status 200."""
        request = urllib.request.Request(
            self.url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=TRY_S) as response:
            if response.status != 200:
                raise urllib.error.URLError(f"status {response.status}")
            return json.load(response)

    def last_lines(self) -> str:
        """The end of its log."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LOG_LINES:])

    def settle(self) -> None:
        """Wait until it rests: work for clients that have gone would be paid for by the next measurement."""
        give_up_s = time.monotonic() + SETTLE_S
        used_s = self.cpu_s()
        while time.monotonic() < give_up_s:
            time.sleep(LOOK_S)
            before_s, used_s = used_s, self.cpu_s()
            if used_s - before_s < RESTING_SHARE * LOOK_S:
                return

    def hold(self) -> None:
        """Stop its clock: no process of it runs until `go_on`, so that it takes nothing from another."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        self._signal(signal.SIGCONT)

    def cpu_s(self) -> float:
        """CPU seconds that its living processes have used."""
        spent_s = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                spent_s += times.user + times.system
        return spent_s

    def rss_mb(self) -> float:
        """Resident memory of its processes in MB (10^6 bytes); pages that they share count for each."""
        total = 0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total / 1e6

    def end(self) -> None:
        """End every process of it: asked first, killed after `STOP_S`. Safe to call twice."""
        if self._process is None:
            return
        tree = self._tree()
        try:
            self.go_on()
            self._signal(signal.SIGTERM)
            psutil.wait_procs(tree, timeout=STOP_S)
        finally:
            self._signal(signal.SIGKILL)
            for process in tree:  # one that left the session
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait()
            psutil.wait_procs(tree, timeout=STOP_S)

    def _tree(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _signal(self, number: signal.Signals) -> None:
        """To all of its session; a session that is gone needs none."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
