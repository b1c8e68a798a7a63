"""The page docs/dashboards.md: every panel, what it tells and what to do, with the pictures.

Made from the same tables as the dashboards. Knows nothing of how a picture is drawn.
"""

from collections.abc import Iterator, Sequence

from deploy.grafana.boards import Board
from deploy.grafana.panels import Panel

_HEAD = """\
<!-- Made by `python -m deploy.grafana` from deploy/grafana; do not edit. -->
# Dashboards

Two dashboards for Grafana, found in the folder Valence: [service and SLO](#valence-service-and-slo) for
whoever is on duty, [model](#valence-model) for whoever answers for what it says. `docker compose up` brings
them; elsewhere give Grafana `deploy/grafana/provisioning`, with your own `url` in
`datasources/prometheus.yml`, and `deploy/grafana/dashboards`, and Prometheus the recording rules of
`deploy/prometheus/rules`. What the objectives are: [slo.md](slo.md); what an alert wants of you:
[runbook.md](runbook.md).

On top of each stand the data source, the job, the instances, and the bound that "Latency" and "Share over
the bound" are drawn against. Alerts that fire are marked in red in every panel. Hover over the title of a
panel for the words below.

The pictures are the answers of a real Prometheus that scraped two real instances for a minute and a half, in
the shape of the dashboard: one instance under locust with a spike in the middle; the other with a short
queue, a burst of lists, a restart, and at the end texts of one kind only. The SLOs are broken on purpose, and
windows of an hour and more all hold that same minute. This tries every query and draws them anew, over those
that are here; it needs the command `prometheus` (`apt-get install prometheus`):

```
VALENCE_DATA=<data sets> python -m scripts.dashboards_check --out docs/dashboards
```

A panel is changed in its table in `deploy/grafana`; `python -m deploy.grafana` then writes the JSON and this
page. What is changed in the browser is not kept.
"""


def page(boards: Sequence[tuple[str, Board]]) -> str:
    """The whole page; each board comes with the name of its file."""
    return _HEAD + "".join(text for name, board in boards for text in _board(name, board))


def _board(name: str, board: Board) -> Iterator[str]:
    yield f"\n## {board.title}\n\n{board.description}\n"
    yield f"\n{_picture(name, 0, 'At a glance')}\n\n{_table(board.glance)}"
    for number, row in enumerate(board.rows, start=1):
        yield f"\n### {row.title}\n\n"
        yield "Closed until it is opened.\n\n" if row.closed else f"{_picture(name, number, row.title)}\n\n"
        yield _table(row.panels)


def _picture(name: str, number: int, title: str) -> str:
    return f"![{title}](dashboards/{name}-{number}.png)"


def _table(panels: Sequence[Panel]) -> str:
    lines = ["| panel | what it tells | what to do |", "|---|---|---|"]
    lines += [f"| {one.title} | {one.says} | {one.advice} |" for one in panels]
    return "\n".join(lines) + "\n"
