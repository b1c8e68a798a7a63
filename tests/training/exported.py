"""Builds tiny fine-tuned classifiers, their graphs, and versions of them that no gate has seen."""

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import onnx_ir as ir
import torch
from transformers import PreTrainedModel

from service.core import FloatArray, TokenBatch
from service.engines import EngineOptions, ModelShape
from service.engines.onnx import OnnxEngine
from service.store import (
    FileRecord,
    GoldenText,
    Manifest,
    ModelFile,
    Source,
    Version,
    form,
    open_version,
    write_version,
)
from tests.training.tiny import Kind, make_base
from training.graph import architecture_of, load_eager, round_to_half, store_half, trace
from training.own import through_encoder
from training.pretrained import load_base, load_tokenizer
from training.quantize import quantize

KINDS: tuple[Kind, ...] = ("bert", "distilbert", "roberta", "mpnet")
MAX_TOKENS = 61
BOUNDS: dict[Literal["float32", "int8"], float] = {"float32": 1e-3, "int8": 0.05}
_FOLDER = tempfile.TemporaryDirectory(prefix="valence-tests-")


def make_classifier(
    folder: Path,
    kind: Kind = "bert",
    *,
    labels: Sequence[str] = ("negative", "positive"),
    spread: float = 0.2,
) -> Path:
    """A classifier with random weights, large enough to have opinions, as `save_pretrained` writes one."""
    base = make_base(folder / "base", kind)
    model, _ = load_base(str(base), tuple(labels))
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=dice) * spread)
    if len(labels) == 1:
        model.config.problem_type = "multi_label_classification"
    saved = folder / "classifier"
    model.save_pretrained(saved)
    load_tokenizer(str(base)).save_pretrained(saved)
    return saved


@dataclass(frozen=True)
class Traced:
    """A rounded eager model, the folder it was saved in, and its graph. To be copied, not changed."""

    kind: Kind
    folder: Path
    model: PreTrainedModel
    graph: ir.Model

    @property
    def pad_id(self) -> int:
        return int(self.model.config.pad_token_id)

    def copy_of_model(self) -> PreTrainedModel:
        """A model that a test may change."""
        return copy.deepcopy(self.model)


@cache
def traced(kind: Kind) -> Traced:
    """A classifier of random weights; made once for all tests, since tracing takes seconds."""
    folder = make_classifier(Path(_FOLDER.name) / kind, kind)
    model = load_eager(folder)
    round_to_half(model)
    return Traced(kind, folder, model, trace(through_encoder(model), MAX_TOKENS))


def graph_of(kind: Kind, model: PreTrainedModel) -> ir.Model:
    """The graph of a model of that kind, with the weights that the model has now."""
    graph = traced(kind).graph.clone()
    for name, parameter in model.named_parameters():
        if name in graph.graph.initializers:
            graph.graph.initializers[name].const_value = ir.Tensor(parameter.detach().numpy(), name=name)
    return graph


def write_graph(kind: Kind, model: PreTrainedModel, path: Path, *, int8: bool = False) -> Path:
    """The file of a rounded model, as a version keeps it."""
    graph = graph_of(kind, model)
    if int8:
        quantize(graph)
    store_half(graph, [name for name, _ in model.named_parameters()])
    ir.save(graph, path)
    return path


def open_graph(path: Path, *, precision: str, pad_id: int, labels: int = 2) -> OnnxEngine:
    """The service's engine on a file."""
    shape = ModelShape(labels=labels, max_tokens=MAX_TOKENS, pad_id=pad_id)
    return OnnxEngine(path.read_bytes(), shape=shape, precision=precision, options=EngineOptions())


def ungated_version(
    store: Path,
    model: PreTrainedModel,
    tokenizer_json: bytes,
    files: Mapping[str, Path],
    *,
    script: bytes | None = None,
) -> Version:
    """A version of the given ONNX files by precision, and a TorchScript file, whatever is in them.

    Its golden logits are zeros.
    """
    names = {"float32": "model.onnx", "int8": "model.int8.onnx"}
    models = [ModelFile(names[p], "onnx", p, 0, "", BOUNDS[p]) for p in BOUNDS if p in files]
    if script is not None:
        models.append(ModelFile("model.torchscript", "torchscript", "float32", 0, "", 1e-3))
    nothing = {form(one): [0.0, 0.0] for one in models}
    manifest = Manifest(
        schema_version=1,
        name="trial",
        version=1,
        created="2026-01-01T00:00:00Z",
        labels=["negative", "positive"],
        activation="softmax",
        max_tokens=MAX_TOKENS,
        padding_side="right",
        pad_id=int(model.config.pad_token_id),
        base_model=Source("tiny", "Apache-2.0"),
        training_data=[],
        metrics=[],
        temperature=1.0,
        golden_texts=[GoldenText("good", nothing)],
        tokenizer=FileRecord("tokenizer.json", 0, ""),
        models=models,
        architecture=architecture_of(model),
    )
    content: dict[str, bytes | Path] = {names[precision]: path for precision, path in files.items()}
    content |= {} if script is None else {"model.torchscript": script}
    write_version(store, manifest, {**content, "tokenizer.json": tokenizer_json, "README.md": b"-"})
    return open_version(store, "trial")


class StandInEngine:
    """An engine whose answers a test decides: `answer` is called with the batch."""

    name = "onnx"
    device = "cpu"
    max_tokens = MAX_TOKENS
    labels = 2

    def __init__(self, answer: Callable[[TokenBatch], FloatArray], precision: str = "float32") -> None:
        self._answer = answer
        self.precision = precision

    def run(self, batch: TokenBatch) -> FloatArray:
        """What the test says."""
        return self._answer(batch)

    def close(self) -> None:
        """Nothing is held."""
