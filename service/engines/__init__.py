"""The engine contract, and the lazy choice of one.

An engine turns token ids into logits, blocking. It does not tokenise, apply softmax, queue or count,
and knows nothing of HTTP or settings. A module of this package is imported only when it is chosen.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from service.core import FloatArray, IntArray, TokenBatch
from service.errors import StartupError
from service.store import Manifest, ModelFile, Version

ENGINES = {
    "onnx": "service.engines.onnx",
    "torchscript": "service.engines.torchscript",
    "openvino": "service.engines.openvino",
}
"""The module of each engine, which has a function `open_engine` like the one below."""
FORMATS = {"onnx": "onnx", "torchscript": "torchscript", "openvino": "onnx"}
"""The format of the files that each engine reads.

"auto" takes the first engine that is named as a format of which the version has a file.
"""
EXTRAS = {
    "onnx": "the extra cpu or gpu",
    "torchscript": "the extra torch",
    "openvino": "the extra openvino",
}
"""What to install for each engine."""

AUTO_PRECISION = {"cpu": "int8", "cuda": "float16"}
"""What "auto" takes on a device when the version has a file of it; float32 else."""

NEEDED_INPUTS = {"input_ids", "attention_mask"}
KNOWN_INPUTS = {*NEEDED_INPUTS, "token_type_ids"}

IntegerArray: TypeAlias = NDArray[np.signedinteger[Any]]
Integers: TypeAlias = type[np.signedinteger[Any]]

E_co = TypeVar("E_co", covariant=True)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the operator asked for.

    Attributes:
        engine: "auto" or the name of an engine.
        precision: "auto" or a precision that the version has.
        device: "auto", "cpu" or "cuda". Asked for by name and not there, the engine refuses to start.
        lanes: how many threads will call `run` at the same time.
        threads_per_lane: intra-op threads that each call may use.
        lone_threads: threads for one long text that has the engine to itself; onnx on a CPU only.
    """

    engine: str = "auto"
    precision: str = "auto"
    device: str = "auto"
    lanes: int = 1
    threads_per_lane: int = 1
    lone_threads: int = 1


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What an engine must know of a model beside its file: see `Manifest`."""

    labels: int
    max_tokens: int
    pad_id: int


class Engine(Protocol):
    """A loaded model. `run` may be called from several threads at once.

    Attributes:
        name: the engine, e.g. "onnx".
        precision: e.g. "int8" or "float32".
        device: "cpu" or "cuda".
        labels: width of the logits.
        max_tokens: the longest text it reads, special tokens included.
    """

    @property
    def name(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def labels(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...

    def run(self, batch: TokenBatch) -> FloatArray:
        """Logits float32[n, labels] of a batch, in its order."""
        ...

    def close(self) -> None:
        """Free what the engine holds. Safe to call twice."""
        ...


def pad(batch: TokenBatch, pad_id: int, length: int | None = None) -> tuple[IntArray, IntArray]:
    """The right-padded rectangle of a batch.

    Args:
        length: of the rows, at least the longest text's; that one when None.

    Returns:
        ids int64[n, length], filled with `pad_id`, and mask int64[n, length], 1 where a token is real.
    """
    real = np.arange(length or int(batch.lengths.max()))[None, :] < batch.lengths[:, None]
    ids = np.full(real.shape, pad_id, dtype=np.int64)
    ids[real] = batch.ids
    return ids, real.astype(np.int64)


def check_inputs(declared: Mapping[str, Integers | None]) -> dict[str, Integers]:
    """The inputs of an ONNX graph, each with its integers, when the service can give them all.

    Args:
        declared: what the graph says; None for what is no integer that the service gives.

    Raises:
        StartupError: an input that the service does not know, lacks, or cannot give in that type.
    """
    if unknown := set(declared) - KNOWN_INPUTS:
        raise StartupError(
            f"the graph wants inputs that the service does not give: {', '.join(sorted(unknown))}"
        )
    if missing := NEEDED_INPUTS - set(declared):
        raise StartupError(f"the graph does not take {', '.join(sorted(missing))}")
    kinds = {name: kind for name, kind in declared.items() if kind is not None}
    if odd := set(declared) - set(kinds):
        raise StartupError(f"the inputs of the graph are not integers: {', '.join(sorted(odd))}")
    return kinds


def feed(
    batch: TokenBatch, pad_id: int, *, inputs: Mapping[str, Integers], length: int | None = None
) -> dict[str, IntegerArray]:
    """The padded inputs that an ONNX graph declares, each in the integers that it wants."""
    ids, mask = pad(batch, pad_id, length)
    by_name = {"input_ids": ids, "attention_mask": mask}
    return {
        name: by_name[name].astype(kind, copy=False) if name in by_name else np.zeros(ids.shape, dtype=kind)
        for name, kind in inputs.items()
    }


def open_engine(version: Version, options: EngineOptions) -> Engine:
    """Load a verified version with the engine asked for; "auto" is the first that has a file to read.

    Raises:
        StartupError: no such engine, precision or device, or the file does not hold such a model.
    """
    name = _first_engine(version.manifest) if options.engine == "auto" else options.engine
    if name not in ENGINES:
        raise StartupError(f"there is no engine {name}; there are {', '.join(ENGINES)}")
    try:
        opener: Callable[[Version, EngineOptions], Engine] = import_module(ENGINES[name]).open_engine
        return opener(version, options)
    except ModuleNotFoundError as error:
        raise StartupError(f"engine {name} needs {error.name}: install {EXTRAS[name]}") from error


def _first_engine(manifest: Manifest) -> str:
    formats = [model.format for model in manifest.models]
    for name in ENGINES:
        if name == FORMATS[name] and name in formats:
            return name
    raise StartupError(
        f"{manifest.name} {manifest.version} has files for {', '.join(formats)}; "
        f"the engines read {', '.join(sorted(set(FORMATS.values())))}"
    )


class Maker(Protocol[E_co]):
    """What makes an engine from the bytes of its file, and raises StartupError with the reason."""

    def __call__(
        self, content: bytes, /, *, shape: ModelShape, precision: str, options: EngineOptions
    ) -> E_co: ...


def open_file(
    version: Version, options: EngineOptions, *, format_name: str, cuda_is_there: bool, make: Maker[E_co]
) -> E_co:
    """An engine on the file of a format that fits the options. Device "auto" is cuda if it works, else cpu.

    What is loaded is the bytes whose hash was just taken, never a path: a model file is a program.

    Raises:
        StartupError: with the file and the reason.
    """
    if options.device == "auto" and cuda_is_there:
        try:
            return _open_on(version, replace(options, device="cuda"), format_name, make)
        except StartupError as error:
            logger.warning("cuda is not used: %s", error)
    on_cpu = replace(options, device="cpu") if options.device == "auto" else options
    return _open_on(version, on_cpu, format_name, make)


def _open_on(version: Version, options: EngineOptions, format_name: str, make: Maker[E_co]) -> E_co:
    manifest = version.manifest
    file = choose_model(manifest, format_name, precision=options.precision, device=options.device)
    shape = ModelShape(len(manifest.labels), manifest.max_tokens, manifest.pad_id)
    try:
        return make(version.read(file), shape=shape, precision=file.precision, options=options)
    except StartupError as error:
        raise StartupError(f"{version.path / file.path}: {error}") from error


def choose_model(manifest: Manifest, format_name: str, *, precision: str, device: str) -> ModelFile:
    """The file of a format to serve: in the precision asked for; "auto" goes by the device.

    Raises:
        StartupError: the version has no such file; the message says which it has.
    """
    files: dict[str, ModelFile] = {
        model.precision: model for model in manifest.models if model.format == format_name
    }
    wanted = [precision] if precision != "auto" else [AUTO_PRECISION[device], "float32"]
    for name in wanted:
        if name in files:
            return files[name]
    has = ", ".join(files) or "none"
    asked = " or ".join(wanted)
    raise StartupError(
        f"{manifest.name} {manifest.version} has no {format_name} file in {asked}; it has {has}"
    )
