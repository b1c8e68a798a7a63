"""Load on a running service by locust, open loop, with a verdict.

    locust -f load_tests/locustfile.py --headless --host http://127.0.0.1:8000 --html report.html

Run it from the folder that holds `load_tests/`, or with that folder on PYTHONPATH. It needs locust alone, and
takes real texts from the folder that `VALENCE_DATA` names. One process: locust's workers know no phases.
Ends with 0 when the objectives hold, 1 when one does not, 2 when it could not ask.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent  # type: ignore[import-untyped]
from locust import LoadTestShape, events
from locust import stats as locust_stats
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.event import EventHook
from locust.runners import LocalRunner

from load_tests.locust_mix import MIXES, Deck, Prepared
from load_tests.locust_open_loop import RATE_A_USER_PER_S, OpenLoopUser, Sender
from load_tests.locust_results import Objectives, Results
from load_tests.shapes import SHAPES, plan
from load_tests.verdict import EXIT_CANNOT_RUN


class Valence(OpenLoopUser):
    """The user that locust starts."""


class Planned(LoadTestShape):
    """Follows the plan that the options ask for; `results` and `requests` are those of the latest run."""

    results: Results | None = None
    requests: Iterator[Prepared] | None = None

    def reset_time(self) -> None:
        """locust calls it when a run starts, from the command line or from its web page."""
        options = _options(self.runner.environment if self.runner else None)
        self.requests = iter(Deck(options.mix))
        self.results = Results(
            plan(options.shape, rate_per_s=options.rate or None, seconds=options.seconds or None)
        )
        self.start_time = time.perf_counter()

    def tick(self) -> tuple[int, float] | None:
        """How many users, and how many may start or end a second: all at once, for a step is a step."""
        phase = self.results.plan.at(time.perf_counter() - self.start_time) if self.results else None
        if self.results is None or phase is None:
            return None
        self.results.phase = phase
        most_per_s = max(one.rate_per_s for one in self.results.plan.phases)
        return _users(phase.rate_per_s), _users(most_per_s)


def _users(rate_per_s: float) -> int:
    return max(1, round(rate_per_s / RATE_A_USER_PER_S))


def add_options(parser: LocustArgumentParser, **_: Any) -> None:
    """The options beside locust's own."""
    bounds = Objectives()
    parser.add_argument("--shape", choices=list(SHAPES), default="smoke", help="how the rate goes over time")
    # 0 and not None: locust's page keeps the type of the default.
    own = "; 0: as the shape has it"
    parser.add_argument("--rate", type=_not_below_zero, default=0.0, help=f"requests a second, at most{own}")
    parser.add_argument("--seconds", type=_not_below_zero, default=0.0, help=f"of all phases{own}")
    parser.add_argument("--mix", choices=list(MIXES), default="realistic", help="what is asked")
    parser.add_argument("--slo-ms", type=float, default=bounds.latency_ms, help="latency that must hold")
    parser.add_argument("--slo-in-time", type=float, default=bounds.in_time, help="for this share")
    parser.add_argument("--slo-available", type=float, default=bounds.available, help="share to be answered")
    parser.add_argument(
        "--verdict", default="", include_in_web_ui=False, help="keep the figures here, as JSON"
    )
    parser.add_argument("--api-key", default="", env_var="LOAD_API_KEY", is_secret=True, help="opens it")


def prepare(environment: Environment, **_: Any) -> None:
    """Before the first run."""
    if not isinstance(environment.runner, LocalRunner):
        print("cannot run: --master, --worker and --processes are not for this file", file=sys.stderr)
        sys.exit(EXIT_CANNOT_RUN)
    if _options(environment).headless and not environment.host:
        print("cannot run: --host names the service", file=sys.stderr)
        sys.exit(EXIT_CANNOT_RUN)
    # locust keeps two digits; its report would say 260 ms where the verdict says 255.
    locust_stats.bucket_response_time = _to_three_digits


def begin(environment: Environment, **_: Any) -> None:
    """What the users of this run send, and with what."""
    results, requests = _run(environment)
    api_key = _options(environment).api_key
    Valence.sender = Sender(
        environment, results, host=str(environment.host), requests=requests, api_key=api_key
    )


def conclude(environment: Environment, **_: Any) -> None:
    """All users have ended: wait for what is under way, and judge."""
    Valence.sender.finish()
    options, results = _options(environment), _run(environment)[0]
    objectives = Objectives(options.slo_ms, options.slo_in_time, options.slo_available)
    environment.process_exit_code = results.judge(objectives)
    if options.verdict:
        figures = results.figures(objectives) | {"exit_code": environment.process_exit_code}
        Path(options.verdict).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if options.csv_prefix:  # locust writes its tables once in this time, and does not at the end
        gevent.sleep(locust_stats.CSV_STATS_INTERVAL_SEC)


def leave(environment: Environment, **_: Any) -> None:
    """Without a verdict it has not run."""
    if environment.process_exit_code is None:
        environment.process_exit_code = EXIT_CANNOT_RUN


def _options(environment: Environment | None) -> argparse.Namespace:
    if environment is None or environment.parsed_options is None:
        raise RuntimeError("locust runs this file, from its command line")
    options: argparse.Namespace = environment.parsed_options
    return options


def _run(environment: Environment) -> tuple[Results, Iterator[Prepared]]:
    shape = environment.shape_class
    if not isinstance(shape, Planned) or shape.results is None or shape.requests is None:
        raise RuntimeError("this run follows no plan")
    return shape.results, shape.requests


def _not_below_zero(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError("must not be below 0")
    return value


def _to_three_digits(response_time: float) -> int:
    """Whole milliseconds, of which three digits count."""
    digits = 0 if response_time < 1000 else 2 - int(math.log10(response_time))
    return int(round(response_time, digits))


def _listen(hook: EventHook, listener: Callable[..., None]) -> None:
    hook.add_listener(listener)  # type: ignore[no-untyped-call]


_listen(events.init_command_line_parser, add_options)
_listen(events.init, prepare)
_listen(events.test_start, begin)
_listen(events.test_stop, conclude)
_listen(events.quitting, leave)
