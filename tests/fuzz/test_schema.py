"""The service against its own OpenAPI document: schemathesis, with every check that applies.

Which checks run, and why each other one does not, stands in `schemathesis.toml`.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from schemathesis.checks import CHECKS, load_all_checks

from tests.fuzz.acceptance import MAX_TOKENS
from tests.fuzz.aftermath import assert_unharmed
from tests.models import make_version
from tests.server import ROOT, LocalServer, environment, local_server

CONFIG = Path(__file__).with_name("schemathesis.toml")
KEY = "a-key-for-the-fuzz-of-32-letters"
SEED = 2026  # the same cases each time: what CI says does not depend on luck
TOO_LONG_S = 600


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("store")
    make_version(made, max_tokens=MAX_TOKENS)
    return made


@pytest.fixture
def server(store: Path) -> Iterator[LocalServer]:
    with local_server(model_store=store) as running:
        yield running


@pytest.fixture
def closed_server(store: Path) -> Iterator[LocalServer]:
    """Asks for a key everywhere but at the two probes."""
    with local_server(model_store=store, api_keys=KEY, open_metrics=False) as running:
        yield running


def run_schemathesis(location: str, folder: Path, *options: str) -> dict[str, Any]:
    """Run it, and give its report. What it says is printed, its seed with it."""
    report = folder / "report.json"
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"]
    command += ["--config-file", str(CONFIG), "--no-color", "run", location, "--seed", str(SEED)]
    command += ["--report", "json", "--report-json-path", str(report), *options]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment() | {"NO_PROXY": "127.0.0.1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TOO_LONG_S,
        check=False,
    )
    print(done.stdout)  # noqa: T201 - pytest shows it when the test fails
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    assert found["seed"] == SEED
    assert done.returncode == found["exit_code"]
    return found


def assert_clean(report: dict[str, Any], document: dict[str, Any], *, cases: int) -> None:
    assert report["failures"] == []
    assert report["errors"] == []
    assert report["exit_code"] == 0
    assert report["complete"]
    assert report["operations"]["tested"] == sum(map(len, document["paths"].values()))
    assert report["test_cases"]["generated"] >= cases


def test_every_check_is_in_the_configuration_once() -> None:
    """So that none is left out unseen. `max_response_time` is a bound to give, not a check that is there."""
    load_all_checks()
    named = set(tomllib.loads(CONFIG.read_text(encoding="utf-8"))["checks"])
    assert named == {*CHECKS.get_all_names(), "accepted_when_readable"}


def test_a_service_that_is_open_to_all(server: LocalServer, tmp_path: Path) -> None:
    with server.client() as client:
        document = client.get("/openapi.json").json()
    report = run_schemathesis(f"{server.url}/openapi.json", tmp_path, "--max-examples=2000")
    assert_clean(report, document, cases=2000)
    assert_unharmed(server.url, {})


def test_a_service_with_keys(closed_server: LocalServer, tmp_path: Path) -> None:
    header = f"X-API-Key: {KEY}"
    document = httpx.get(f"{closed_server.url}/openapi.json", headers={"x-api-key": KEY}).json()
    location = f"{closed_server.url}/openapi.json"
    report = run_schemathesis(location, tmp_path, "--max-examples=1000", "--header", header)
    assert_clean(report, document, cases=1000)
    assert_unharmed(closed_server.url, {"x-api-key": KEY})


def test_who_has_no_key_gets_nothing(closed_server: LocalServer, tmp_path: Path) -> None:
    """Keys are made up here, of every form that the document allows; none of them opens anything."""
    document = httpx.get(f"{closed_server.url}/openapi.json", headers={"x-api-key": KEY}).json()
    copy = tmp_path / "openapi.json"
    copy.write_text(json.dumps(document), encoding="utf-8")
    report = run_schemathesis(
        str(copy),
        tmp_path,
        f"--url={closed_server.url}",
        "--max-examples=200",
        "--generation-with-security-parameters=true",
        "--warnings=off",  # that no key is right is what it would warn of
    )
    assert_clean(report, document, cases=200)
    for route in ("/predict", "/models", "/metrics", "/health"):
        answered = closed_server.life.metrics.registry.get_sample_value(
            "valence_http_requests_total", {"route": route, "status": "200"}
        )
        assert not answered
