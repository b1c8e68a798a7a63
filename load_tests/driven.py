"""Drives a server process with wrk and counts what that cost it. Knows nothing of what is served."""

from dataclasses import dataclass
from pathlib import Path

from load_tests.compare import wrk
from load_tests.cpu_time import CpuTime
from load_tests.service_process import ServiceProcess


@dataclass(frozen=True, slots=True)
class Driven:
    """What wrk saw, and the CPU that the server used meanwhile."""

    load: wrk.Load
    cpu: CpuTime


def drive(server: ServiceProcess, bodies: Path, *, connections: int, seconds: float) -> Driven:
    """A closed loop on `POST /predict`.

    Raises:
        WrkError: wrk is not there.
        RuntimeError: a request failed. A server that refuses is fast, and its figures say nothing.
    """
    before = CpuTime.of(server.pid)
    load = wrk.drive(server.url + "/predict", bodies, connections=connections, seconds=seconds)
    cpu = CpuTime.of(server.pid) - before
    if failed := load.not_200 + load.lost:
        raise RuntimeError(f"{failed} of {load.requests} requests failed")
    return Driven(load, cpu)
