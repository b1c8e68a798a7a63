"""`valence serve` as a process that is started in odd ways: by a shell, or without a log."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import IO, Any

import httpx

from tests.server import ROOT, Server, environment, eventually

SERVE = f"exec {sys.executable} -m service serve"


@contextmanager
def by_shell(command: str, **settings: Any) -> Iterator[Server]:
    """What a shell makes of the command, when it is ready; its log is read as of every other server."""
    settings = {"port": 0, "drain_delay_s": 0, "log_format": "json"} | settings
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        cwd=ROOT,
        env=environment(**settings),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    server = Server(process, "auto")
    try:
        server.read_log()
        server.event("ready on ")
        server.url = str(server.event("listening on ")["event"]).removeprefix("listening on ")
        yield server
    finally:
        process.kill()
        server.wait()
        assert process.stderr is not None
        process.stderr.close()


@contextmanager
def unheard(
    *, stderr: int | IO[bytes] | None = None, redirect: str = "", **settings: Any
) -> Iterator[tuple["subprocess.Popen[bytes]", httpx.Client]]:
    """A server whose log the test does not read, when it is ready, and a client of it."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        ["/bin/sh", "-c", f"{SERVE} {redirect}"],
        cwd=ROOT,
        env=environment(**{"port": port, "drain_delay_s": 0, "log_level": "debug"} | settings),
        stderr=stderr,
        stdout=subprocess.DEVNULL,
    )

    def is_ready() -> bool:
        assert process.poll() is None, "it has ended"
        try:
            return client.get("/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client:
            eventually(is_ready, "ready")
            yield process, client
    finally:
        process.kill()
        process.wait()
