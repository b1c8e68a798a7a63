"""The engine contract, and the lazy choice of one.

An engine turns token ids into logits, blocking. It does not tokenise, apply softmax, queue or count,
and knows nothing of HTTP or settings. A module of this package is imported only when it is chosen.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Protocol, TypeVar

import numpy as np

from service.core import FloatArray, IntArray, TokenBatch
from service.errors import StartupError
from service.store import Manifest, ModelFile, Version

ENGINES = {"onnx": "service.engines.onnx", "torchscript": "service.engines.torchscript"}
"""The module of each engine, which has a function `open_engine` like the one below.

The name is that of the format which it reads. "auto" takes the first for which the version has a file.
"""
EXTRAS = {"onnx": "valence[cpu] or valence[gpu]", "torchscript": "valence[torch]"}
"""What to install for each engine."""

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
    """

    engine: str = "auto"
    precision: str = "auto"
    device: str = "auto"
    lanes: int = 1
    threads_per_lane: int = 1


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


def pad(batch: TokenBatch, pad_id: int) -> tuple[IntArray, IntArray]:
    """The right-padded rectangle of a batch.

    Returns:
        ids int64[n, longest], filled with `pad_id`, and mask int64[n, longest], 1 where a token is real.
    """
    longest = int(batch.lengths.max())
    real = np.arange(longest)[None, :] < batch.lengths[:, None]
    ids = np.full(real.shape, pad_id, dtype=np.int64)
    ids[real] = batch.ids
    return ids, real.astype(np.int64)


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
    except ModuleNotFoundError as error:
        raise StartupError(f"engine {name} needs {error.name}: install {EXTRAS[name]}") from error
    return opener(version, options)


def _first_engine(manifest: Manifest) -> str:
    formats = [model.format for model in manifest.models]
    for name in ENGINES:
        if name in formats:
            return name
    raise StartupError(
        f"{manifest.name} {manifest.version} has files for {', '.join(formats)}; "
        f"there are the engines {', '.join(ENGINES)}"
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
    """The file of a format to serve: in the precision asked for; "auto" is int8 on a CPU, else float32.

    Raises:
        StartupError: the version has no such file; the message says which it has.
    """
    files: dict[str, ModelFile] = {
        model.precision: model for model in manifest.models if model.format == format_name
    }
    wanted = [precision] if precision != "auto" else ["int8", "float32"] if device == "cpu" else ["float32"]
    for name in wanted:
        if name in files:
            return files[name]
    has = ", ".join(files) or "none"
    asked = " or ".join(wanted)
    raise StartupError(
        f"{manifest.name} {manifest.version} has no {format_name} file in {asked}; it has {has}"
    )
