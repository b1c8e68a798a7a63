"""Runs an ONNX classifier with onnxruntime, on a CPU or with CUDA.

One session serves all lanes, so that the weights are in memory once; a second one for lone long texts is
made when it is asked for (`service.engines.lone`). With CUDA it runs on buffers of few shapes that stay on
the device (`service.engines.binding`).
Knows nothing of texts, queues, settings or HTTP.
"""

import contextlib
import io
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from service.core import FloatArray, TokenBatch
from service.engines import EngineOptions, Integers, ModelShape, check_inputs, feed, open_file
from service.engines.binding import BoundSession
from service.engines.lone import LoneLong
from service.errors import EngineFailed, StartupError
from service.store import Version

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
INTEGERS: dict[str, Integers] = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}

# onnxruntime's CPU kernels for these fused nodes are slower than the plain nodes they replace. Measured, one
# thread: SkipLayerNormalization of [200, 384] 474 µs against 100, BiasGelu of [200, 1536] 395 against 302.
SLOW_FUSIONS = ["SkipLayerNormFusion", "BiasGeluFusion"]
CUDA_OPTIONS = {
    # By default products of float32 are rounded to 10 bits of fraction: not the float32 of the golden texts.
    "use_tf32": "0",
    # The default doubles what it takes, and with the shapes of `buckets` there is little to be gained by it.
    "arena_extend_strategy": "kSameAsRequested",
}
INT8_INSTRUCTIONS = {"avx512_vnni", "avx_vnni", "amx_int8"}

logger = logging.getLogger(__name__)


def open_engine(version: Version, options: EngineOptions) -> "OnnxEngine":
    """Load the file of a verified version that fits the options; see `service.engines.open_file`."""
    return open_file(
        version,
        options,
        format_name="onnx",
        cuda_is_there=PROVIDERS["cuda"] in onnxruntime.get_available_providers(),
        make=OnnxEngine,
    )


class OnnxEngine:
    """A loaded ONNX model. See `service.engines.Engine` for the attributes."""

    name = "onnx"

    def __init__(self, model: bytes, *, shape: ModelShape, precision: str, options: EngineOptions) -> None:
        """Load a model from the bytes of its file, which are not needed afterwards.

        Raises:
            StartupError: the device is not there, or not for this precision, or the graph is not a classifier
                of this shape.
        """
        self.precision = precision
        self.device = "cpu" if options.device == "auto" else options.device
        _check_device(self.device, precision)
        self.labels = shape.labels
        self.max_tokens = shape.max_tokens
        self._pad_id = shape.pad_id
        # The pool is shared by all lanes, and each caller works beside it: callers and pool are never more
        # than lanes × threads.
        threads = options.lanes * (options.threads_per_lane - 1) + 1
        session = _open_session(model, self.device, threads)
        self._inputs = _read_inputs(session)
        _check_output(session, shape.labels)
        self._run: Callable[..., list[FloatArray]] | None = session.run
        self._bound: BoundSession | None = None
        if self.device == "cuda":
            self._bound = BoundSession(session, device=self.device, inputs=self._inputs, shape=shape)
        elif options.lone_threads > threads:
            self._run = LoneLong(session.run, _open_session(model, self.device, options.lone_threads).run)

    def run(self, batch: TokenBatch) -> FloatArray:
        """Logits float32[n, labels] of a batch, in its order. May be called from several threads at once.

        Raises:
            EngineFailed: the engine is closed, or gave an array of another shape.
            Exception: whatever onnxruntime raises.
        """
        run, bound = self._run, self._bound
        if run is None:
            raise EngineFailed("the engine is closed")
        if bound is None:
            logits = run(None, feed(batch, self._pad_id, inputs=self._inputs))[0]
        else:
            logits = bound.run(batch)
        if logits.shape != (len(batch), self.labels):
            raise EngineFailed(f"the model gave an array of shape {logits.shape} for {len(batch)} texts")
        return logits

    def close(self) -> None:
        """Let the session go; calls that run finish with it. Safe to call twice."""
        self._run = self._bound = None


def _check_device(device: str, precision: str) -> None:
    there = onnxruntime.get_available_providers()
    if PROVIDERS[device] not in there:
        raise StartupError(
            f"device {device} was asked for, but this onnxruntime offers only {', '.join(there)}"
        )
    if device == "cuda" and precision == "int8":
        raise StartupError(
            "int8 is made for a CPU: with cuda most of it would run there; take float16 or float32"
        )


def _open_session(model: bytes, device: str, threads: int) -> Any:
    settings = onnxruntime.SessionOptions()
    # The numbers are always given: the default pins threads to cores, and fails in a cpuset.
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1
    settings.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    settings.enable_mem_pattern = False
    # What goes wrong is raised; lines of onnxruntime's own would break the format of the log.
    settings.log_severity_level = 4
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.add_session_config_entry("session.inter_op.allow_spinning", "0")
    # The file alone was verified: weights that it wants from another one are looked for where nothing is.
    settings.add_session_config_entry("session.model_external_initializers_file_folder_path", os.devnull)
    exact = has_int8_instructions()
    if not exact:
        settings.add_session_config_entry("session.x64quantprecision", "1")
    on_cuda = device == "cuda"
    said = _preload_cuda() if on_cuda else ""
    try:
        session = onnxruntime.InferenceSession(
            model,
            settings,
            providers=[(PROVIDERS[device], CUDA_OPTIONS if on_cuda else {})],
            disabled_optimizers=[] if on_cuda else SLOW_FUSIONS,
        )
    except Exception as error:  # onnxruntime's errors have no base of their own
        raise StartupError(f"onnxruntime cannot load the model: {error}") from error
    if PROVIDERS[device] not in session.get_providers():
        used = ", ".join(session.get_providers())
        raise StartupError(f"device {device} was asked for, but onnxruntime fell back to {used}{said}")
    way = "in 8-bit instructions" if exact else "in 16 bits, to be exact"
    logger.info(
        "onnxruntime %s on %s, threads %d, 8-bit products %s", onnxruntime.__version__, device, threads, way
    )
    return session


def _preload_cuda() -> str:
    """Load CUDA's libraries, also from Python packages. Gives what is missing, to end a sentence with."""
    said = io.StringIO()
    # It prints what it misses, which would break the format of the log.
    with contextlib.redirect_stdout(said):
        onnxruntime.preload_dlls()
    lines = said.getvalue().split("\n")
    missing = [line.strip() for line in lines if line.startswith("Failed to load")]
    return f" ({'; '.join(missing)})" if missing else ""


def _read_inputs(session: Any) -> dict[str, Integers]:
    return check_inputs({node.name: INTEGERS.get(node.type) for node in session.get_inputs()})


def _check_output(session: Any, labels: int) -> None:
    outputs = session.get_outputs()
    if len(outputs) != 1:
        raise StartupError(f"the graph has {len(outputs)} outputs, not one")
    kind, dims = outputs[0].type, outputs[0].shape
    if kind != "tensor(float)" or len(dims) != 2 or (isinstance(dims[1], int) and dims[1] != labels):
        raise StartupError(
            f"the output of the graph is {kind}{dims}, not float [n, {labels}] for {labels} labels"
        )


def has_int8_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether 8-bit products are exact here at full speed.

    An x86 core without these instructions adds pairs of products in 16 bits, which overflow: wrong numbers,
    unless onnxruntime is told to be precise.
    """
    if platform.machine() not in {"x86_64", "AMD64"}:
        return True
    try:
        flags = cpuinfo.read_text(encoding="utf-8").split()
    except OSError:
        return False
    return not INT8_INSTRUCTIONS.isdisjoint(flags)
