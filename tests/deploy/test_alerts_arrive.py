"""A real Prometheus on the real service: every rule gives a number, and an alert reaches its receiver."""

import math
from collections.abc import Iterator

import httpx
import pytest

from tests.deploy.alert_servers import Watch, watching
from tests.deploy.rules_files import alerts, metrics_in, outside_metrics, records, rules, run
from tests.server import JSON, Server, eventually, serving

Seen = tuple[Server, Watch]
TEXTS = ["A fine film.", "Dull, and far too long.", "so 😂 😍", "not bad " * 600]


def some_requests(client: httpx.Client) -> None:
    """Predictions, a long text among them, and two mistakes of a caller."""
    assert client.post("/predict", json={"inputs": TEXTS}).status_code == httpx.codes.OK
    assert client.post("/predict", json={"inputs": TEXTS[0]}).status_code == httpx.codes.OK
    assert client.post("/predict", json={"inputs": ""}).status_code == httpx.codes.UNPROCESSABLE_ENTITY
    assert client.post("/predict", content=b"{", headers=JSON).status_code == httpx.codes.BAD_REQUEST


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """A service, and two servers that look after it."""
    folder = tmp_path_factory.mktemp("watch")
    with serving() as server, watching(server.url.removeprefix("http://"), folder) as watch:
        yield server, watch


def test_every_recording_rule_gives_numbers(seen: Seen) -> None:
    server, watch = seen
    # Of each name, with the labels that the rule itself gives.
    wanted = [
        rule["record"] + "".join(f'{{{name}="{value}"}}' for name, value in rule.get("labels", {}).items())
        for rule in records()
    ]
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:

        def missing() -> list[str]:
            some_requests(client)
            return [name for name in wanted if not watch.query(name)]

        eventually(lambda: not missing(), "every recording rule has a series")
    wrong = {
        name: value
        for name in wanted
        for series in watch.query(name)
        if not math.isfinite(value := float(series["value"][1]))
    }
    assert wrong == {}
    (left,) = watch.query('valence:slo_budget_left:ratio30d{slo="availability"}')
    assert float(left["value"][1]) == 1, "what a caller does wrong costs no budget"


def test_every_rule_can_be_evaluated(seen: Seen) -> None:
    _, watch = seen
    loaded = watch.rules()
    assert len(loaded) == len(rules())
    eventually(lambda: all(rule["health"] != "unknown" for rule in watch.rules()), "all were evaluated")
    assert {rule["name"]: rule.get("lastError") for rule in watch.rules() if rule["health"] != "ok"} == {}


def test_every_metric_of_a_rule_is_scraped(seen: Seen) -> None:
    _, watch = seen
    ours = {name for rule in rules() for name in metrics_in(rule["expr"])} - outside_metrics()
    made = {rule["record"] for rule in records()}
    assert sorted(name for name in ours - made if not watch.query(name)) == []


def test_promtool_finds_no_fault_with_the_page(seen: Seen) -> None:
    server, _ = seen
    page = httpx.get(f"{server.url}/metrics", trust_env=False).content
    assert run("promtool", "check", "metrics", stdin=page) == ""


def test_a_service_that_dies_pages_and_its_ticket_is_held_back(seen: Seen) -> None:
    server, watch = seen
    assert {rule["name"] for rule in watch.rules() if rule["type"] == "alerting"} == {
        rule["alert"] for rule in alerts()
    }
    eventually(lambda: bool(watch.received("ValenceWatchdog")), "the heartbeat arrives")
    assert watch.received("ValenceDown") == []
    server.process.kill()
    eventually(lambda: bool(watch.received("ValenceDown")), "the page arrives")
    (page,) = watch.received("ValenceDown")
    assert [receiver["name"] for receiver in page["receivers"]] == ["page"]
    assert page["labels"]["severity"] == "page"
    assert page["annotations"]["runbook_url"] == "docs/runbook.md#valencedown"

    def held_back() -> bool:
        told = watch.received("ValenceTargetDown")
        return bool(told) and all(one["status"]["inhibitedBy"] for one in told)

    eventually(held_back, "the ticket of the same fault is inhibited by the page")
