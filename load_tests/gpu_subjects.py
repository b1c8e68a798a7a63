"""What the check of a GPU runs: a version with the forms that a GPU serves, and engines on it.

Knows nothing of bounds, times or reports.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import onnxruntime

from service.core import FloatArray, TokenBatch
from service.engines import EngineOptions, Integers, ModelShape, check_inputs
from service.engines.binding import BoundSession
from service.engines.onnx import INTEGERS
from service.store import ModelFile, Version, form, open_version, write_version

LANES = 2
"""One computes while the other copies and pads."""
FORMS = (("onnx", "float32"), ("onnx", "float16"), ("torchscript", "float32"), ("torchscript", "float16"))
FLOAT16_BOUND = 0.05
_FLOAT32 = "onnx/float32"


def options(engine: str, precision: str, device: str) -> EngineOptions:
    """An engine by name; with a GPU, so many lanes as a GPU is given."""
    lanes = LANES if device == "cuda" else 1
    return EngineOptions(engine=engine, precision=precision, device=device, lanes=lanes)


def with_gpu_forms(version: Version, store: Path) -> tuple[Version, dict[str, str]]:
    """The version with what it lacks made from its float32 file, in a store of its own.

    The golden logits of a form that is made here are those of float32.

    Returns:
        The version, and by form why one could not be made.
    """
    manifest = version.manifest
    files: dict[str, bytes | Path] = {
        name: version.path / name
        for name in ("README.md", manifest.tokenizer.path, *(model.path for model in manifest.models))
    }
    made: dict[str, ModelFile] = {}
    missing: dict[str, str] = {}
    held = {form(model) for model in manifest.models}
    for record, make, needs in (
        (ModelFile("model.float16.onnx", "onnx", "float16", 0, "", FLOAT16_BOUND), _float16, ["onnx_ir"]),
        (
            ModelFile("model.torchscript", "torchscript", "float32", 0, "", 1e-3),
            _script,
            ["torch", "transformers", "onnx"],
        ),
    ):
        if form(record) in held:
            continue
        if lacking := [name for name in needs if importlib.util.find_spec(name) is None]:
            missing[form(record)] = f"cannot be made without {', '.join(lacking)} (extra train)"
            continue
        files[record.path] = make(version)
        made[form(record)] = record
    golden = [
        replace(text, logits={**text.logits, **dict.fromkeys(made, text.logits[_FLOAT32])})
        for text in manifest.golden_texts
    ]
    models = [*manifest.models, *made.values()]
    write_version(store, replace(manifest, models=models, golden_texts=golden), files)
    return open_version(store, manifest.name, manifest.version), missing


def _float32_path(version: Version) -> Path:
    return version.path / next(model.path for model in version.manifest.models if form(model) == _FLOAT32)


def _float16(version: Version) -> bytes:
    import onnx_ir as ir  # noqa: PLC0415 - not in a serving install

    from training.half import compute_half  # noqa: PLC0415

    graph = ir.load(_float32_path(version))
    compute_half(graph)
    content: bytes = ir.to_proto(graph).SerializeToString()
    return content


def _script(version: Version) -> bytes:
    from training.graph import graph_weights, rebuild  # noqa: PLC0415 - not in a serving install
    from training.own import through_encoder  # noqa: PLC0415
    from training.torchscript import trace_script  # noqa: PLC0415

    model = rebuild(graph_weights(_float32_path(version)), version.manifest.architecture)
    return trace_script(through_encoder(model))


class Buffered:
    """The way that a GPU is used (bound buffers, few shapes), on a CPU. See `service.engines.Engine`."""

    name = "onnx"
    device = "cpu"

    def __init__(self, version: Version, precision: str) -> None:
        manifest = version.manifest
        file = next(one for one in manifest.models if form(one) == f"onnx/{precision}")
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            version.read(file), settings, providers=["CPUExecutionProvider"]
        )
        declared: Mapping[str, Integers | None] = {
            node.name: INTEGERS.get(node.type) for node in session.get_inputs()
        }
        self.precision = precision
        self.labels = len(manifest.labels)
        self.max_tokens = manifest.max_tokens
        self._bound = BoundSession(
            session,
            device=self.device,
            inputs=check_inputs(declared),
            shape=ModelShape(self.labels, self.max_tokens, manifest.pad_id),
        )

    def run(self, batch: TokenBatch) -> FloatArray:
        """Logits float32[n, labels]."""
        return self._bound.run(batch)

    def close(self) -> None:
        """Nothing to let go."""
