"""Runs the float32 ONNX file of a version with OpenVINO on a CPU, computing in float32 or bfloat16.

One compiled model serves all lanes, so that the weights are in memory once; a call borrows a request of it.
Knows nothing of texts, queues, settings or HTTP. Why it is as it is: docs/adr/0011.
"""

import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np

from service.core import FloatArray, TokenBatch
from service.engines import EngineOptions, IntegerArray, Integers, ModelShape, check_inputs, feed, open_file
from service.errors import EngineFailed, StartupError
from service.store import Version

DEVICE = "CPU"
HINTS = {"float32": "f32", "bfloat16": "bf16"}
INTEGERS: dict[str, Integers] = {"i64": np.int64, "i32": np.int32}
# OpenVINO keeps what it made for a shape, about 0.24 MB of it. Lengths are rounded up to an eighth of a
# doubling, and to 4 at least, so that the shapes are some hundreds, not thousands.
LEAST_STEP_TOKENS = 4
STEPS_OF_A_DOUBLING = 8
# A NaN of our own: where it stands after a call, OpenVINO wrote nothing.
UNTOUCHED = np.uint32(0x7FC0_5A5A)

Requests: TypeAlias = "SimpleQueue[Any]"

logger = logging.getLogger(__name__)


def open_engine(version: Version, options: EngineOptions) -> "OpenVinoEngine":
    """Compile the float32 file of a verified version; see `service.engines.open_file`.

    Precision "auto" is bfloat16 where the processor computes in it, else float32.
    """
    bfloat16 = options.precision == "bfloat16" or (options.precision == "auto" and has_bfloat16())
    if options.precision not in {"auto", *HINTS}:
        raise StartupError(f"openvino computes in {' or '.join(HINTS)}, not in {options.precision}")
    if bfloat16 and not has_bfloat16():
        raise StartupError("precision bfloat16 was asked for, but this processor does not compute in it")

    def make(
        content: bytes, /, *, shape: ModelShape, precision: str, options: EngineOptions
    ) -> OpenVinoEngine:
        computed = "bfloat16" if bfloat16 else precision
        return OpenVinoEngine(content, shape=shape, precision=computed, options=options)

    return open_file(
        version, replace(options, precision="float32"), format_name="onnx", cuda_is_there=False, make=make
    )


class OpenVinoEngine:
    """A compiled ONNX model. See `service.engines.Engine` for the attributes."""

    name = "openvino"
    device = "cpu"

    def __init__(self, content: bytes, *, shape: ModelShape, precision: str, options: EngineOptions) -> None:
        """Compile a model from the bytes of its file, which are not needed afterwards.

        Args:
            precision: what to compute in, "float32" or "bfloat16".

        Raises:
            StartupError: the device is not the CPU, or the graph is not a classifier of this shape.
        """
        if options.device == "cuda":
            raise StartupError("device cuda was asked for, but openvino is used on a CPU only")
        self.precision = precision
        self.labels = shape.labels
        self.max_tokens = shape.max_tokens
        self._pad_id = shape.pad_id
        self._openvino = _library()
        core = self._openvino.Core()
        model = _read(core, content)
        self._inputs = check_inputs(
            {one.any_name: INTEGERS.get(one.element_type.get_type_name()) for one in model.inputs}
        )
        _check_output(model, shape.labels)
        self._vocabulary = _vocabulary(model)
        self._requests: Requests | None = _compile(core, model, precision, options)

    def run(self, batch: TokenBatch) -> FloatArray:
        """Logits float32[n, labels] of a batch, in its order. May be called from several threads at once.

        More callers than lanes wait for each other.

        Raises:
            EngineFailed: the engine is closed, a text does not fit the model, or OpenVINO gave no answer.
            Exception: whatever OpenVINO raises.
        """
        requests = self._requests
        if requests is None:
            raise EngineFailed("the engine is closed")
        longest = int(batch.lengths.max())
        # OpenVINO reads zeros for an id that is not in the table.
        if longest > self.max_tokens or int(batch.ids.max()) >= self._vocabulary:
            raise EngineFailed(
                f"a text is longer than {self.max_tokens} tokens, or has one that is out of the vocabulary"
            )
        inputs = feed(batch, self._pad_id, inputs=self._inputs, length=padded(longest, self.max_tokens))
        request = requests.get()
        try:
            logits, answered = self._infer(request, inputs, count=len(batch))
            if not answered:
                # The request fails on, also for good texts, until it gets a shape that no batch has.
                nothing = {name: np.zeros((1, 1), dtype=kind) for name, kind in self._inputs.items()}
                self._infer(request, nothing, count=1)
        finally:
            requests.put(request)
        if not answered:
            raise EngineFailed(f"openvino gave no answer for {len(batch)} texts of up to {longest} tokens")
        return logits

    def _infer(
        self, request: Any, inputs: Mapping[str, IntegerArray], *, count: int
    ) -> tuple[FloatArray, bool]:
        """Logits float32[count, labels], and whether they were written.

        A node that fails for a shape ends the call without an error, and what a request gives then is the
        answer of the call before.
        """
        logits = np.full((count, self.labels), UNTOUCHED, dtype=np.uint32).view(np.float32)
        request.set_output_tensor(self._openvino.Tensor(logits, shared_memory=True))
        request.infer(inputs, share_inputs=True)
        return logits, not (logits.view(np.uint32) == UNTOUCHED).any()

    def close(self) -> None:
        """Let the model go; calls that run finish with it. Safe to call twice."""
        self._requests = None


def has_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16 (AMX or AVX-512 BF16), and OpenVINO uses them."""
    return "BF16" in _library().Core().get_property(DEVICE, "OPTIMIZATION_CAPABILITIES")


def padded(length: int, max_tokens: int) -> int:
    """The length that a rectangle of texts up to `length` tokens is given."""
    step = max(LEAST_STEP_TOKENS, (1 << (length - 1).bit_length()) // (2 * STEPS_OF_A_DOUBLING))
    return min(-(-length // step) * step, max_tokens)


def _library() -> Any:
    """The openvino package, without the one that tells its maker of every import, and asks nobody."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    return import_module("openvino")


def _read(core: Any, content: bytes) -> Any:
    try:
        return core.read_model(model=content)
    except Exception as error:  # RuntimeError as a rule, others from a file that only looks like one
        raise StartupError(f"openvino cannot load the model: {_last_line(error)}") from error


def _compile(core: Any, model: Any, precision: str, options: EngineOptions) -> Requests:
    """A request for each lane, all of one compiled model."""
    config = {
        "INFERENCE_PRECISION_HINT": HINTS[precision],
        # So many calls work at the same time (fewer where the cores are fewer), each with its share of the
        # threads. A call is worked on by its own thread, or waits for one of OpenVINO's.
        "NUM_STREAMS": options.lanes,
        "INFERENCE_NUM_THREADS": options.lanes * options.threads_per_lane,
        "ENABLE_CPU_PINNING": False,
        "ENABLE_HYPER_THREADING": True,  # the number of threads is the operator's
    }
    try:
        compiled = core.compile_model(model, DEVICE, config)
        requests: Requests = SimpleQueue()
        for _ in range(options.lanes):
            requests.put(compiled.create_infer_request())
    except Exception as error:
        raise StartupError(f"openvino cannot compile the model: {_last_line(error)}") from error
    logger.info("openvino %s on cpu in %s", _library().get_version(), precision)
    return requests


def _check_output(model: Any, labels: int) -> None:
    if len(model.outputs) != 1:
        raise StartupError(f"the graph has {len(model.outputs)} outputs, not one")
    kind, shape = model.outputs[0].element_type.to_dtype(), model.outputs[0].partial_shape
    fits = shape.rank.is_static and len(shape) == 2 and shape[1].is_dynamic | (shape[1] == labels)
    if kind != np.float32 or not fits:
        raise StartupError(
            f"the output of the graph is {kind}{shape}, not float32[n, {labels}] for {labels} labels"
        )


def _vocabulary(model: Any) -> int:
    """How many rows the table has in which the graph looks up the token ids. Raises StartupError: none."""
    for node in model.get_ops():
        if node.get_type_name() == "Gather" and _source(node.input_value(1)) == "input_ids":
            rows = node.input(0).get_partial_shape()[0]
            if rows.is_static:
                return int(rows.get_length())
    raise StartupError("the graph does not look up the token ids in a table")


def _source(value: Any) -> str:
    """The name of the input that a value is, widened or not; empty when it is computed."""
    node = value.get_node()
    while node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    return str(node.output(0).any_name) if node.get_type_name() == "Parameter" else ""


def _last_line(error: Exception) -> str:
    """OpenVINO puts a trace of its own before the reason."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
