"""The command `valence-train card`: writes the model card of a version anew, with notes.

They hold what was measured after the version was made. Knows nothing of how.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from service.errors import StartupError
from service.store import open_version, write_card
from training.card import card_of
from training.config import ConfigError
from training.data import DataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("version", type=Path, help="folder of the version, <store>/<name>/<number>")
    parser.add_argument("notes", nargs="*", type=Path, help="Markdown files with more for the card")


def main(options: argparse.Namespace) -> int:
    """Writes the card and returns 0. Raises ConfigError or DataError, and changes nothing."""
    folder: Path = options.version.resolve()
    if not folder.name.isdecimal():
        raise ConfigError(f"{options.version}: not the folder of a version, <store>/<name>/<number>")
    notes = read_notes(options.notes)
    try:
        version = open_version(folder.parent.parent, folder.parent.name, int(folder.name))
        sizes = {model.path: model.bytes for model in version.manifest.models}
        write_card(version, card_of(version.manifest, sizes, notes).encode())
    except (StartupError, OSError) as error:
        raise ConfigError(str(error)) from error
    print(f"{options.version / 'README.md'} is written")
    return 0


def read_notes(paths: Iterable[Path]) -> list[str]:
    """The text of each file. Raises DataError."""
    notes = []
    for path in paths:
        try:
            notes.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from error
    return notes
