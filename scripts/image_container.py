"""A container of the service on this machine's own network: started as production does, asked, and removed.

Knows nothing of what is right.
"""

import http.client
import json
import resource
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from scripts.image_build import run

READY_BOUND_S = 60
NAME = "valence-check"

# crun without systemd, and no journal: neither runs in a plain container or a small virtual machine.
PODMAN = ("podman", "--runtime", "crun", "--cgroup-manager", "cgroupfs", "--events-backend", "file")
HARDENED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")  # noqa: S108


class WrongError(Exception):
    """The image does not do what it must; the message says what."""


@dataclass(frozen=True, slots=True)
class Container:
    """A running container, its port on 127.0.0.1, and its first process as this machine numbers it."""

    port: int
    process: int
    ready_s: float

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and JSON of one request; POST when there is a body."""
        return ask(self.port, path, body)


def require(holds: bool, otherwise: str) -> None:
    """Raises WrongError unless it holds."""
    if not holds:
        raise WrongError(otherwise)


_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}


def hardened() -> list[str]:
    """As in docker-compose.yml, and with limits that this machine can give."""
    hard = {name: resource.getrlimit(kind)[1] for name, kind in _LIMITS.items()}
    bounds = {
        name: 1024 if most == resource.RLIM_INFINITY else min(1024, most) for name, most in hard.items()
    }
    limits = [part for name, most in bounds.items() for part in ("--ulimit", f"{name}={most}:{most}")]
    return [*HARDENED, *limits]


@contextmanager
def running(tag: str) -> Iterator[Container]:
    """The container, ready. It is removed at the end."""
    port = free_port()
    run(*PODMAN, "rm", "--force", "--ignore", NAME)
    started_s = time.monotonic()
    try:
        run(
            *(*PODMAN, "run", "--detach", "--name", NAME, "--network", "host"),
            *("--no-healthcheck", *hardened()),
            *("--env", f"VALENCE_PORT={port}", "--env", "VALENCE_HOST=127.0.0.1", tag),
        )
        until(lambda: status(port, "/health/ready") == http.HTTPStatus.OK, "ready", READY_BOUND_S)
        ready_s = time.monotonic() - started_s
        process = int(run(*PODMAN, "inspect", "--format", "{{.State.Pid}}", NAME))
        yield Container(port, process, ready_s)
    except (WrongError, RuntimeError) as error:
        raise WrongError(f"{error}\n{log()}") from error
    finally:
        run(*PODMAN, "rm", "--force", "--time", "0", NAME)


def is_running() -> bool:
    """Whether the container has not ended."""
    return run(*PODMAN, "inspect", "--format", "{{.State.Running}}", NAME).strip() == "true"


def log() -> str:
    """The end of what it has said."""
    log = subprocess.run([*PODMAN, "logs", NAME], check=False, capture_output=True, text=True)
    return "\n".join((log.stdout + log.stderr).splitlines()[-20:])


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Status and JSON of one request to 127.0.0.1; POST when there is a body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_BOUND_S)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def status(port: int, path: str) -> int | None:
    """The status of a GET, or None when nobody answers."""
    try:
        return ask(port, path)[0]
    except OSError:
        return None


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], bool], what: str, bound_s: float) -> None:
    """Wait for it. Raises WrongError: not within the bound."""
    give_up_s = time.monotonic() + bound_s
    while not condition():
        require(time.monotonic() < give_up_s, f"not {what} within {bound_s:.0f} s")
        time.sleep(0.02)
