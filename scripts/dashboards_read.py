"""Reads a dashboard as Grafana would: the panels, and the queries with the variables put in.

Reads the JSON that is shipped, not the code that wrote it. Knows nothing of who answers the queries.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Target:
    """A query of a panel, ready to be asked.

    Attributes:
        ref_id: its letter in the panel.
        legend: the pattern of its series' names.
        exemplars: whether single requests belong on top.
    """

    ref_id: str
    expr: str
    legend: str
    exemplars: bool

    def name_of(self, labels: Mapping[str, str]) -> str:
        """The name of a series in the legend."""
        return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), self.legend)


@dataclass(frozen=True, slots=True)
class View:
    """A panel and the row that it stands in.

    Attributes:
        row: heading; empty for the row of single numbers.
        closed: whether the row is closed until somebody opens it.
        panel: as in the file.
    """

    row: str
    closed: bool
    panel: Mapping[str, Any]
    targets: Sequence[Target]

    @property
    def title(self) -> str:
        """As the reader sees it."""
        return str(self.panel["title"])


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Put the variables in. KeyError: one is not known."""
    return _VARIABLE.sub(lambda found: values[found[1] or found[2]], text)


def chosen(board: Mapping[str, Any]) -> dict[str, str]:
    """The values that a dashboard opens with; "All" is the pattern that stands for it."""
    values: dict[str, str] = {}
    for variable in board["templating"]["list"]:
        value = str(variable["current"]["value"])
        values[variable["name"]] = variable["allValue"] if value == "$__all" else value
    return values


def load(path: Path) -> dict[str, Any]:
    """The dashboard in the file."""
    board: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return board


def views(board: Mapping[str, Any], values: Mapping[str, str] | None = None) -> Iterator[View]:
    """Every panel in reading order; `values` come before those that the dashboard opens with."""
    known = chosen(board) | dict(values or {})
    row, closed = "", False
    for panel in board["panels"]:
        if panel["type"] == "row":
            row, closed = panel["title"], panel["collapsed"]
            yield from (_view(inner, known, row, closed=closed) for inner in panel["panels"])
        else:
            yield _view(panel, known, row, closed=closed)


def _view(panel: Mapping[str, Any], values: Mapping[str, str], row: str, *, closed: bool) -> View:
    targets = [
        Target(
            one["refId"],
            substitute(one["expr"], values),
            substitute(one["legendFormat"], values),
            one.get("exemplar", False),
        )
        for one in panel["targets"]
    ]
    return View(row, closed, panel, targets)
