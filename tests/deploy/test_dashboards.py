"""The dashboards as files: as the code would write them, in a form that Grafana takes, of what exists."""

import json
import re
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.__main__ import FOLDER, contents, main
from deploy.grafana.boards import ALERT_WORDS, BOUNDS_S, DATASOURCE_UID, SLO_BOUND_S
from deploy.grafana.panels import Lines, Panel, Query, build
from scripts.dashboards_check import CLUSTER
from scripts.dashboards_draw import Drawn, draw_row
from scripts.dashboards_prometheus import Series
from scripts.dashboards_read import View, load, substitute, views
from scripts.dashboards_units import with_unit
from service.catalogue import CATALOGUE

ROOT = Path(__file__).parents[2]
NAMES = ("service", "model")
LARGEST_PICTURE_BYTES = 400_000


@pytest.fixture(params=NAMES)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load(FOLDER / f"{request.param}.json")


def every_view(*, raw: bool = False) -> list[View]:
    """The panels of all dashboards; `raw` leaves the variables of Grafana's own as words."""
    word = "1m" if not raw else "window"
    values = {"__rate_interval": word, "__interval": word}
    return [view for name in NAMES for view in views(load(FOLDER / f"{name}.json"), values)]


def panels_of(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def test_files_are_what_the_code_would_write() -> None:
    stale = [path.name for path, text in contents().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run python -m deploy.grafana"
    assert main(["--check"]) == 0


def test_grafana_types_read_a_dashboard_and_write_the_same(board: dict[str, Any]) -> None:
    register_default_plugins()
    again = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
    for annotation in again["annotations"]["list"]:
        annotation.update(ALERT_WORDS)
    for panel in panels_of(again):  # the reader adds an empty part where there was none
        if panel["fieldConfig"]["defaults"].get("custom") == {}:
            del panel["fieldConfig"]["defaults"]["custom"]
    assert again == board


def test_a_reader_chooses_the_data_source(board: dict[str, Any]) -> None:
    assert "__inputs" not in board
    [source] = [one for one in board["templating"]["list"] if one["name"] == "datasource"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels_of(board):
        assert panel["datasource"] == chosen, panel["title"]
        assert [target["datasource"] for target in panel["targets"]] == [chosen] * len(panel["targets"])
    assert [one["datasource"] for one in board["annotations"]["list"]] == [chosen]


def test_every_panel_says_what_it_shows_in_which_unit_and_what_to_do(board: dict[str, Any]) -> None:
    for panel in panels_of(board):
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        says, advice = panel["description"].split("\n\n")
        assert says.endswith(".") and advice.endswith("."), panel["title"]  # noqa: PT018 - one rule
    titles = [panel["title"] for panel in panels_of(board)]
    assert len(titles) == len(set(titles))


def test_panels_have_their_own_number_and_place(board: dict[str, Any]) -> None:
    everything = [*board["panels"], *(one for row in board["panels"] for one in row.get("panels", []))]
    numbers = [one["id"] for one in everything]
    assert len(numbers) == len(set(numbers))
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    heights = [one["gridPos"]["y"] for one in board["panels"]]
    assert all(above <= below for above, below in pairwise(heights))


def test_lines_of_one_series_have_a_fixed_color_and_alerts_and_links_lead_on(board: dict[str, Any]) -> None:
    for view in views(board, {"__rate_interval": "1m"}):
        if view.panel["type"] != "timeseries":
            continue
        fixed = {
            one["matcher"]["options"]
            for one in view.panel["fieldConfig"]["overrides"]
            if one["matcher"]["id"] == "byFrameRefID"
            and any(change["id"] == "color" for change in one["properties"])
        }
        single = {one.ref_id for one in view.targets if "{{" not in one.legend}
        assert single <= fixed, view.title
    assert "ALERTS" in board["annotations"]["list"][0]["expr"]
    assert board["links"][0]["tags"] == board["tags"]


_STRINGS = re.compile(r'"[^"]*"')
_GROUPING = re.compile(r"\b(by|on|ignoring|without|group_left|group_right)\s*\([^)]*\)")
_WORDS = re.compile(r"(?<![\w:$])[a-zA-Z_:][\w:]*\b(?!\s*\()")
_KEYWORDS = {"or", "and", "unless", "bool", "offset"}


def metrics_in(expr: str) -> set[str]:
    """Every metric that a PromQL expression names."""
    bare = _GROUPING.sub(" ", _STRINGS.sub('""', expr))
    bare = re.sub(r"\{[^}]*\}", " ", re.sub(r"\[[^\]]*\]", " ", bare))
    return set(_WORDS.findall(bare)) - _KEYWORDS


def sampled() -> set[str]:
    """The names that samples of our own metrics have."""
    made: set[str] = set()
    for one in CATALOGUE:
        ends = ("_bucket", "_count", "_sum") if one.type == "histogram" else ("",)
        made |= {one.name + end for end in ends}
    return made


def recorded() -> set[str]:
    paths = sorted((ROOT / "deploy/prometheus/rules").glob("*.yml"))
    groups = [group for path in paths for group in yaml.safe_load(path.read_text())["groups"]]
    return {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}


def external() -> set[str]:
    listed = yaml.safe_load((ROOT / "deploy/prometheus/external_metrics.yml").read_text())
    return {name for names in listed.values() for name in names}


def test_metrics_are_found_in_an_expression() -> None:
    expr = (
        'sum by (le, job) (rate(a_bucket{le="b", c=~"d"}[5m])) / on() group_left() (e:f:g > 0) or vector(0)'
        ' or label_replace(h, "i", "j", "", "") * histogram_quantile(0.9, k) - 1e3'
    )
    assert metrics_in(expr) == {"a_bucket", "e:f:g", "h", "k"}


def test_every_metric_in_a_panel_exists() -> None:
    process = {"process_start_time_seconds", "process_cpu_seconds_total"}
    process |= {"process_resident_memory_bytes", "process_open_fds"}
    named = {name for view in every_view() for one in view.targets for name in metrics_in(one.expr)}
    assert named - sampled() - recorded() - external() - process == set()
    cluster = {name for name in named if name.startswith("kube_")}
    assert cluster <= {line.partition("{")[0] for line in CLUSTER.splitlines()}
    closed = {name for v in every_view() if v.closed for one in v.targets for name in metrics_in(one.expr)}
    assert cluster == closed, "what only a cluster has stands in the row that is closed"


def test_every_label_in_a_panel_exists() -> None:
    labels = {one.name: {*one.labels, "job", "instance"} for one in CATALOGUE}
    seen = 0
    for view in every_view():
        for target in view.targets:
            for metric, matchers in re.findall(r"\b(valence_\w+)\{([^}]*)\}", target.expr):
                family = re.sub(r"_(bucket|count|sum)$", "", metric)
                known = labels.get(metric) or labels[family] | {"le"}
                assert set(re.findall(r"(\w+)[=!]", matchers)) <= known, f"{view.title}: {metric}"
                seen += 1
    assert seen > 50


def test_bounds_are_those_of_buckets() -> None:
    buckets = {one.name: one.buckets for one in CATALOGUE}
    assert set(BOUNDS_S) <= set(buckets["valence_http_request_duration_seconds"])
    asked = {
        (metric, float(bound))
        for view in every_view()
        for one in view.targets
        for metric, bound in re.findall(r'(\w+)_bucket\{le="([\d.]+)"', one.expr)
    }
    assert len(asked) >= 2
    assert [(metric, bound) for metric, bound in asked if bound not in buckets[metric]] == []


def test_the_bound_that_a_dashboard_opens_with_is_the_objective() -> None:
    paths = sorted((ROOT / "deploy/prometheus/rules").glob("*.yml"))
    bounds = [re.findall(r'duration_seconds_bucket\{[^}]*le="([\d.]+)"', path.read_text()) for path in paths]
    assert {float(bound) for some in bounds for bound in some} == {SLO_BOUND_S}


def test_rates_are_over_an_interval_that_fits_the_scrapes() -> None:
    for view in every_view(raw=True):
        for target in view.targets:
            for window in re.findall(r"(?:rate|increase)\(\w+(?:\{[^}]*\})?\[(\w+)\]", target.expr):
                assert window == "window" or view.closed, f"{view.title}: {window}"


def test_provisioning_fits_the_dashboards_and_prometheus() -> None:
    folder = ROOT / "deploy/grafana/provisioning"
    [source] = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["uid"]) == ("prometheus", DATASOURCE_UID)
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scraped["scrape_interval"]
    [provider] = yaml.safe_load((folder / "dashboards/valence.yml").read_text())["providers"]
    assert provider["type"] == "file"
    assert not provider["allowUiUpdates"]
    assert provider["options"]["path"] in (ROOT / "docker-compose.yml").read_text(encoding="utf-8")


def test_pictures_on_the_page_are_there_and_small() -> None:
    page = (ROOT / "docs/dashboards.md").read_text(encoding="utf-8")
    shown = re.findall(r"\(dashboards/([\w-]+\.png)\)", page)
    there = [path.name for path in (ROOT / "docs/dashboards").glob("*.png")]
    assert sorted(shown) == sorted(there)
    for name in shown:
        content = (ROOT / "docs/dashboards" / name).read_bytes()
        assert struct.unpack(">I", content[16:20])[0] == 1400
        assert len(content) < LARGEST_PICTURE_BYTES


def test_an_unknown_variable_is_an_error() -> None:
    assert substitute("a[$b] ${c}", {"b": "1m", "c": "d"}) == "a[1m] d"
    with pytest.raises(KeyError):
        substitute("a[$b]", {})


def test_a_panel_of_no_kind_is_refused() -> None:
    with pytest.raises(TypeError):
        build(Panel(title="t", says="s.", advice="a.", unit="s", queries=[]))


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (0.0, "s", "0 s"),
        (0.0123, "s", "12.3 ms"),
        (0.5, "percentunit", "50%"),
        (0.0, "bytes", "0 B"),
        (3 * 1024**2, "bytes", "3 MiB"),
        (1500.0, "reqps", "1.5 K req/s"),
        (0.0, "suffix:×", "0×"),
        (14.4, "suffix:×", "14.4×"),
        (float("inf"), "s", "∞"),
    ],
)
def test_numbers_have_their_unit(value: float, unit: str, said: str) -> None:
    assert with_unit(value, {"unit": unit}) == said


def test_an_unknown_unit_is_an_error() -> None:
    with pytest.raises(KeyError):
        with_unit(1, {"unit": "furlong"})


def drawing(tmp_path: Path, answer: list[Series]) -> bytes:
    panel = Lines(title="t", says="s.", advice="a.", unit="s", queries=[Query("up", "{{job}}")])
    made = json.loads(json.dumps(build(panel).build(), cls=JSONEncoder))
    [view] = views({"panels": [made], "templating": {"list": []}})
    draw_row([Drawn(view, [(view.targets[0], answer)])], tmp_path / "row.png", 100.0)
    return (tmp_path / "row.png").read_bytes()


def test_a_picture_shows_what_was_answered(tmp_path: Path) -> None:
    steady = [Series({"job": "a"}, [(100.0, 1.0), (101.0, 1.0), (102.0, 1.0), (105.0, 1.0)])]
    bridged = [Series({"job": "a"}, [(100.0 + at, 1.0) for at in range(6)])]
    other = [Series({"job": "b"}, steady[0].points)]
    pictures = {drawing(tmp_path, answer) for answer in (steady, bridged, other, [])}
    assert len(pictures) == 4, "a gap, a name and nothing at all each look different"
