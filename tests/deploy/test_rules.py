"""Prometheus and Alertmanager take rules and routes; all are tested and documented, and read real metrics."""

import re
import subprocess
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from service.metrics import Metrics
from tests.deploy.rules_files import (
    FOLDER,
    ROOT,
    RULE_FILES,
    TEST_FILES,
    alerts,
    alerts_in_tests,
    metrics_in,
    outside_metrics,
    read,
    records,
    rules,
    run,
    tool,
)

ALERTMANAGER = ROOT / "deploy/alertmanager/alertmanager.yml"
ALWAYS_FIRES = {"ValenceWatchdog"}
WINDOWS = [
    ("14.4", "1h", "5m", "page"),
    ("6", "6h", "30m", "page"),
    ("3", "1d", "2h", "ticket"),
    ("1", "3d", "6h", "ticket"),
]


def on_the_page() -> set[str]:
    """Every name of a series on /metrics."""
    families = parse_text(Metrics().render()[0].decode())
    # A family without a series yet tells its name alone.
    return {
        name
        for family in families
        for name in (family.name, f"{family.name}_total", *(sample.name for sample in family.samples))
    } | {f"{name}_{end}" for name in histograms() for end in ("bucket", "sum", "count")}


def histograms() -> set[str]:
    families = parse_text(Metrics().render()[0].decode())
    return {family.name for family in families if family.type == "histogram"}


def test_prometheus_takes_the_configuration() -> None:
    said = run("promtool", "check", "config", "--lint=all", "--lint-fatal", FOLDER / "prometheus.yml")
    assert f"{len(RULE_FILES)} rule files found" in said


def test_prometheus_takes_the_rules() -> None:
    run("promtool", "check", "rules", "--lint=all", "--lint-fatal", *RULE_FILES)


@pytest.fixture(scope="module")
def promtool_tests() -> dict[str, tuple[int, str]]:
    """What each file of tests gives; all run at the same time."""
    command = tool("promtool")
    started = {
        path.name: subprocess.Popen(
            [command, "test", "rules", path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for path in TEST_FILES
    }
    said = {name: process.communicate()[0].decode() for name, process in started.items()}
    return {name: (process.returncode, said[name]) for name, process in started.items()}


@pytest.mark.parametrize("name", [path.name for path in TEST_FILES])
def test_the_rules_pass_their_tests(promtool_tests: dict[str, tuple[int, str]], name: str) -> None:
    code, said = promtool_tests[name]
    assert code == 0, said


def test_every_alert_is_tested_both_ways() -> None:
    names = {rule["alert"] for rule in alerts()}
    assert names == alerts_in_tests(firing=True)
    assert names - ALWAYS_FIRES == alerts_in_tests(firing=False)


@pytest.mark.parametrize(("burn", "long", "short", "severity"), WINDOWS)
@pytest.mark.parametrize("slo", ["availability", "latency"])
def test_an_objective_burns_in_two_windows(slo: str, burn: str, long: str, short: str, severity: str) -> None:
    (rule,) = (
        rule
        for rule in alerts()
        if rule["alert"] == f"Valence{slo.capitalize()}Burn" and rule["labels"]["window"] == long
    )
    assert rule["labels"]["severity"] == severity
    assert rule["expr"].splitlines() == [
        f'valence:slo_burn:{long}{{slo="{slo}"}} > {burn}',
        f'and valence:slo_burn:{short}{{slo="{slo}"}} > {burn}',
        f'and sum_over_time(valence:slo_bad:rate1m{{slo="{slo}"}}[{long}]) * 30 > 10',
    ]
    fired = re.compile(rf"window: {long}, slo: {slo}\b")
    assert any(fired.search(path.read_text(encoding="utf-8")) for path in TEST_FILES)


def test_the_number_of_failures_stands_on_the_interval_of_its_group() -> None:
    (group,) = read(FOLDER / "rules/slo.yml")["groups"]
    assert group["interval"] == "30s"


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_every_alert_says_what_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"page", "ticket", "heartbeat"}
    notes = rule["annotations"]
    assert notes["summary"]
    assert notes["description"].endswith(".")
    assert notes["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_the_runbook_has_an_entry_for_each_alert_and_no_other() -> None:
    text = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
    entries = re.findall(r"^## (Valence\w+)$", text, re.MULTILINE)
    assert sorted(entries) == sorted({rule["alert"] for rule in alerts()})
    for entry in text.split("\n## Valence")[1:]:
        asked = re.findall(r"^\*\*(.+?)\*\*", entry.split("\n## ")[0], re.MULTILINE)
        assert asked == ["Means.", "Look.", "Do.", "Silence."], entry.partition("\n")[0]


def test_every_metric_in_a_rule_exists() -> None:
    known = on_the_page() | outside_metrics() | {rule["record"] for rule in records()}
    unknown = {name for rule in rules() for name in metrics_in(rule["expr"])} - known
    assert unknown == set()


def test_the_runbook_and_the_page_of_objectives_name_what_exists() -> None:
    known = on_the_page() | {rule["record"] for rule in records()} | histograms()
    for page in ("docs/runbook.md", "docs/slo.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        named = set(re.findall(r"\bvalence(?:_[a-z0-9_]+|:[a-z0-9_:]+)\b", text))
        assert named, page
        assert named - known == set(), page


def test_an_expression_is_read_as_its_metrics() -> None:
    expr = (
        'sum by (job) (rate(a_total{x="b"}[5m])) / on (job) group_left () (a:b:rate5m > 0) or 0 * c offset 1d'
    )
    assert metrics_in(expr) - {"d"} == {"a_total", "a:b:rate5m", "c"}


def test_the_recorded_names_are_of_one_form() -> None:
    for rule in records():
        assert re.fullmatch(r"valence:[a-z_]+:[a-z0-9_]+", rule["record"])


def test_alertmanager_takes_the_routes() -> None:
    assert "SUCCESS" in run("amtool", "check-config", ALERTMANAGER)


@pytest.mark.parametrize(
    ("severity", "receiver"),
    [("page", "page"), ("ticket", "ticket"), ("heartbeat", "heartbeat"), ("mistyped", "ticket")],
)
def test_each_alert_has_its_receiver(severity: str, receiver: str) -> None:
    labels = [f"severity={severity}", "alertname=ValenceShedding", "namespace=valence"]
    config = f"--config.file={ALERTMANAGER}"
    assert run("amtool", "config", "routes", "test", config, *labels).strip() == receiver


def test_the_bound_of_the_latency_objective_is_the_same_everywhere() -> None:
    text = (ROOT / "docs/slo.md").read_text(encoding="utf-8")
    bounds = {bound for rule in records() for bound in re.findall(r'le="([\d.]+)"', str(rule["expr"]))}
    assert bounds == {"0.25"}
    assert "0.25 s" in text
    bucket = 'valence_http_request_duration_seconds_bucket{le="0.25",route="/predict",status_class="2xx"}'
    assert bucket in Metrics().render()[0].decode()
