"""What a model version says of itself: the manifest, how it is read, and what makes one senseless.

Knows nothing of folders, of the files that it names, of engines or of HTTP.
"""

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

STRICT = ConfigDict(extra="forbid", strict=True)
SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
README = "README.md"
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_UNNAMED_LABEL = re.compile(r"LABEL_[0-9]+")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of the version: its name in the folder, its size and its SHA-256 in hex."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One form of the model.

    Attributes:
        format: which engine reads it.
        precision: what it computes in.
        logit_bound: the stated |Δlogit| against the eager reference, which the parity gate held (float32),
            or the bound on the golden texts at load for a format that is not exact.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    path: str
    format: Literal["onnx", "torchscript", "openvino"]
    precision: Literal["float32", "float16", "bfloat16", "int8"]
    bytes: int
    sha256: str
    logit_bound: float


@dataclass(frozen=True, slots=True)
class GoldenText:
    """A text of our own, with the logits that each form of the model gave when the version was made.

    `logits` maps "<format>/<precision>" (e.g. "onnx/int8") to one logit a label; "reference" is the eager
    model.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    text: str
    logits: dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Source:
    """Where something came from: the base model, or a training set. `rows` are those really used."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    licence: str
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Metric:
    """A measured figure, the form of the model that it belongs to, and the command that gave it."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    dataset: str
    precision: str
    value: float
    examples: int
    command: str
    format: Literal["onnx", "torchscript", "openvino"] = "onnx"


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a version says of itself.

    Attributes:
        labels: names in index order, as trained.
        activation: "softmax", or "sigmoid" for one label or a multi-label head.
        max_tokens: the longest text the model reads, special tokens included.
        pad_id: what fills a rectangle.
        temperature: logits are divided by it before the activation.
        architecture: the transformers configuration of the eager model, from which training rebuilds it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    schema_version: Literal[1]
    name: str
    version: int
    created: str
    labels: list[str]
    activation: Literal["softmax", "sigmoid"]
    max_tokens: int
    padding_side: Literal["right"]
    pad_id: int
    base_model: Source
    training_data: list[Source]
    metrics: list[Metric]
    temperature: float
    golden_texts: list[GoldenText]
    tokenizer: FileRecord
    models: list[ModelFile]
    architecture: dict[str, Any] = field(default_factory=dict)


class ManifestError(ValueError):
    """The manifest cannot be read, is of an unknown schema, or makes no sense; the message says why."""


def form(model: ModelFile) -> str:
    """The key of a model file in the logits of a golden text, e.g. "onnx/int8"."""
    return f"{model.format}/{model.precision}"


def parse(raw: bytes) -> Manifest:
    """The manifest of a JSON text. Raises ManifestError, also for a field that is not known."""
    try:
        schema = json.loads(raw).get("schema_version")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ManifestError(f"not a JSON object: {error}") from error
    if schema != SCHEMA_VERSION:
        raise ManifestError(f"schema version {schema!r} is not known; this release reads {SCHEMA_VERSION}")
    try:
        manifest = _ADAPTER.validate_json(raw)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_input=False))
        raise ManifestError("; ".join(faults)) from error
    check(manifest)
    return manifest


def dump(manifest: Manifest) -> bytes:
    """The JSON text that `parse` reads."""
    return _ADAPTER.dump_json(manifest, indent=2) + b"\n"


def check(manifest: Manifest) -> None:
    """Raises ManifestError for a manifest that is well formed and makes no sense."""
    for faults in (
        _faults_of_the_head(manifest),
        _faults_of_the_files(manifest),
        _faults_of_golden(manifest),
    ):
        for fault, present in faults.items():
            if present:
                raise ManifestError(fault)


def _faults_of_the_head(manifest: Manifest) -> dict[str, bool]:
    labels = manifest.labels
    return {
        "name is not one of a model": not MODEL_NAME.fullmatch(manifest.name),
        "version is not 1 or more": manifest.version < 1,
        "there is no label": not labels,
        "a label has no name": not all(label.strip() for label in labels),
        "two labels have the same name": len(set(labels)) < len(labels),
        "labels like LABEL_0 are numbers, not names": any(map(_UNNAMED_LABEL.fullmatch, labels)),
        "softmax of one label is always 1: use sigmoid": len(labels) == 1
        and manifest.activation == "softmax",
        "max_tokens leaves no room for a text between two special tokens": manifest.max_tokens < 3,
        "pad_id is negative": manifest.pad_id < 0,
        # Beyond these a division by it overflows, or leaves nothing of the logits.
        "temperature is not between 0.001 and 1000": not 1e-3 <= manifest.temperature <= 1e3,
    }


def _faults_of_the_files(manifest: Manifest) -> dict[str, bool]:
    models = manifest.models
    paths = [manifest.tokenizer.path, *(model.path for model in models)]
    faults = {
        f"{path!r} is not the name of a file in the folder": not _FILE_NAME.fullmatch(path)
        or path in (MANIFEST, README)
        for path in paths
    }
    return faults | {
        "there is no model file": not models,
        "two files have the same path": len(set(paths)) < len(paths),
        "two model files have the same format and precision": len(set(map(form, models))) < len(models),
        "a logit_bound is not a positive number": not all(
            0 < model.logit_bound < math.inf for model in models
        ),
    }


def _faults_of_golden(manifest: Manifest) -> dict[str, bool]:
    labels, golden_texts = len(manifest.labels), manifest.golden_texts
    needed = set(map(form, manifest.models))
    rows = [row for golden in golden_texts for row in golden.logits.values()]
    return {
        "there is no golden text": not golden_texts,
        "a golden text lacks the logits of a model file": not all(
            needed <= set(g.logits) for g in golden_texts
        ),
        f"the logits of a golden text are not {labels} finite numbers, one a label": not all(
            len(row) == labels and all(map(math.isfinite, row)) for row in rows
        ),
    }


_ADAPTER = TypeAdapter(Manifest)
