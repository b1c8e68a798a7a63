"""A real Prometheus and a real Alertmanager with the project's configuration, in a hurry and on free ports.

Knows nothing of the service but its address.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from load_tests.service_process import free_port
from scripts.prometheus_process import prometheus, running
from tests.deploy.rules_files import FOLDER, ROOT, RULE_FILES, read, tool

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


def prometheus_config(folder: Path, *, service: str, alertmanager: str) -> dict[str, Any]:
    """The shipped configuration with other addresses and short intervals; its rules lie beside it."""
    (folder / "rules").mkdir()
    for path in RULE_FILES:
        text = path.read_text(encoding="utf-8")
        hurried = re.sub(r"\b(interval|for): \w+$", rf"\1: {TICK}", text, flags=re.MULTILINE)
        (folder / "rules" / path.name).write_text(hurried, encoding="utf-8")
    config: dict[str, Any] = read(FOLDER / "prometheus.yml")
    config["global"] |= {"scrape_interval": TICK, "scrape_timeout": TICK, "evaluation_interval": TICK}
    targets = {"valence": service, "alertmanager": alertmanager}
    for job in config["scrape_configs"]:
        if job["job_name"] in targets:
            job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
    config["alerting"]["alertmanagers"] = [{"static_configs": [{"targets": [alertmanager]}]}]
    return config


def alertmanager_config(folder: Path) -> Path:
    """The shipped configuration, waiting no longer than a moment for others of a group."""
    config = read(ROOT / "deploy/alertmanager/alertmanager.yml")
    for route in (config["route"], *config["route"]["routes"]):
        route |= {"group_wait": TICK, "group_interval": TICK}
    path = folder / "alertmanager.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@contextmanager
def watching(service: str, folder: Path) -> Iterator[Watch]:
    """Both servers, looking after the service at this address (host:port)."""
    tool("prometheus")
    port = free_port()
    command = [
        tool("prometheus-alertmanager"),
        f"--config.file={alertmanager_config(folder)}",
        f"--storage.path={folder / 'alerts'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    config = prometheus_config(folder, service=service, alertmanager=f"127.0.0.1:{port}")
    # Prometheus finds Alertmanager some seconds after its first evaluation, and loses that one.
    again = f"--rules.alert.resend-delay={TICK}"
    with (
        running(command, folder / "alertmanager.log", port=port) as alertmanager_url,
        prometheus(folder, config, again) as prometheus_url,
        httpx.Client(base_url=prometheus_url, timeout=30, trust_env=False) as first,
        httpx.Client(base_url=alertmanager_url, timeout=30, trust_env=False) as second,
    ):
        yield Watch(first, second)
