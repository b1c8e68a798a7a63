"""What one load test has found, printed and kept in a form that others can read. Knows nothing of load."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from load_tests import goals, texts
from load_tests.verdict import EXIT_MET, EXIT_MISSED, machine


@dataclass(slots=True)
class Record:
    """The findings of one load test.

    Attributes:
        title: what was measured.
        about: machine, versions and texts; taken when the record is made, so make it before the load.
        lines: Markdown.
        goals: the figure of each goal, by its name in `load_tests.goals`.
        figures: everything, for a program.
    """

    title: str
    about: str = field(default_factory=lambda: f"{machine()}; texts: {texts.source()}")
    lines: list[str] = field(default_factory=list)
    goals: dict[str, float] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Append a table, with an empty line before it."""
        lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
        self.lines += ["", lines[0], "|---" * len(head) + "|", *lines[1:]]

    def say(self, line: str) -> None:
        """Append a paragraph."""
        self.lines += ["", line]

    def as_markdown(self) -> str:
        """Title, machine, lines, goals."""
        verdict = ["", *goals.table(self.goals, self.goals)] if self.goals else []
        return "\n".join([f"## {self.title}", "", self.about, *self.lines, *verdict]) + "\n"

    def finish(self, json_file: Path | None) -> int:
        """Print it, keep it in a file, and give the exit code: 1 when a goal is missed."""
        print(self.as_markdown(), flush=True)
        if json_file is not None:
            json_file.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return EXIT_MISSED if goals.missed(self.goals) else EXIT_MET


def read(file: Path) -> Record:
    """A record that `finish` has kept."""
    kept: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return Record(**kept)


def parser(doc: str | None, *, seconds: float, rounds: int | None = None) -> argparse.ArgumentParser:
    """The options that these load tests share; `--rounds` where there are any."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--seconds", type=float, default=seconds, help="of each measurement")
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds, help="how often each has its turn")
    made.add_argument("--json", type=Path, help="keep the figures in this file, too")
    return made
