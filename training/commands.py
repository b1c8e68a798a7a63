"""What somebody else types to make a version again and to get each of its figures.

Knows nothing of models or figures.
"""

import argparse
import os
import shlex
from pathlib import Path

from service.store import Manifest, ModelFile, form
from training.data import Example
from training.gate import Commands


def commands_of(options: argparse.Namespace, sets: dict[str, list[Example]], draft: Manifest) -> Commands:
    """The commands as another machine can type them: paths are shown from the current folder or by name."""
    data = [_shown(path) for path in options.data]
    dev = [_shown(path) for path in options.calibrate_on]
    version = f"{_shown(options.store)}/{draft.name}/{draft.version}"
    export = ["valence-train", "export", _shown(options.source), "--name", draft.name]
    export += ["--version", str(draft.version), "--formats", options.formats]
    files = [*(["--data", *data] if data else []), *(["--calibrate-on", *dev] if dev else [])]
    measure = f"valence-train evaluate {version} --data {' '.join(data)}"
    return Commands(
        export=" ".join([*map(shlex.quote, export), *files]),
        evaluate={
            (name, form(m)): f"{measure}{_chosen(m)} --precision {m.precision}"
            for name in sets
            for m in draft.models
        },
    )


def _chosen(model: ModelFile) -> str:
    """The option that names the engine, where "auto" may take another."""
    return "" if model.format == "onnx" else f" --engine {model.format}"


def _shown(path: Path) -> str:
    """A path that says something elsewhere: under $VALENCE_DATA, or relative as it is, or its last name."""
    root = os.environ.get("VALENCE_DATA")
    if root and path.resolve().is_relative_to(Path(root).resolve()):
        return f"$VALENCE_DATA/{path.resolve().relative_to(Path(root).resolve()).as_posix()}"
    return path.name if path.is_absolute() else path.as_posix()
