"""Figures of the rounds to one summary, as JSON and as Markdown. Knows nothing of how they were taken."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from load_tests.compare.engine_alone import Bound
from load_tests.compare.wrk import Load

OURS = "valence"


@dataclass(frozen=True, slots=True)
class Turn:
    """One server at one number of connections in one round."""

    round: int
    server: str
    connections: int
    load: Load
    server_cpu_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """The rounds of a server at a number of connections together.

    Rates and percentiles are medians of the rounds. `ratio` is the median of Valence's rate over this
    server's in the same round, so that what the machine does between rounds is in neither.
    """

    server: str
    connections: int
    rate: float
    p50_ms: float
    p99_ms: float
    server_cpu_ms: float
    generator_cpu_ms: float
    failed: int
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is written.

    Attributes:
        about: configuration, versions and resident MB by server.
        turns: filled as they end.
        bounds: the engine alone, by round.
    """

    date: str
    machine: str
    texts: str
    seconds: float
    about: dict[str, dict[str, Any]]
    turns: list[Turn] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)

    def rows(self) -> list[Row]:
        """A row for each server and number of connections, in the order measured first."""
        keys = dict.fromkeys((turn.server, turn.connections) for turn in self.turns if turn.round == 0)
        order = {name: place for place, name in enumerate(self.about)}
        chosen = sorted(keys, key=lambda key: (key[1], order[key[0]]))
        return [_row(*key, self.turns) for key in chosen]

    def as_json(self) -> dict[str, Any]:
        """Summary and every single figure."""
        return asdict(self) | {"rows": [asdict(row) for row in self.rows()]}

    def as_markdown(self) -> str:
        """One table for each number of connections, the bound, who is who."""
        rounds = len({turn.round for turn in self.turns})
        lines = [
            f"{self.date}. {self.machine}. {self.texts}; {rounds} alternating rounds of {self.seconds:g} s."
        ]
        rows = self.rows()
        for connections in dict.fromkeys(row.connections for row in rows):
            lines += ["", *_table(connections, [row for row in rows if row.connections == connections])]
        if self.bounds:
            lines += ["", *_bound(self)]
        lines += ["", "| server | configuration | versions | resident |", "|---|---|---|---|"]
        for name, one in self.about.items():
            versions = ", ".join(f"{library} {number}" for library, number in one["versions"].items())
            lines.append(f"| {name} | {one['about']} | {versions} | {one['rss_mb']:.0f} MB |")
        return "\n".join(lines) + "\n"


def _row(server: str, connections: int, turns: Sequence[Turn]) -> Row:
    same = [turn for turn in turns if turn.connections == connections]
    own = [turn for turn in same if turn.server == server]
    ours = {turn.round: turn.load.rate for turn in same if turn.server == OURS}
    ratios = [ours[turn.round] / turn.load.rate for turn in own if turn.round in ours and turn.load.requests]
    requests = max(1, sum(turn.load.requests for turn in own))
    return Row(
        server=server,
        connections=connections,
        rate=statistics.median(turn.load.rate for turn in own),
        p50_ms=statistics.median(turn.load.p50_ms for turn in own),
        p99_ms=statistics.median(turn.load.p99_ms for turn in own),
        server_cpu_ms=1e3 * sum(turn.server_cpu_s for turn in own) / requests,
        generator_cpu_ms=1e3 * sum(turn.load.cpu_s for turn in own) / requests,
        failed=sum(turn.load.not_200 + turn.load.lost for turn in own),
        ratio=statistics.median(ratios) if ratios else None,
    )


def _table(connections: int, rows: Sequence[Row]) -> list[str]:
    plural = "connection" if connections == 1 else "connections"
    head = f"| {connections} {plural} | requests/s | p50 ms | p99 ms | CPU ms a request, server | generator "
    lines = [head + "| Valence/this | not 200 or lost |", "|---" * 8 + "|"]
    for row in rows:
        ratio = "–" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(
            f"| {row.server} | {row.rate:.0f} | {row.p50_ms:.1f} | {row.p99_ms:.1f} "
            f"| {row.server_cpu_ms:.2f} | {row.generator_cpu_ms:.3f} | {ratio} | {row.failed} |"
        )
    return lines


def _bound(report: Report) -> list[str]:
    single = statistics.median(bound.single_rate for bound in report.bounds)
    length = statistics.median(bound.length_rate for bound in report.bounds)
    lone_ms = statistics.median(bound.lone_p50_ms for bound in report.bounds)
    alone = (
        f"The engine alone in the same rounds, all cores: {single:.0f} texts/s one by one, {length:.0f} in"
        f" batches of 8 by length; a lone call takes {lone_ms:.2f} ms (p50)."
    )
    lines = [alone]
    ours = [turn for turn in report.turns if turn.server == OURS]
    for connections in sorted({turn.connections for turn in ours}):
        shares = [
            (
                turn.load.rate / report.bounds[turn.round].single_rate,
                turn.load.rate / report.bounds[turn.round].length_rate,
            )
            for turn in ours
            if turn.connections == connections
        ]
        one, eight = (statistics.median(share[index] for share in shares) for index in (0, 1))
        lines.append(f"Valence over it at {connections}: {one:.2f} of one by one, {eight:.2f} of by length.")
    return lines
