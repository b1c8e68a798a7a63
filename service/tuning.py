"""What `valence tune` found out: the record of it, where it is kept, and when it may be used.

Knows nothing of how it was measured, of engines or of HTTP. Why it is as it is: docs/adr/0012.
"""

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from service.errors import StartupError
from service.logs import log_event
from service.machine import Machine
from service.manifest import STRICT
from service.settings import TUNING_OFF, Settings
from service.store import Manifest, Version

MOST_BYTES = 1_000_000

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run a version."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    engine: Literal["onnx", "torchscript", "openvino"]
    precision: Literal["float32", "float16", "bfloat16", "int8"]
    device: Literal["cpu", "cuda"]
    lanes: Annotated[int, Field(ge=1, le=256)]
    threads_per_lane: Annotated[int, Field(ge=1, le=256)]
    max_batch_tokens: Annotated[int, Field(ge=1)]

    @classmethod
    def of(cls, **fields: str | int) -> Self:
        """A choice of words that are not known to be those of one. StartupError: they are not."""
        try:
            return TypeAdapter(cls).validate_json(json.dumps(fields))  # in strict Python only a Choice is one
        except ValidationError as error:
            raise StartupError(f"no setting asks for {fields}") from error


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of one way to run: medians over rounds.

    Attributes:
        part: the comparison that it stands in; only rows of one part were measured in turns.
        lone_p50_s: of a lone short text.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    part: Literal["forms", "lanes", "batches"]
    choice: Choice
    texts_per_s: float
    lone_p50_s: float
    cpu_s_per_text: float
    rounds: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A form (`engine/precision`) that was not measured, and why."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    form: str
    reason: str


@dataclass(frozen=True, slots=True)
class Record:
    """A tuning.

    Attributes:
        created: UTC, ISO 8601.
        files: the SHA-256 of each model file of the version.
        given: the settings that were not varied, since they were given.
        seconds: how long it took.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    schema_version: Literal[1]
    created: str
    model: str
    version: int
    files: dict[str, str]
    machine: Machine
    given: list[str]
    seconds: float
    choice: Choice
    table: list[Row]
    left_out: list[LeftOut]


def record_path(settings: Settings, version: Version) -> Path | None:
    """Where the record of a version is: the setting, else beside the folder of the version; None when off.

    Not inside it: a version is never changed.
    """
    if settings.tuning == TUNING_OFF:
        return None
    if settings.tuning is not None:
        return Path(settings.tuning)
    return version.path.with_name(f"{version.path.name}.tuning.json")


def files_of(manifest: Manifest) -> dict[str, str]:
    """The hashes by which a record knows its version."""
    return {file.path: file.sha256 for file in manifest.models}


def given(settings: Settings) -> list[str]:
    """Which of the settings that a tuning decides have a value that it must not change."""
    fixed = {
        "engine": settings.engine != "auto",
        "precision": settings.precision != "auto",
        "device": settings.device != "auto",
        "lanes": settings.lanes is not None,
        "threads_per_lane": settings.threads_per_lane is not None,
        "max_batch_tokens": "max_batch_tokens" in settings.model_fields_set,
    }
    return [name for name, is_fixed in fixed.items() if is_fixed]


def find(settings: Settings, version: Version, machine: Machine) -> Record | None:
    """The record of this version and machine, if there is one that may be used.

    One that is there and may not is ignored, with one warning that says why. One that nobody has named and
    that is not there needs no word.
    """
    path = record_path(settings, version)
    if path is None or (settings.tuning is None and not path.exists()):
        return None
    record = None
    try:
        record = _read(path)
        problem = _foreign(record, settings, version, machine)
    except StartupError as error:
        problem = str(error)
    if problem is not None:
        log_event(logger, logging.WARNING, "tuning ignored", path=str(path), reason=problem)
        return None
    return record


def apply(settings: Settings, choice: Choice) -> tuple[Settings, tuple[str, ...]]:
    """The settings with the choice in the place of what is open, and the names of what was taken from it.

    What is given is kept. What was measured with something else than what is given is not taken: lanes and
    batches belong to an engine and its precision, batches also to the lanes.
    """
    fixed = set(given(settings))
    taken: dict[str, object] = {}
    for group in (("device", "engine", "precision"), ("lanes", "threads_per_lane"), ("max_batch_tokens",)):
        if any(getattr(settings, name) != getattr(choice, name) for name in fixed.intersection(group)):
            break
        # "auto" finds the device that is there.
        taken |= {name: getattr(choice, name) for name in group if name not in fixed | {"device"}}
    return settings.model_copy(update=taken), tuple(taken)


def table(record: Record) -> str:
    """For a person: a line for each row, then what was left out, then the choice."""
    head = f"{'part':8} {'engine':12} {'precision':10} {'lanes':>7} {'batch':>6}"
    lines = [f"{head} {'texts/s':>9} {'lone ms':>8} {'CPU ms/text':>12}"]
    for row in record.table:
        how = row.choice
        lines.append(
            f"{row.part:8} {how.engine:12} {how.precision:10} {f'{how.lanes}x{how.threads_per_lane}':>7} "
            f"{how.max_batch_tokens:6} {row.texts_per_s:9.1f} {row.lone_p50_s * 1e3:8.2f} "
            f"{row.cpu_s_per_text * 1e3:12.2f}"
        )
    lines += [f"left out: {one.form}: {one.reason}" for one in record.left_out]
    how = record.choice
    lines.append(
        f"chosen: {how.engine} {how.precision} on {how.device}, {how.lanes} lanes of "
        f"{how.threads_per_lane} threads, batches of up to {how.max_batch_tokens} tokens"
    )
    return "\n".join(lines)


def check_writable(path: Path) -> None:
    """Raises StartupError when no record can be written there: better before the measuring than after it."""
    _replace(path, None)


def write(path: Path, record: Record) -> None:
    """Keep a record, in one step. Raises StartupError with the reason."""
    _replace(path, _ADAPTER.dump_json(record, indent=2) + b"\n")


def _replace(path: Path, content: bytes | None) -> None:
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content or b"")
            if content is not None:
                Path(name).chmod(0o644)
                Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise StartupError(
            f"{path}: the tuning cannot be kept there ({error.strerror}); "
            "set VALENCE_TUNING to a file in a folder that can be written"
        ) from error


def _read(path: Path) -> Record:
    try:
        if not path.is_file():  # anything else might never end
            raise StartupError("it is not there, or is no regular file")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise StartupError(f"it cannot be read: {error.strerror}") from error
    if len(content) > MOST_BYTES:
        raise StartupError(f"it is larger than {MOST_BYTES} bytes")
    try:
        return _ADAPTER.validate_json(content)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise StartupError(f"it is no record of a tuning: {place} {first['msg']}".strip()) from error


def _foreign(record: Record, settings: Settings, version: Version, machine: Machine) -> str | None:
    """Why a record says nothing of this version on this machine, or None."""
    manifest, there = version.manifest, record.machine
    now_open = sorted(set(record.given) - set(given(settings)))
    faults = {
        f"it was made for {record.model} {record.version}": (record.model, record.version)
        != (manifest.name, manifest.version),
        "it was made for other files of the version": record.files != files_of(manifest),
        f"it was made for a fixed {', '.join(now_open)}, which is open now": bool(now_open),
        f"it was made with {there.cpu_quota_cores:g} cores, and here are {machine.cpu_quota_cores:g}": (
            there.cpu_quota_cores != machine.cpu_quota_cores
        ),
        f"it was made on another kind of machine: {there.processor}": (there.processor, there.instructions)
        != (machine.processor, machine.instructions),
        f"it was made with {_listed(there.packages)}, and here is {_listed(machine.packages)}": (
            there.packages != machine.packages
        ),
    }
    return next((fault for fault, present in faults.items() if present), None)


def _listed(packages: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in packages.items()) or "no engine"


_ADAPTER: TypeAdapter[Record] = TypeAdapter(Record)
