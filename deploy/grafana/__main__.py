"""Writes the dashboards and their page; with --check says whether they are as the code would write them."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.grafana.boards import as_json
from deploy.grafana.model_board import MODEL
from deploy.grafana.page import page
from deploy.grafana.service_board import SERVICE

FOLDER = Path(__file__).parent / "dashboards"
PAGE = Path(__file__).parents[2] / "docs/dashboards.md"
BOARDS = (("service", SERVICE), ("model", MODEL))


def contents() -> dict[Path, str]:
    """Each file, and what belongs in it."""
    return {FOLDER / f"{name}.json": as_json(board) for name, board in BOARDS} | {PAGE: page(BOARDS)}


def main(arguments: Sequence[str]) -> int:
    """The command; exit code 1: a file differs."""
    parser = argparse.ArgumentParser(prog="python -m deploy.grafana", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    chosen = parser.parse_args(arguments)
    stale = [
        path
        for path, text in contents().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if chosen.check:
        sys.stdout.writelines(f"{path} differs: run python -m deploy.grafana\n" for path in stale)
        return 1 if stale else 0
    for path in stale:
        path.write_text(contents()[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
