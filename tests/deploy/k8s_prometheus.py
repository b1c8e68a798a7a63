"""A real Prometheus that scrapes one service the way the operator would, and what its queries give.

Knows nothing of autoscaling.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from scripts import prometheus_process
from tests.deploy.k8s_manifests import only
from tests.deploy.rules_files import tool
from tests.server import eventually

SCRAPE = "1s"


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A server that is ready, and a client of it."""

    client: httpx.Client

    def query(self, text: str, *, at_s: float) -> list[float]:
        """The values of the answer at this time; one in the future sees the samples that are there now."""
        answer = self.client.get("/api/v1/query", params={"query": text, "time": at_s}).json()
        assert answer["status"] == "success", answer
        return [float(one["value"][1]) for one in answer["data"]["result"]]

    def mean_since(self, text: str, *, since_s: float, window_s: float) -> float:
        """What a query over a window gives of the samples that are younger than `since_s` (Unix seconds).

        Asked for the end of the window, so that nobody must wait until older samples have left it.
        """
        values: list[float] = []

        def seen() -> bool:
            values[:] = self.query(text, at_s=since_s + window_s)
            return bool(values)

        eventually(seen, "a sample was taken")
        (value,) = values
        return value


def scrape_config(overlay: str, target: str) -> dict[str, Any]:
    """What the operator makes of the overlay's ServiceMonitor, with one fixed target and a short interval."""
    monitor, service = only(overlay, "ServiceMonitor"), only(overlay, "Service")
    (endpoint,) = monitor["spec"]["endpoints"]
    labels = {
        "namespace": service["metadata"]["namespace"],
        "job": service["metadata"]["labels"][monitor["spec"]["jobLabel"]],
    }
    return {
        "job_name": "serviceMonitor",
        "metrics_path": endpoint["path"],
        "scrape_interval": SCRAPE,
        "scrape_timeout": SCRAPE,
        "static_configs": [{"targets": [target], "labels": labels}],
    }


@contextmanager
def prometheus(folder: Path, *scrapes: dict[str, Any]) -> Iterator[Prometheus]:
    """A server in a process of its own. Skips where there is none. It is killed at the end."""
    tool("prometheus")
    with (
        prometheus_process.prometheus(folder, {"scrape_configs": list(scrapes)}) as url,
        httpx.Client(base_url=url, timeout=30, trust_env=False) as client,
    ):
        yield Prometheus(client)


def now_s() -> float:
    """The clock of the samples, in Unix seconds."""
    return time.time()
