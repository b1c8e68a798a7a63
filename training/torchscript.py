"""The TorchScript file of a classifier, the weights that it holds, and a run of it without optimisation.

Knows nothing of ONNX, tokenizers, versions or bounds.
"""

import contextlib
import copy
import io
import json
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from service.core import FloatArray, TokenBatch
from service.engines import pad
from training.graph import Classifier, GraphError
from training.own import kept_names

NAMES = "names.json"
"""A record in the file: the name that each parameter is kept under, by its name in the module."""
_PREFIX = "model."


def trace_script(model: PreTrainedModel) -> bytes:
    """A file for `torch.jit.load`: input_ids, attention_mask int64[n, length] -> logits float32[n, labels].

    It holds for any n and length; token types are zeros inside. The parameters, which must be float16 values
    already, are stored as float16, so whoever loads the file widens them. The model is left as it is.

    Raises GraphError when a parameter is not rounded, so that nothing is lost here.
    """
    ours = copy.deepcopy(model).train(False)
    ids = torch.full((3, 5), 5, dtype=torch.int64)
    # Rows of several lengths: a trace of a mask without a zero may leave it out.
    mask = (torch.arange(5) < torch.tensor([[5], [3], [2]])).long()
    with _quiet(), torch.no_grad():
        # The check would compare with a second trace; the gate compares with the model.
        script: torch.jit.ScriptModule = torch.jit.trace(  # type: ignore[no-untyped-call]
            Classifier(ours), (ids, mask), check_trace=False
        )
        for name, parameter in script.named_parameters():
            half = parameter.half()
            if not torch.equal(half.float(), parameter):
                raise GraphError(f"{name.removeprefix(_PREFIX)} is not rounded to float16")
            parameter.data = half
        content = io.BytesIO()
        names = {_PREFIX + name: kept for name, kept in kept_names(ours).items()}
        torch.jit.save(script, content, _extra_files={NAMES: json.dumps(names)})
    return content.getvalue()


def script_weights(content: bytes) -> dict[str, NDArray[np.float32]]:
    """The parameters that a file of `trace_script` holds, by name, bit by bit as they are stored.

    Raises GraphError for another file.
    """
    extra: dict[str, bytes] = {NAMES: b""}
    try:
        with _quiet():
            script = _load(content, extra)
        names = json.loads(extra[NAMES])
        return {names[name]: value.detach().float().numpy() for name, value in script.named_parameters()}
    except (RuntimeError, ValueError, KeyError) as error:
        raise GraphError(f"not a TorchScript file of ours: {error}") from error


class PlainScript:
    """The file run as it was saved: on the CPU, neither frozen nor optimised."""

    def __init__(self, content: bytes, pad_id: int) -> None:
        with _quiet():
            self._script = _load(content, {}).float().train(False)
        self._pad_id = pad_id

    def run(self, batch: TokenBatch) -> FloatArray:
        """Logits float32[n, labels]."""
        ids, mask = map(torch.from_numpy, pad(batch, self._pad_id))
        with torch.inference_mode(), torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            logits: FloatArray = self._script(ids, mask).numpy()
        return logits


def _load(content: bytes, extra: dict[str, bytes]) -> torch.jit.ScriptModule:
    script: torch.jit.ScriptModule = torch.jit.load(  # type: ignore[no-untyped-call]
        io.BytesIO(content), map_location="cpu", _extra_files=extra
    )
    return script


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Torch says at every turn that TorchScript is deprecated (docs/adr/0008), and that a trace is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        # The tracer reads every attribute of the model, those that the library deprecates too.
        warnings.filterwarnings("ignore", r"`is_gradient_checkpointing` is deprecated", FutureWarning)
        # The library compares shapes to check them; no answer depends on the outcome, which the gate shows.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        yield
