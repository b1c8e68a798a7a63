"""Who is compared: for each server its command, its environment, where a text is posted and how it answers.

Knows nothing of how they are started or measured.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from load_tests.compare.apps.onnx_model import VARIABLE, Options
from load_tests.compare.environments import python_of

ROOT = Path(__file__).parent.parent.parent
APPS = "load_tests.compare.apps"
SERVED = "sentiment"  # the name under which infinity serves the checkpoint


@dataclass(frozen=True, slots=True)
class Place:
    """What the servers share: the version, its checkpoint for transformers, the environments, the cores."""

    version: Path
    checkpoint: Path
    cache: Path
    cores: int


@dataclass(frozen=True, slots=True)
class Contestant:
    """One server in one configuration.

    Attributes:
        name: in `--only` and in the tables.
        environment: name of its virtual environment; one without pins is the current one.
        about: its configuration in a few words.
        path: where a text is posted.
        arguments: after the interpreter, for a place and a port.
        variables: further environment variables.
        body: of a text.
        label: of an answer.
        needs_checkpoint: whether it loads the weights rather than the ONNX file.
    """

    name: str
    environment: str
    about: str
    path: str
    arguments: Callable[[Place, int], list[str]]
    variables: Callable[[Place, int], dict[str, str]]
    body: Callable[[str], object]
    label: Callable[[Any], str]
    needs_checkpoint: bool = False

    def command(self, place: Place, port: int) -> list[str]:
        """What is started."""
        return [str(python_of(self.environment, place.cache)), *self.arguments(place, port)]

    def surroundings(self, place: Place, port: int, temporary: Path) -> Mapping[str, str]:
        """All of it: ours without Valence's settings, its own, and a folder for what it leaves."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith("VALENCE_")}
        # No telemetry and no look at a model hub: all that is served is on the disk.
        quiet = {"ORT_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
        common = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "TMPDIR": str(temporary)}
        return ours | quiet | common | self.variables(place, port)


def _valence() -> Contestant:
    return Contestant(
        name="valence",
        environment="current",
        about="defaults",
        path="/predict",
        arguments=lambda _place, _port: ["-m", "service", "serve"],
        variables=lambda place, port: {
            "VALENCE_PORT": str(port),
            "VALENCE_MODEL_STORE": str(place.version.parent.parent),
            "VALENCE_MODEL": place.version.parent.name,
            "VALENCE_VERSION": place.version.name,
        },
        body=lambda text: {"inputs": text},
        label=lambda answer: str(answer["predictions"][0]["label"]),
    )


def _with_onnx(server: str, kind: str, about: str, options: Callable[[Place], Options]) -> Contestant:
    """mosec or LitServe with the int8 file."""

    def variables(place: Place, port: int) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(options(place))), "COMPARE_PORT": str(port)}

    def arguments(_place: Place, port: int) -> list[str]:
        module = ["-m", f"{APPS}.{server}_app"]
        return [*module, "--address", "127.0.0.1", "--port", str(port)] if server == "mosec" else module

    return Contestant(
        name=f"{server}-{kind}",
        environment=server,
        about=about,
        path="/inference" if server == "mosec" else "/predict",
        arguments=arguments,
        variables=variables,
        body=lambda text: {"text": text},
        label=lambda answer: str(answer["label"]),
    )


def _as_documented(place: Place) -> Options:
    return Options(str(place.version), workers=1, threads=place.cores, batch=16, wait_ms=5, tuned=False)


def _one_a_call(place: Place) -> Options:
    return Options(str(place.version), workers=place.cores, threads=1, batch=1, wait_ms=0, tuned=True)


def _sorted(place: Place) -> Options:
    return Options(
        str(place.version), workers=place.cores, threads=1, batch=32, wait_ms=1, tuned=True, group=4
    )


def _infinity() -> Contestant:
    return Contestant(
        name="infinity",
        environment="infinity",
        about="torch engine, float32, its own dynamic batching of 32 by length",
        path="/classify",
        arguments=lambda place, port: [
            *(
                str(place.cache / "infinity" / "bin" / "infinity_emb"),
                "v2",
                "--model-id",
                str(place.checkpoint),
            ),
            *("--served-model-name", SERVED, "--engine", "torch", "--device", "cpu", "--dtype", "float32"),
            *("--no-bettertransformer", "--host", "127.0.0.1", "--port", str(port)),
        ],
        variables=lambda _place, _port: {"INFINITY_ANONYMOUS_USAGE_STATS": "0"},
        body=lambda text: {"model": SERVED, "input": [text]},
        label=lambda answer: str(max(answer["data"][0], key=lambda one: one["score"])["label"]),
        needs_checkpoint=True,
    )


def _pipeline() -> Contestant:
    return Contestant(
        name="pipeline",
        environment="pipeline",
        about="FastAPI, transformers pipeline, float32, sync endpoint",
        path="/predict",
        arguments=lambda _place, port: [
            *("-m", "uvicorn", "--factory", f"{APPS}.pipeline_app:create_app"),
            *("--host", "127.0.0.1", "--port", str(port)),
        ],
        variables=lambda place, _port: {"COMPARE_CHECKPOINT": str(place.checkpoint)},
        body=lambda text: {"text": text},
        label=lambda answer: str(answer["label"]),
        needs_checkpoint=True,
    )


def all_contestants() -> list[Contestant]:
    """In the order of the tables."""
    documented = "int8 file, one worker on all cores, padded batches of 16 / 5 ms, default session"
    single = "int8 file, a worker of one thread a core, one text a call, slow fusions and spinning off"
    grouped = "int8 file, a worker of one thread a core, batches of 32 / 1 ms sorted and run in fours"
    return [
        _valence(),
        _with_onnx("mosec", "docs", documented, _as_documented),
        _with_onnx("mosec", "tuned", single, _one_a_call),
        _with_onnx("mosec", "sorted", grouped, _sorted),
        _with_onnx("litserve", "docs", documented, _as_documented),
        _with_onnx("litserve", "tuned", single, _one_a_call),
        _with_onnx("litserve", "sorted", grouped, _sorted),
        _infinity(),
        _pipeline(),
    ]
