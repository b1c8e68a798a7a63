"""Runs a TorchScript classifier with torch, on a CPU or with CUDA.

One module serves all lanes, so that the weights are in memory once.
Knows nothing of texts, queues, settings or HTTP, nor of how the file was made.
"""

import io
import logging
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from service.core import FloatArray, TokenBatch
from service.engines import EngineOptions, ModelShape, open_file, pad
from service.errors import EngineFailed, StartupError
from service.store import Version

HALF = "float16"
INPUTS = ["input_ids", "attention_mask"]

logger = logging.getLogger(__name__)


def open_engine(version: Version, options: EngineOptions) -> "TorchScriptEngine":
    """Load the file of a verified version that fits the options; see `service.engines.open_file`.

    Precision float16 is computed from the float32 file.
    """
    half = options.precision == HALF

    def make(
        content: bytes, *, shape: ModelShape, precision: str, options: EngineOptions
    ) -> "TorchScriptEngine":
        return TorchScriptEngine(content, shape=shape, precision=HALF if half else precision, options=options)

    return open_file(
        version,
        replace(options, precision="float32") if half else options,
        format_name="torchscript",
        cuda_is_there=torch.cuda.is_available(),
        make=make,
    )


class TorchScriptEngine:
    """A loaded TorchScript model. See `service.engines.Engine` for the attributes."""

    name = "torchscript"

    def __init__(self, content: bytes, *, shape: ModelShape, precision: str, options: EngineOptions) -> None:
        """Load a module from the bytes of its file, which are not needed afterwards.

        Its `forward` takes input_ids and attention_mask, int64[n, length] each, and gives logits
        float32[n, labels]. Weights that are stored as float16 are widened. With precision float16 products
        are computed in it, sums of softmax and normalisation in float32.

        The number of threads is the whole process's: of two engines, the one loaded last decides it.

        Raises:
            StartupError: the device is not there, or the file is not a classifier of this shape.
        """
        self.precision = precision
        self.device = "cpu" if options.device == "auto" else options.device
        _check_device(self.device)
        self.labels = shape.labels
        self.max_tokens = shape.max_tokens
        self._pad_id = shape.pad_id
        # Each calling thread gets helpers of its own, one less than this, that live as long as it does. So
        # callers and helpers are never more than lanes × threads. The call also makes a pool for XNNPACK,
        # whose threads sleep for ever: nothing in such a model uses it.
        torch.set_num_threads(options.threads_per_lane)
        # Loading computes, too; in a thread that ends, its helpers end with it and are not left idle.
        with ThreadPoolExecutor(1, thread_name_prefix="load") as executor:
            self._module: torch.jit.ScriptModule | None = executor.submit(self._open, content).result()
        logger.info("torch %s on %s", torch.__version__, self.device)

    def run(self, batch: TokenBatch) -> FloatArray:
        """Logits float32[n, labels] of a batch, in its order. May be called from several threads at once.

        Raises:
            EngineFailed: the engine is closed, or gave an array of another shape.
            Exception: whatever torch raises.
        """
        module = self._module
        if module is None:
            raise EngineFailed("the engine is closed")
        logits = self._forward(module, batch)
        if logits.dtype != torch.float32 or logits.shape != (len(batch), self.labels):
            raise EngineFailed(
                f"the model gave {logits.dtype} of shape {tuple(logits.shape)} for {len(batch)} texts"
            )
        result: FloatArray = logits.numpy()
        return result

    def close(self) -> None:
        """Let the module go; calls that run finish with it. Safe to call twice."""
        self._module = None

    def _open(self, content: bytes) -> torch.jit.ScriptModule:
        module = _load(content, self.device)
        self._probe(module)
        return module

    def _forward(self, module: torch.jit.ScriptModule, batch: TokenBatch) -> torch.Tensor:
        ids, mask = (torch.from_numpy(array).to(self.device) for array in pad(batch, self._pad_id))
        # The interpreter runs the graph as it was frozen. Torch's own way profiles the first calls and then
        # answers by a second graph: more memory, and other code for the first calls than for the later ones.
        # Its older executor, and its own without fusing, grew with each new shape (docs/adr/0008).
        # The switch belongs to the thread, so it is set in each call.
        with (
            torch.inference_mode(),
            torch.jit.optimized_execution(False),  # type: ignore[attr-defined]
            torch.autocast(self.device, dtype=torch.float16, enabled=self.precision == HALF),
        ):
            logits: torch.Tensor = module(ids, mask)
            return (logits.float() if logits.dtype == torch.float16 else logits).cpu()

    def _probe(self, module: torch.jit.ScriptModule) -> None:
        """Run two texts of padding, which every vocabulary has. Raises StartupError."""
        ids = torch.full((5,), self._pad_id, dtype=torch.int64).numpy()
        batch = TokenBatch(ids, torch.tensor([3, 2]).numpy())
        try:
            logits = self._forward(module, batch)
        except Exception as error:
            raise StartupError(f"the module does not run on {self.device}: {_last_line(error)}") from error
        if logits.dtype != torch.float32 or logits.shape != (2, self.labels):
            raise StartupError(
                f"the output of the module for 2 texts is {logits.dtype}{list(logits.shape)}, not "
                f"torch.float32[2, {self.labels}] for {self.labels} labels"
            )


def _check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        build = "finds no CUDA device" if torch.version.cuda else "is built without CUDA"
        raise StartupError(f"device cuda was asked for, but this torch ({torch.__version__}) {build}")


def _load(content: bytes, device: str) -> torch.jit.ScriptModule:
    """The module on the device, in float32, with its weights made constants of the graph."""
    try:
        with warnings.catch_warnings():
            # Known, and decided on in docs/adr/0008; an operator can do nothing about it.
            warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
            module = torch.jit.load(io.BytesIO(content), map_location=device)  # type: ignore[no-untyped-call]
            _check_schema(module)
            module.float().train(False)
            frozen: torch.jit.ScriptModule = torch.jit.freeze(module)
    except StartupError:
        raise
    except Exception as error:  # RuntimeError as a rule, others from a file that only looks like one
        raise StartupError(f"torch cannot load the model: {_last_line(error)}") from error
    return frozen


def _check_schema(module: torch.jit.ScriptModule) -> None:
    schema = module.forward.schema  # type: ignore[attr-defined]
    names = [argument.name for argument in schema.arguments[1:]]
    if names != INPUTS:
        raise StartupError(
            f"the module takes {', '.join(names) or 'nothing'}; the service gives {', '.join(INPUTS)}"
        )
    types = [str(value.type) for value in (*schema.arguments[1:], *schema.returns)]
    if types != ["Tensor"] * 3:
        raise StartupError(f"the module maps {types[:2]} to {types[2:]}, not two tensors to one")


def _last_line(error: Exception) -> str:
    """Torch puts a trace of its own before the reason."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
