"""J. Metrics that an operator, an autoscaler or a load test can believe."""

import ast
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families

from tests.reliability.gates import hold, in_flight, predict
from tests.reliability.processes import SERVE, by_shell
from tests.server import ROOT, SAFETY_S, LocalServer, eventually, local_server
from tests.service.stand_ins import Opener


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[LocalServer]:
    with local_server(model_store=store) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LocalServer) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def answered(page: str) -> float:
    """How many predictions the page counts as answered."""
    [value] = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "valence_http_requests_total"
        and sample.labels == {"route": "/predict", "status": "200"}
    ]
    return value


def test_r64_every_scrape_counts_every_request(store: Path, pool: ThreadPoolExecutor) -> None:
    """Scraped all the while over connections of their own: never less than before, and exact at the end."""
    with by_shell(f"WEB_CONCURRENCY=4 {SERVE}", model_store=store) as server:
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(base_url=server.url, timeout=SAFETY_S, limits=limits, trust_env=False) as client:
            asked = [pool.submit(predict, client) for _ in range(200)]
            seen = [answered(client.get("/metrics").text) for _ in range(20)]
            assert {one.result(SAFETY_S).status_code for one in asked} == {200}
            assert seen == sorted(seen)
            assert {answered(client.get("/metrics").text) for _ in range(5)} == {200.0}


def gauges_of(client: httpx.Client, names: Sequence[str]) -> dict[str, tuple[str, float]]:
    """Type and value of these metrics on the page."""
    return {
        family.name: (family.type, family.samples[0].value)
        for family in text_string_to_metric_families(client.get("/metrics").text)
        if family.name in names
    }


def test_r66_what_an_autoscaler_looks_at_is_there_before_and_falls_after_the_load(
    store: Path, pool: ThreadPoolExecutor
) -> None:
    gauges = ("valence_queue_items", "valence_queue_tokens", "valence_lanes_busy")

    opener = Opener()
    with (
        local_server(open_engine=opener, model_store=store, lanes=1) as server,
        server.client() as client,
    ):
        assert gauges_of(client, gauges) == dict.fromkeys(gauges, ("gauge", 0.0))
        held = hold(opener, client, pool)
        waiting = [pool.submit(predict, client, "a bad film") for _ in range(20)]
        eventually(lambda: gauges_of(client, gauges)["valence_queue_items"] == ("gauge", 20.0), "all wait")
        assert gauges_of(client, gauges)["valence_queue_tokens"][1] == 20 * 5
        assert gauges_of(client, gauges)["valence_lanes_busy"][1] == 1
        assert in_flight(server) == 21
        opener.engine.gate.set()
        assert {one.result(SAFETY_S).status_code for one in (held, *waiting)} == {200}
        eventually(lambda: gauges_of(client, gauges) == dict.fromkeys(gauges, ("gauge", 0.0)), "down again")
        eventually(lambda: in_flight(server) == 0, "down again")


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_r67_a_step_of_the_clock_in_the_middle_of_a_request_changes_nothing(
    store: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    opener = Opener()
    with (
        local_server(open_engine=opener, model_store=store, lanes=1) as server,
        server.client() as client,
    ):
        held = hold(opener, client, pool)
        waiting = pool.submit(predict, client, "bad")
        eventually(lambda: in_flight(server) == 2, "both are in flight")
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + step_s)
        assert client.get("/health/ready").status_code == 200
        opener.engine.gate.set()
        assert [one.result(SAFETY_S).status_code for one in (held, waiting)] == [200, 200]
        duration_s = server.metric(
            "valence_http_request_duration_seconds_sum", route="/predict", status_class="2xx"
        )
        assert 0 <= duration_s < 1800
        for stage in ("tokenize", "queue", "infer"):
            assert 0 <= server.metric("valence_stage_duration_seconds_sum", stage=stage) < 1800


def test_r67_no_duration_is_taken_from_the_wall_clock() -> None:
    stamped = {"logs.py", "calibration.py"}  # a line of the log and a record say when they were made
    wall = {"time.time", "datetime.now", "datetime.utcnow", "datetime.datetime.now", "time.localtime"}
    found = [
        f"{path.name}:{node.lineno}"
        for path in (ROOT / "service").rglob("*.py")
        if path.name not in stamped
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in wall
    ]
    assert found == []


def test_r68_answers_and_refusals_are_counted_and_timed_apart(store: Path, pool: ThreadPoolExecutor) -> None:
    """A quick refusal must not better the percentiles of the answers."""
    opener = Opener()
    settings: dict[str, Any] = {"lanes": 1, "max_queue_items": 2, "max_texts": 2}
    with (
        local_server(open_engine=opener, model_store=store, **settings) as server,
        server.client() as client,
    ):
        held = hold(opener, client, pool)
        queued = pool.submit(predict, client, ["good", "bad"])
        eventually(lambda: b"valence_queue_items 2.0" in client.get("/metrics").content, "full")
        assert {predict(client).status_code for _ in range(7)} == {503}
        opener.engine.gate.set()
        assert [one.result(SAFETY_S).status_code for one in (held, queued)] == [200, 200]
        eventually(lambda: in_flight(server) == 0, "over")
        counts = {
            status: server.metric(
                "valence_http_request_duration_seconds_count", route="/predict", status_class=status
            )
            for status in ("2xx", "5xx")
        }
        assert counts == {"2xx": 2, "5xx": 7}
        assert server.metric("valence_refusals_total", reason="queue_full") == 7


# --- three more


def test_clients_cannot_make_series(server: LocalServer, client: httpx.Client) -> None:
    """Unknown paths, methods, headers and ids: the page has as many lines as before."""
    client.get("/metrics")
    before = client.get("/metrics").text.count("\n")
    for number in range(50):
        client.get(f"/nothing/{number}")
        client.post(f"/predict?{number}", json={"inputs": ""}, headers={"x-request-id": f"id-{number}"})
    for method in ("PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "M-SEARCH", "HEAD"):
        for path in ("/predict", "/metrics", "/health/live", "/nothing"):
            client.request(method, path)
    page = client.get("/metrics").text
    assert "nothing" not in page
    assert page.count("\n") == before


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text; version=1.0.0; charset=utf-8",
        "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1",
        "text/plain",
        "*/*",
        "nonsense",
        "",
    ],
)
def test_the_page_is_what_its_content_type_says(client: httpx.Client, accept: str) -> None:
    page = client.get("/metrics", headers={"accept": accept})
    if page.headers["content-type"].startswith("application/openmetrics-text"):
        families = {family.name for family in open_families(page.text)}  # type: ignore[no-untyped-call]
        assert page.text.endswith("# EOF\n")
    else:
        families = {family.name for family in text_string_to_metric_families(page.text)}
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert ("openmetrics" in page.headers["content-type"]) == ("openmetrics" in accept)
    assert {"valence_ready", "valence_http_requests", "process_resident_memory_bytes"} <= families


def test_a_scrape_never_waits_for_predictions(store: Path, pool: ThreadPoolExecutor) -> None:
    """60 at once, while every lane is held and texts are read in threads."""
    opener = Opener()
    with (
        local_server(open_engine=opener, model_store=store) as server,
        server.client() as client,
    ):
        held = hold(opener, client, pool)
        waiting = [pool.submit(predict, client, ["good film " * 2_000] * 10) for _ in range(8)]
        scrapes = [pool.submit(client.get, "/metrics") for _ in range(50)]
        assert {one.result(SAFETY_S).status_code for one in scrapes} == {200}
        assert not held.done()
        opener.engine.gate.set()
        assert {one.result(SAFETY_S).status_code for one in (held, *waiting)} == {200}
