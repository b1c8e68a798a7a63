"""Every query of the dashboards to a real Prometheus: the short form of scripts/dashboards_check.py."""

import shutil
import time
from pathlib import Path

import pytest

from scripts.dashboards_check import BOARDS, Answers, check
from scripts.dashboards_prometheus import NoAnswerError, PrometheusProcess, Span
from scripts.dashboards_read import load, views

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")

SECONDS = 8.0


def test_every_query_has_an_answer_under_load(tmp_path: Path) -> None:
    assert check(SECONDS, tmp_path) == []
    assert len(list(tmp_path.glob("service-*.png"))) == 6
    assert len(list(tmp_path.glob("model-*.png"))) == 4


def test_a_query_without_an_answer_is_told() -> None:
    """Nothing is scraped: all that is not a constant stays empty; NaN and a refusal are no answers either."""
    with PrometheusProcess({}) as prometheus:
        span = Span(time.time() - 3, time.time(), 1)
        answers = Answers(prometheus, span)
        for view in views(load(BOARDS / "service.json"), {"__rate_interval": "4s"}):
            answers.of(view)
        assert {problem.partition(":")[0] for problem in answers.problems} >= {
            "Ready, A",
            "Latency, C",
            "CPU, A",
        }
        assert prometheus.range("vector(0) / vector(0)", span) == []
        assert [len(one.points) for one in prometheus.range("vector(1)", span)] == [4]
        with pytest.raises(NoAnswerError):
            prometheus.range("rate(up)", span)
