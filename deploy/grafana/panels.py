"""What a panel is: a frozen description, and its form in Grafana's own types.

Knows the look (units, fixed colours, legends) and nothing of what Valence measures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboard_builders
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode, HeatmapColorScale
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
"""Whatever Prometheus the reader chose, never one that is fixed in a panel."""

GREEN, YELLOW, ORANGE, RED = "#73BF69", "#FADE2A", "#FF9830", "#F2495C"
BLUE, PALE_BLUE, PURPLE, GREY = "#5794F2", "#C0D8FF", "#B877D9", "#8E8E8E"

PanelBuilder = stat.Panel | timeseries.Panel | heatmap.Panel


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression of a panel.

    Attributes:
        legend: the name of its series; `{{label}}` stands for a label's value.
        color: of its series, when it has one series; empty: the panel's `colors` decide.
        exemplars: whether single requests are drawn on top.
        dashed: for a bound or what would be expected, beside what is.
    """

    expr: str
    legend: str
    color: str = ""
    exemplars: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """What every panel has.

    Attributes:
        says: what the reader learns from it.
        advice: what to do about it.
        unit: Grafana's name of a unit, or `suffix:` and a word.
        width, height: of Grafana's grid, 24 columns wide.
    """

    title: str
    says: str
    advice: str
    unit: str
    queries: Sequence[Query]
    width: int = 8
    height: int = 8
    decimals: int | None = None
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat(Panel):
    """One large number, coloured by the step that it has reached: `steps` are (from, colour), rising.

    With `names` the series' name is the answer and not its value.
    """

    steps: Sequence[tuple[float, str]] = ()
    base: str = GREEN
    width: int = 3
    height: int = 4
    names: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines(Panel):
    """Series over time. `colors` gives series a fixed colour by a pattern of their name."""

    stacked: bool = False
    colors: Mapping[str, str] = field(default_factory=dict)
    logarithmic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat(Panel):
    """A histogram over time; its query sums the increase of the buckets by `le`."""


def build(panel: Panel) -> PanelBuilder:
    """The panel in Grafana's types. TypeError: not one of the kinds above."""
    built: PanelBuilder
    if isinstance(panel, Stat):
        built = _stat(panel)
    elif isinstance(panel, Lines):
        built = _lines(panel)
    elif isinstance(panel, Heat):
        built = _heat(panel)
    else:
        raise TypeError(f"no form for {type(panel).__name__}")
    return _common(built, panel)


def _common(built: PanelBuilder, panel: Panel) -> PanelBuilder:
    built.title(panel.title).description(f"{panel.says}\n\n{panel.advice}").datasource(DATASOURCE)
    built.height(panel.height).span(panel.width).unit(panel.unit)
    if panel.decimals is not None:
        built.decimals(panel.decimals)
    if panel.least is not None:
        built.min(panel.least)
    if panel.most is not None:
        built.max(panel.most)
    for number, query in enumerate(panel.queries):
        built.with_target(_target(query, chr(ord("A") + number), heat=isinstance(panel, Heat)))
    return built


def _target(query: Query, ref_id: str, *, heat: bool) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).ref_id(ref_id).datasource(DATASOURCE).range()
    target.legend_format(query.legend)
    if query.exemplars:
        target.exemplar(exemplar=True)
    if heat:
        target.format(PromQueryFormat.HEATMAP)
    return target


def _fixed(color: str) -> dashboard.DynamicConfigValue:
    return dashboard.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": color})


def _lines(panel: Lines) -> timeseries.Panel:
    built = timeseries.Panel().line_width(0 if panel.stacked else 2).fill_opacity(80 if panel.stacked else 0)
    built.show_points(common.VisibilityMode.AUTO).span_nulls(span_nulls=False).axis_soft_min(0)
    built.color_scheme(
        dashboard_builders.FieldColor().mode(dashboard.FieldColorModeId.PALETTE_CLASSIC_BY_NAME)
    )
    built.legend(
        common_builders.VizLegendOptions()
        .show_legend(show_legend=True)
        .display_mode(common.LegendDisplayMode.LIST)
        .placement(common.LegendPlacement.BOTTOM)
    )
    built.tooltip(
        common_builders.VizTooltipOptions()
        .mode(common.TooltipDisplayMode.MULTI)
        .sort(common.SortOrder.DESCENDING)
    )
    if panel.stacked:
        built.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL))
    if panel.logarithmic:
        built.scale_distribution(
            common_builders.ScaleDistributionConfig().type(common.ScaleDistribution.SYMLOG).log(10)
        )
    for pattern, color in panel.colors.items():
        built.override_by_regexp(f"/{pattern}/", [_fixed(color)])
    for number, query in enumerate(panel.queries):
        properties = [_fixed(query.color)] if query.color else []
        if query.dashed:
            dashes = {"fill": "dash", "dash": [8, 6]}
            properties.append(dashboard.DynamicConfigValue(id_val="custom.lineStyle", value=dashes))
        if properties:
            built.override_by_query(chr(ord("A") + number), properties)
    return built


def _heat(panel: Heat) -> heatmap.Panel:
    built = heatmap.Panel().calculate(calculate=False).cell_gap(1).hide_y_histogram().show_legend()
    built.y_axis(heatmap.YAxisConfig().unit(panel.unit).axis_placement(common.AxisPlacement.LEFT))
    built.filter_values(heatmap.FilterValueRange().le(1e-9))
    built.color(
        heatmap.HeatmapColorOptions()
        .mode(HeatmapColorMode.SCHEME)
        .scheme("Oranges")
        .scale(HeatmapColorScale.EXPONENTIAL)
        .exponent(0.5)
        .steps(64)
    )
    return built.cell_values(heatmap.CellValues().unit("short"))


def _stat(panel: Stat) -> stat.Panel:
    steps = [dashboard.Threshold(value=None, color=panel.base)]
    steps += [dashboard.Threshold(value=start, color=color) for start, color in panel.steps]
    built = stat.Panel().color_mode(common.BigValueColorMode.VALUE)
    built.thresholds(
        dashboard_builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)
    )
    built.color_scheme(dashboard_builders.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS))
    built.graph_mode(common.BigValueGraphMode.NONE if panel.names else common.BigValueGraphMode.AREA)
    built.text_mode(common.BigValueTextMode.NAME if panel.names else common.BigValueTextMode.VALUE)
    return built.reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
