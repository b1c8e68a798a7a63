"""Asks a Prometheus that scrapes the service under load every query of the dashboards, and draws the answers.

    VALENCE_DATA=<data sets> python -m scripts.dashboards_check [--seconds 90] [--out docs/dashboards]

Real ones: two instances, one of them troubled on purpose; the rules of deploy/prometheus, evaluated each
second. What only a cluster can tell (kube-state-metrics) has made-up numbers, so that its queries are tried;
it is not drawn. Exit code 1: a query has no answer, or only NaN, or no exemplar; 2: the `prometheus` command
is missing.
"""

import argparse
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path

from scripts.dashboards_draw import Drawn, draw_row
from scripts.dashboards_prometheus import ROOT, NoAnswerError, PrometheusProcess, Series, Span
from scripts.dashboards_read import View, load, views
from scripts.dashboards_traffic import Traffic, even_instance, troubled_instance

BOARDS = ROOT / "deploy/grafana/dashboards"
SCRAPE_S = 1
RATE_INTERVAL_S = 4 * SCRAPE_S  # as Grafana makes it from the scrape interval when the picture is fine enough
EXEMPLARS_MOST = 150
EXIT_CANNOT_RUN = 2

CLUSTER = """\
kube_deployment_spec_replicas{namespace="valence",deployment="valence"} 2
kube_deployment_status_replicas_ready{namespace="valence",deployment="valence"} 2
kube_horizontalpodautoscaler_status_desired_replicas{namespace="valence",horizontalpodautoscaler="valence"} 2
kube_horizontalpodautoscaler_status_current_replicas{namespace="valence",horizontalpodautoscaler="valence"} 2
kube_horizontalpodautoscaler_spec_max_replicas{namespace="valence",horizontalpodautoscaler="valence"} 10
kube_pod_container_status_restarts_total{namespace="valence",pod="valence-0",container="valence"} 0
"""


@contextmanager
def cluster() -> Iterator[str]:
    """The address of what stands in for kube-state-metrics."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(CLUSTER.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Answers:
    """What Prometheus says to the panels; `problems` are the queries without an answer or an exemplar."""

    def __init__(self, prometheus: PrometheusProcess, span: Span) -> None:
        self._prometheus, self._span = prometheus, span
        self.problems: list[str] = []
        self.asked = 0

    def of(self, view: View) -> Drawn:
        """Ask for every series of the panel."""
        answers = []
        exemplars: list[tuple[float, float]] = []
        for target in view.targets:
            series: list[Series] = []
            self.asked += 1
            try:
                series = self._prometheus.range(target.expr, self._span)
            except NoAnswerError as error:
                self.problems.append(f"{view.title}, {target.ref_id}: {error}")
            else:
                if not series:
                    self.problems.append(f"{view.title}, {target.ref_id}: nothing but NaN, or nothing at all")
            answers.append((target, series))
            if target.exemplars:
                exemplars += self._prometheus.exemplars(target.expr, self._span)
                if not exemplars:
                    self.problems.append(f"{view.title}, {target.ref_id}: no exemplar")
        return Drawn(view, answers, exemplars[:: 1 + len(exemplars) // EXEMPLARS_MOST])


def check(seconds: float, out: Path | None) -> list[str]:
    """Run all of it; the queries without an answer. Pictures go to `out`.

    RuntimeError: the service, Prometheus or locust does not run.
    """
    with ExitStack() as stack:
        even = stack.enter_context(even_instance())
        troubled = stack.enter_context(troubled_instance())
        even.wait_ready()
        troubled.wait_ready()
        jobs = {
            "valence": [one.url.removeprefix("http://") for one in (even, troubled)],
            "kube-state-metrics": [stack.enter_context(cluster())],
        }
        prometheus = stack.enter_context(PrometheusProcess(jobs, SCRAPE_S))
        start_s = Traffic(even, troubled, seconds).drive()
        span = Span(start_s + RATE_INTERVAL_S, time.time(), SCRAPE_S)
        answers = Answers(prometheus, span)
        for name in ("service", "model"):
            _board(name, answers, out, start_s)
    print(f"{answers.asked} queries asked, {len(answers.problems)} problems")
    return answers.problems


def _board(name: str, answers: Answers, out: Path | None, start_s: float) -> None:
    values = {"__rate_interval": f"{RATE_INTERVAL_S}s", "__interval": f"{SCRAPE_S}s"}
    every = views(load(BOARDS / f"{name}.json"), values)
    for number, (row, group) in enumerate(groupby(every, key=lambda view: view.row)):
        drawn = [answers.of(view) for view in group]
        if out is not None and not drawn[0].view.closed:
            out.mkdir(parents=True, exist_ok=True)
            draw_row(drawn, out / f"{name}-{number}.png", start_s)
        requests = sum(len(one.exemplars) for one in drawn)
        print(f"{name}, {row or 'at a glance'}: {len(drawn)} panels, {requests} exemplars", flush=True)


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=90, help="of load")
    parser.add_argument("--out", type=Path, help="draw the pictures into this folder")
    chosen = parser.parse_args(arguments)
    if shutil.which("prometheus") is None:
        print("cannot run: prometheus is missing: apt-get install prometheus", file=sys.stderr)
        return EXIT_CANNOT_RUN
    problems = check(chosen.seconds, chosen.out)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
