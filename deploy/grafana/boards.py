"""What a dashboard is: rows of panels under the same variables, and its form in Grafana's own types.

The first row has no heading: the numbers that a glance must catch. Knows nothing of what is measured beyond
the variables and the series that they are read from.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard

from deploy.grafana.panels import DATASOURCE, RED, Panel, build

DATASOURCE_UID = "prometheus"
TAG = "valence"
BOUNDS_S = (0.1, 0.25, 0.5, 1.0)
"""Latency bounds to choose from, seconds: each is the bound of a bucket."""

SLO_BOUND_S = 0.25

ALERT_WORDS = {"titleFormat": "{{alertname}}", "tagKeys": "severity"}
"""What Grafana's Prometheus annotations have and the typed builder has not."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading. A closed row asks nothing until it is opened."""

    title: str
    panels: Sequence[Panel]
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard. `uid` is its address in Grafana and never changes."""

    uid: str
    title: str
    description: str
    glance: Sequence[Panel]
    rows: Sequence[Row]


def build_board(board: Board) -> dashboard.Dashboard:
    """The dashboard in Grafana's types, every panel with a number of its own."""
    built = builders.Dashboard(board.title).uid(board.uid).description(board.description).tags([TAG])
    built.time("now-1h", "now").refresh("30s").timezone("browser").readonly()
    built.tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
    for variable in _variables():
        built.with_variable(variable)
    built.annotation(_alerts())
    built.link(
        builders.DashboardLink("Valence")
        .type(dashboard.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .keep_time(keep_time=True)
        .include_vars(include_vars=True)
    )
    for panel in board.glance:
        built.with_panel(build(panel))
    for row in board.rows:
        _add(built, row)
    return _numbered(built.build())


def as_json(board: Board) -> str:
    """The file's content."""
    made = json.loads(json.dumps(build_board(board), cls=JSONEncoder))
    for annotation in made["annotations"]["list"]:
        annotation.update(ALERT_WORDS)
    return json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _add(built: builders.Dashboard, row: Row) -> None:
    heading = builders.Row(row.title).collapsed(collapsed=row.closed)
    if row.closed:
        for panel in row.panels:
            heading.with_panel(build(panel))
    built.with_row(heading)
    if not row.closed:
        for panel in row.panels:
            built.with_panel(build(panel))


def _numbered(made: dashboard.Dashboard) -> dashboard.Dashboard:
    number = 0
    for panel in made.panels or ():
        number += 1
        panel.id_val = number
        for inner in panel.panels if isinstance(panel, dashboard.RowPanel) else ():
            number += 1
            inner.id_val = number
    return made


def _option(text: str, value: str | None = None) -> dashboard.VariableOption:
    return dashboard.VariableOption(selected=True, text=text, value=text if value is None else value)


def _variables() -> list[builders.DatasourceVariable | builders.QueryVariable | builders.CustomVariable]:
    bounds = ",".join(str(bound) for bound in BOUNDS_S)
    return [
        builders.DatasourceVariable("datasource")
        .label("Data source")
        .type("prometheus")
        .current(_option("Prometheus", DATASOURCE_UID)),
        builders.QueryVariable("job")
        .label("Job")
        .query("label_values(valence_ready, job)")
        .datasource(DATASOURCE)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .current(_option("valence")),
        builders.QueryVariable("instance")
        .label("Instance")
        .query('label_values(valence_ready{job=~"$job"}, instance)')
        .datasource(DATASOURCE)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(multi=True)
        .include_all(include_all=True)
        .all_value(".*")
        .current(_option("All", "$__all")),
        builders.CustomVariable("slo_latency_s")
        .label("Latency bound, s")
        .description("Answers should come sooner than this; a bound of a bucket. The SLO's is 0.25.")
        .values(bounds)
        .current(_option(str(SLO_BOUND_S))),
    ]


def _alerts() -> builders.AnnotationQuery:
    return (
        builders.AnnotationQuery()
        .name("Alerts")
        .enable(enable=True)
        .datasource(DATASOURCE)
        .icon_color(RED)
        .expr('ALERTS{alertstate="firing", job=~"$job"}')
    )
