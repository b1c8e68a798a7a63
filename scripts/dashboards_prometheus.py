"""A real Prometheus in a process of its own, with the rules of deploy/prometheus, and what it answers.

Knows nothing of dashboards. Needs the `prometheus` command (Debian: apt-get install prometheus).
"""

import json
import math
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from scripts.prometheus_process import prometheus

ROOT = Path(__file__).parent.parent
RULES = ROOT / "deploy/prometheus/rules"
SCRAPED_S = 60.0


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

    Raises (at the start): RuntimeError when it does not start, or has not scraped them in time.
    """

    jobs: Mapping[str, Sequence[str]]
    scrape_s: int = 1
    url: str = ""
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="valence-prometheus-")))
            self.url = stack.enter_context(prometheus(folder, self._config(folder)))
            self._wait_scraped()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

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

    def _config(self, folder: Path) -> dict[str, Any]:
        rules = folder / "rules"
        rules.mkdir()
        for path in sorted(RULES.glob("*.yml")):
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            for group in content["groups"]:
                group["interval"] = f"{self.scrape_s}s"
            (rules / path.name).write_text(yaml.safe_dump(content), encoding="utf-8")
        return {
            "global": {"scrape_interval": f"{self.scrape_s}s", "evaluation_interval": f"{self.scrape_s}s"},
            "rule_files": ["rules/*.yml"],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
                for job, addresses in self.jobs.items()
            ],
        }

    def _wait_scraped(self) -> None:
        """It begins to scrape some seconds after it has said that it is ready."""
        wanted = sum(map(len, self.jobs.values()))
        give_up_s = time.monotonic() + SCRAPED_S
        while (scraped := self._scraped()) != wanted:
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"Prometheus has scraped {scraped} of {wanted} addresses")
            time.sleep(0.05)

    def _scraped(self) -> int:
        found = self._ask("query", {"query": "count(up)"})["result"]
        return int(found[0]["value"][1]) if found else 0

    def _ask(self, what: str, asked: Mapping[str, Any]) -> Any:
        form = urllib.parse.urlencode(asked).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{what}", form, timeout=30) as response:  # noqa: S310 - our own server
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise NoAnswerError(json.load(error).get("error", str(error))) from error
