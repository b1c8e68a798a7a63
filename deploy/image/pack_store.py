"""Writes a model store that holds one version in only some of its precisions, for an image.

A version is verified whole before and after, and keeps its name, number, golden texts and recorded metrics;
the manifest of the copy names only the files that are there. Knows nothing of engines or of how a version was
made.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from service.errors import StartupError
from service.manifest import README, ModelFile
from service.store import open_version, write_version

ALL = "all"


def pack(source: Path, target: Path, *, model: str, version: int | None, precisions: Sequence[str]) -> Path:
    """Copy a version into another store, without the model files of other precisions.

    Args:
        version: None for the highest number.
        precisions: those to keep, or "all" alone.

    Returns:
        The folder of the copy.

    Raises:
        StartupError: the version is not there or is damaged, or has no file in one of the precisions.
        FileExistsError: the target has that version.
    """
    whole = open_version(source, model, version)
    has = {file.precision for file in whole.manifest.models}
    wanted = has if list(precisions) == [ALL] else set(precisions)
    if missing := sorted(wanted - has):
        raise StartupError(
            f"{whole.path}: no file in {', '.join(missing)}; there are {', '.join(sorted(has))}"
        )
    kept: list[ModelFile] = [file for file in whole.manifest.models if file.precision in wanted]
    names = [README, whole.manifest.tokenizer.path, *(file.path for file in kept)]
    write_version(target, replace(whole.manifest, models=kept), {name: whole.path / name for name in names})
    return open_version(target, model, whole.manifest.version).path


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack one version and print its folder. Exit code 1: it could not be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="the model store")
    parser.add_argument("target", type=Path, help="the store to write")
    parser.add_argument("--model", default="sentiment")
    parser.add_argument("--version", default="", help="a number; empty: the highest")
    parser.add_argument("--precisions", default="int8", help="separated by commas, or 'all'")
    asked = parser.parse_args(arguments)
    try:
        folder = pack(
            asked.source,
            asked.target,
            model=asked.model,
            version=int(asked.version) if asked.version else None,
            precisions=asked.precisions.split(","),
        )
    except (StartupError, FileExistsError, ValueError) as error:
        print(f"pack_store: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
