"""Runs an onnxruntime session on buffers that stay on its device, of few shapes.

A lane keeps, for each shape that it has seen, the inputs, the output and their binding: a call copies ids and
mask to the device, and the logits back, and nothing else. The same code runs on a CPU.
Knows nothing of files, providers, texts, queues or HTTP.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import numpy as np
import onnxruntime

from service.core import FloatArray, TokenBatch
from service.engines import Integers, ModelShape
from service.engines.buckets import bucket_of, rectangle

Shape: TypeAlias = tuple[int, int]

FIRST_DEVICE = 0
IDS, MASK = "input_ids", "attention_mask"


@dataclass(slots=True)
class _Buffers:
    """What one shape needs: the binding, and what it binds. Inputs other than ids and mask stay zero."""

    binding: Any
    inputs: dict[str, Any]
    logits: Any


@dataclass(slots=True)
class _Lane:
    """What one caller at a time uses: an onnxruntime binding is not shared between threads."""

    by_shape: dict[Shape, _Buffers] = field(default_factory=dict)


class BoundSession:
    """A session on bound buffers. `run` may be called from several threads at once.

    There are as many lanes as there ever were callers at the same time. The buffers of a lane are at most one
    set for each shape: some tens of MB where every shape up to 256 texts × 512 tokens was seen.
    """

    def __init__(
        self, session: Any, *, device: str, inputs: Mapping[str, Integers], shape: ModelShape
    ) -> None:
        """Take a session that runs on `device` ("cpu" or "cuda") and gives `logits` float32[n, labels]."""
        self._session = session
        self._device = device
        self._inputs = inputs
        self._shape = shape
        self._output = session.get_outputs()[0].name
        self._free: SimpleQueue[_Lane] = SimpleQueue()

    def run(self, batch: TokenBatch) -> FloatArray:
        """Logits float32[n, labels] of a batch, in its order. Raises whatever onnxruntime raises."""
        shape = bucket_of(len(batch), int(batch.lengths.max()), max_tokens=self._shape.max_tokens)
        ids, mask = rectangle(batch, self._shape.pad_id, shape)
        try:
            lane = self._free.get_nowait()
        except Empty:
            lane = _Lane()
        try:
            buffers = lane.by_shape.get(shape)
            if buffers is None:
                buffers = lane.by_shape[shape] = self._make(shape)
            for name, array in ((IDS, ids), (MASK, mask)):
                buffers.inputs[name].update_inplace(array.astype(self._inputs[name], copy=False))
            # Returns when the device is done: the engine is not told to leave the waiting to its caller.
            self._session.run_with_iobinding(buffers.binding)
            # A copy: on a CPU the array is the buffer itself, which the next call overwrites.
            logits: FloatArray = buffers.logits.numpy()[: len(batch)].copy()
        finally:
            self._free.put(lane)
        return logits

    def _make(self, shape: Shape) -> _Buffers:
        inputs = {name: self._zeros(shape, kind) for name, kind in self._inputs.items()}
        logits = self._zeros((shape[0], self._shape.labels), np.float32)
        binding = self._session.io_binding()
        for name, one in inputs.items():
            binding.bind_ortvalue_input(name, one)
        binding.bind_ortvalue_output(self._output, logits)
        return _Buffers(binding, inputs, logits)

    def _zeros(self, shape: Shape, kind: type[np.generic]) -> Any:
        """Memory of the device that belongs to onnxruntime, filled with zeros."""
        value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, kind, self._device, FIRST_DEVICE)
        value.update_inplace(np.zeros(shape, dtype=kind))
        return value
