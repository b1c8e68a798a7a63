"""A real Prometheus and a real Alertmanager with the project's configuration, in a hurry and on free ports.

Knows nothing of the service but its address.
"""

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from load_tests.service_process import free_port
from tests.deploy.rules_files import FOLDER, ROOT, RULE_FILES, read, tool
from tests.server import eventually

TICK = "1s"
"""In place of every interval and every `for`. Windows stay as they are."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Clients of the two servers."""

    prometheus: httpx.Client
    alertmanager: httpx.Client

    def query(self, text: str) -> list[dict[str, Any]]:
        """The series of an instant query."""
        answer = self.prometheus.get("/api/v1/query", params={"query": text}).json()
        assert answer["status"] == "success", answer
        series: list[dict[str, Any]] = answer["data"]["result"]
        return series

    def rules(self) -> list[dict[str, Any]]:
        """Every rule and how it fares."""
        groups = self.prometheus.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def received(self, alertname: str) -> list[dict[str, Any]]:
        """What Alertmanager was told under this name."""
        params = {"filter": f'alertname="{alertname}"'}
        told: list[dict[str, Any]] = self.alertmanager.get("/api/v2/alerts", params=params).json()
        return told


def prometheus_config(folder: Path, *, service: str, alertmanager: str) -> Path:
    """The shipped configuration with other addresses and short intervals; its rules lie beside it."""
    (folder / "rules").mkdir()
    for path in RULE_FILES:
        text = path.read_text(encoding="utf-8")
        hurried = re.sub(r"\b(interval|for): \w+$", rf"\1: {TICK}", text, flags=re.MULTILINE)
        (folder / "rules" / path.name).write_text(hurried, encoding="utf-8")
    config = read(FOLDER / "prometheus.yml")
    config["global"] |= {"scrape_interval": TICK, "scrape_timeout": TICK, "evaluation_interval": TICK}
    targets = {"valence": service, "alertmanager": alertmanager}
    for job in config["scrape_configs"]:
        if job["job_name"] in targets:
            job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
    config["alerting"]["alertmanagers"] = [{"static_configs": [{"targets": [alertmanager]}]}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def alertmanager_config(folder: Path) -> Path:
    """The shipped configuration, waiting no longer than a moment for others of a group."""
    config = read(ROOT / "deploy/alertmanager/alertmanager.yml")
    for route in (config["route"], *config["route"]["routes"]):
        route |= {"group_wait": TICK, "group_interval": TICK}
    path = folder / "alertmanager.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@contextmanager
def running(command: Sequence[str | Path], log: Path, *, port: int) -> Iterator[httpx.Client]:
    """A server in a process of its own, when it is ready. It is killed at the end."""
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:

            def ready() -> bool:
                assert process.poll() is None, log.read_text(encoding="utf-8")[-500:]
                try:
                    return client.get("/-/ready").status_code == httpx.codes.OK
                except httpx.TransportError:
                    return False

            eventually(ready, f"{log.stem} is ready")
            yield client
    finally:
        process.kill()
        process.wait()


@contextmanager
def watching(service: str, folder: Path) -> Iterator[Watch]:
    """Both servers, looking after the service at this address (host:port)."""
    prometheus, alertmanager = tool("prometheus"), tool("prometheus-alertmanager")
    port, other_port = free_port(), free_port()
    scrape = prometheus_config(folder, service=service, alertmanager=f"127.0.0.1:{other_port}")
    with (
        running(
            [
                alertmanager,
                f"--config.file={alertmanager_config(folder)}",
                f"--storage.path={folder / 'alerts'}",
                f"--web.listen-address=127.0.0.1:{other_port}",
                "--cluster.listen-address=",
            ],
            folder / "alertmanager.log",
            port=other_port,
        ) as second,
        running(
            [
                prometheus,
                f"--config.file={scrape}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
                # Prometheus finds Alertmanager some seconds after its first evaluation, and loses that one.
                f"--rules.alert.resend-delay={TICK}",
            ],
            folder / "prometheus.log",
            port=port,
        ) as first,
    ):
        yield Watch(first, second)
