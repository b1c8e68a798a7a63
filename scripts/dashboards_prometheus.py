"""A real Prometheus in a process of its own, with the rules of deploy/prometheus, and what it answers.

Knows nothing of dashboards. Needs the `prometheus` command (Debian: apt-get install prometheus).
"""

import json
import math
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from load_tests.service_process import free_port

ROOT = Path(__file__).parent.parent
RULES = ROOT / "deploy/prometheus/rules"
START_S = 60.0


class NoAnswerError(Exception):
    """The server refuses a query; the text says why."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer: its labels, and (Unix seconds, value) pairs without NaN and infinity."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Span:
    """From when to when, in Unix seconds, and how far apart the points are."""

    start_s: float
    end_s: float
    step_s: float


@dataclass(slots=True)
class PrometheusProcess:
    """Scrapes `jobs` (job -> addresses) every `scrape_s` and evaluates the rules as often; killed at the end.

    Inside of the `with`, each address has been scraped once.

    Raises (at the start): RuntimeError when it ends or is not ready in time.
    """

    jobs: Mapping[str, Sequence[str]]
    scrape_s: int = 1
    url: str = ""
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _process: "subprocess.Popen[bytes] | None" = field(default=None)

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="valence-prometheus-")
        folder = Path(self._folder.name)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        (folder / "prometheus.yml").write_text(self._config(folder), encoding="utf-8")
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    shutil.which("prometheus") or "prometheus",
                    f"--config.file={folder}/prometheus.yml",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--enable-feature=exemplar-storage",
                ],
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        give_up_s = time.monotonic() + START_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                said = (folder / "log").read_text(encoding="utf-8")[-500:]
                self.__exit__(None, None, None)
                raise RuntimeError(f"Prometheus does not start: {said}")
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
        if self._folder is not None:
            self._folder.cleanup()

    def range(self, query: str, span: Span) -> list[Series]:
        """Every series of the answer that has a number. NoAnswerError: the query is refused."""
        asked = {"query": query, "start": span.start_s, "end": span.end_s, "step": span.step_s}
        made: list[Series] = []
        for one in self._ask("query_range", asked)["result"]:
            points = [(float(at), float(value)) for at, value in one["values"]]
            numbers = [(at, value) for at, value in points if math.isfinite(value)]
            if numbers:
                made.append(Series(one["metric"], numbers))
        return made

    def exemplars(self, query: str, span: Span) -> list[tuple[float, float]]:
        """When each was, in Unix seconds, and its value."""
        asked = {"query": query, "start": span.start_s, "end": span.end_s}
        return [
            (float(one["timestamp"]), float(one["value"]))
            for series in self._ask("query_exemplars", asked)
            for one in series["exemplars"]
        ]

    def _config(self, folder: Path) -> str:
        rules = folder / "rules"
        rules.mkdir()
        for path in sorted(RULES.glob("*.yml")):
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            for group in content["groups"]:
                group["interval"] = f"{self.scrape_s}s"
            (rules / path.name).write_text(yaml.safe_dump(content), encoding="utf-8")
        return yaml.safe_dump(
            {
                "global": {
                    "scrape_interval": f"{self.scrape_s}s",
                    "evaluation_interval": f"{self.scrape_s}s",
                },
                "rule_files": [f"{rules}/*.yml"],
                "scrape_configs": [
                    {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
                    for job, addresses in self.jobs.items()
                ],
            }
        )

    def _is_ready(self) -> bool:
        """It begins to scrape some seconds after it has said that it is ready."""
        try:
            found = self._ask("query", {"query": "count(up)"})["result"]
        except OSError:
            return False
        scraped = int(found[0]["value"][1]) if found else 0
        return scraped == sum(len(addresses) for addresses in self.jobs.values())

    def _ask(self, what: str, asked: Mapping[str, Any]) -> Any:
        form = urllib.parse.urlencode(asked).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{what}", form, timeout=30) as response:  # noqa: S310 - our own server
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # not ready yet
                raise
            raise NoAnswerError(json.load(error).get("error", str(error))) from error
