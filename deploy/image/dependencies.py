"""Prints what the image installs beside the service, as a requirements file: dependencies come before source.

pip has no way to install only what a project depends on. Knows nothing of images; needs the standard
library alone.
"""

import argparse
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path


def requirements(project: Path, extras: Sequence[str]) -> list[str]:
    """The dependencies of a pyproject.toml and of some of its extras, as they are written there.

    Raises:
        ValueError: an extra is not there; the message says which are.
    """
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    offered: dict[str, list[str]] = table["optional-dependencies"]
    if unknown := sorted(set(extras) - set(offered)):
        raise ValueError(f"no extra is called {', '.join(unknown)}; there are {', '.join(sorted(offered))}")
    return [*table["dependencies"], *(line for extra in extras for line in offered[extra])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print them, one a line. Exit code 2: an extra is not there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project", type=Path, default=Path("pyproject.toml"))
    parser.add_argument("--extras", default="cpu", help="separated by commas")
    parser.add_argument("--also", default="", help="further requirements, separated by spaces")
    asked = parser.parse_args(arguments)
    try:
        lines = requirements(asked.project, [name for name in asked.extras.split(",") if name])
    except ValueError as error:
        print(f"dependencies: {error}", file=sys.stderr)
        return 2
    print("\n".join([*lines, *asked.also.split()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
