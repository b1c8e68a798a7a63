"""Real servers for tests: the command in a process of its own, or the same server in a thread of the test.

Each listens on a free port. The one in a thread takes an engine that the test brings.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvloop

from service import engines
from service.app import create_app, life_of
from service.life import Life
from service.loading import OpenEngine
from service.server import Server as UvicornServer
from service.server import listen, make_config, url_of
from service.settings import Settings

ROOT = Path(__file__).parent.parent
SAFETY_S = 60  # a test that hangs fails; nothing waits for this
JSON = {"content-type": "application/json"}


def environment(**settings: Any) -> dict[str, str]:
    """The environment of this process with these settings and no others."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VALENCE_")}
    return kept | {f"VALENCE_{name.upper()}": str(value) for name, value in settings.items()}


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition of the server holds."""
    give_up_s = time.monotonic() + SAFETY_S
    while not condition():
        assert time.monotonic() < give_up_s, f"never: {what}"
        time.sleep(0.01)


@dataclass
class Server:
    """A server process.

    Attributes:
        precision: the one asked for.
        lines: what it has logged so far.
    """

    process: "subprocess.Popen[bytes]"
    precision: str
    url: str = ""
    lines: list[dict[str, Any]] = field(default_factory=list)
    _told: threading.Condition = field(default_factory=threading.Condition)
    _reader: threading.Thread | None = None

    def read_log(self) -> None:
        """Collect the log in the background."""

        def read() -> None:
            assert self.process.stderr is not None
            for raw in self.process.stderr:
                with self._told:
                    self.lines.append(json.loads(raw))
                    self._told.notify_all()
            with self._told:
                self.lines.append({"event": "end of log"})
                self._told.notify_all()

        self._reader = threading.Thread(target=read)
        self._reader.start()

    def event(self, start: str) -> dict[str, Any]:
        """Wait for the first event that starts so."""

        def find() -> dict[str, Any] | None:
            return next((line for line in self.lines if str(line["event"]).startswith(start)), None)

        with self._told:
            over = self._told.wait_for(lambda: find() is not None or self._ended(), SAFETY_S)
        found = find()
        assert over, f"no {start!r} in {self.lines}"
        assert found is not None, f"no {start!r} in {self.lines}"
        return found

    def events(self, event: str) -> list[dict[str, Any]]:
        """Every event of this name so far."""
        return [line for line in self.lines if line["event"] == event]

    def wait(self) -> int:
        """The exit code, when it is over; the log is whole then."""
        code = self.process.wait(SAFETY_S)
        assert self._reader is not None
        self._reader.join(SAFETY_S)
        return code

    def _ended(self) -> bool:
        return bool(self.lines) and self.lines[-1]["event"] == "end of log"


@contextmanager
def starting(*, module: Sequence[str] = ("service", "serve"), **settings: Any) -> Iterator[Server]:
    """`valence serve`, or another module, in a process that listens and may still load. Killed at the end."""
    settings = {"port": 0, "drain_delay_s": 0, "log_format": "json"} | settings
    process = subprocess.Popen(
        [sys.executable, "-m", *module],
        cwd=ROOT,
        env=environment(**settings),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    server = Server(process, str(settings.get("precision", "auto")))
    try:
        server.read_log()
        server.url = str(server.event("listening on ")["event"]).removeprefix("listening on ")
        yield server
    finally:
        process.kill()
        server.wait()
        assert process.stderr is not None
        process.stderr.close()


@contextmanager
def serving(**settings: Any) -> Iterator[Server]:
    """`valence serve` in a process that is ready. It is killed at the end."""
    with starting(**settings) as server:
        server.event("ready on ")
        yield server


@dataclass
class LocalServer:
    """The same server in a thread of this process."""

    url: str
    life: Life
    loop: asyncio.AbstractEventLoop
    server: UvicornServer
    thread: threading.Thread

    @property
    def address(self) -> tuple[str, int]:
        """Where to connect a bare socket."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def client(self) -> httpx.Client:
        """A client with this base address, and no bounds on connections."""
        return httpx.Client(base_url=self.url, timeout=SAFETY_S, limits=httpx.Limits(), trust_env=False)

    def ask_to_stop(self) -> None:
        """What a signal does."""
        self.loop.call_soon_threadsafe(self.server.ask_to_stop)

    def wait(self) -> int:
        """The exit code, when it is over."""
        self.thread.join(SAFETY_S)
        assert not self.thread.is_alive()
        return self.server.exit_code

    def metric(self, name: str, **labels: str) -> float:
        """The value of a series now."""
        value = self.life.metrics.registry.get_sample_value(name, labels)
        assert value is not None, (name, labels)
        return value


@contextmanager
def local_server(
    *, open_engine: OpenEngine = engines.open_engine, ready: bool = True, **settings: Any
) -> Iterator[LocalServer]:
    """A server in a thread; with `ready`, when it is ready. It is stopped at the end."""
    all_settings: dict[str, Any] = {"port": 0, "drain_delay_s": 0.0, "device": "cpu"} | settings
    chosen = Settings(**all_settings)
    sockets = listen(chosen.host, chosen.port)
    app = create_app(chosen, open_engine=open_engine)
    server = UvicornServer(make_config(app, chosen), life_of(app), url=url_of(sockets[0]))
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets)

    url = url_of(sockets[0])
    thread = threading.Thread(target=uvloop.run, args=(serve(),))
    thread.start()
    eventually(lambda: server.started, "listening")
    running = LocalServer(url, life_of(app), loops[0], server, thread)
    try:
        if ready:
            eventually(lambda: running.life.unready_reason() is None, "ready")
        yield running
    finally:
        if thread.is_alive():
            running.ask_to_stop()
        running.wait()
