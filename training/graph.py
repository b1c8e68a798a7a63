"""The float ONNX graph of a classifier, and the way back from a file's weights to the eager model.

Weights are rounded to float16, stored so, and computed with in float32; each keeps the name of its parameter.
Knows nothing of quantisation, tokenizers, versions or bounds.
"""

import contextlib
import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from training.config import ConfigError
from training.own import MODEL_TYPE, OwnClassifier, kept_names, rebuild_own
from training.pretrained import load_classifier
from training.rewrite import add_constant, keep_first_position, tidy

OPSET = 20
# What differs between two machines or two saves of the same network.
NOT_ARCHITECTURE = (
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "architectures",
    "id2label",
    "label2id",
)
LONGEST_REASON = 300
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class GraphError(ConfigError):
    """A model that cannot become a graph, or a graph that is not one of ours."""


class Unexportable(Exception):
    """The model is a sound one, and no graph of ours comes out of it."""


class Classifier(torch.nn.Module):
    """A model as it is traced: one of the library gets the mask as an additive bias, made once for all."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        # Our encoder makes the bias itself.
        self.wants_bias = not isinstance(model, OwnClassifier)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """ids, mask, types int64[n, length] -> logits float32[n, labels]."""
        mask = attention_mask
        if self.wants_bias:
            mask = (1.0 - mask[:, None, None, :].to(torch.float32)) * torch.finfo(torch.float32).min
        extra = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        logits: torch.Tensor = self.model(input_ids=input_ids, attention_mask=mask, **extra).logits
        return logits


@contextlib.contextmanager
def one_reason(model: PreTrainedModel) -> Iterator[None]:
    """Whatever the tracing of a family that nobody tried raises, as one line. Raises Unexportable."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        first: BaseException = error
        while first.__cause__ is not None:  # the exporter puts advice of its own before it
            first = first.__cause__
        lines = [_COLOUR.sub("", line).strip() for line in str(first).splitlines() if line.strip()]
        reason = ": ".join([type(first).__name__, *lines[:1]])[:LONGEST_REASON]
        raise Unexportable(f"a {model.config.model_type} model cannot be exported: {reason}") from error


def load_eager(folder: Path) -> PreTrainedModel:
    """The fine-tuned classifier of a folder, in float32, with attention written out. Raises ConfigError."""
    model = load_classifier(folder)
    if isinstance(model, OwnClassifier):
        return model.written_out()
    model.set_attn_implementation("eager")
    return model


def round_to_half(model: PreTrainedModel) -> None:
    """Rounds every parameter to the nearest float16 value, in place; it stays float32. Raises GraphError."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rounded = parameter.half().float()
            if not torch.isfinite(rounded).all():
                raise GraphError(f"{name} holds a value that float16 cannot")
            parameter.copy_(rounded)


def architecture_of(model: PreTrainedModel) -> dict[str, Any]:
    """The configuration, as JSON, that `rebuild` makes the same network from."""
    kept = {k: v for k, v in model.config.to_dict().items() if k not in NOT_ARCHITECTURE}
    return {**kept, "num_labels": model.config.num_labels}


def input_names(model: PreTrainedModel) -> tuple[str, ...]:
    """What the graph is fed: token types where the library has several; our encoder takes type 0 for all."""
    if isinstance(model, OwnClassifier):
        return ("input_ids", "attention_mask")
    types = getattr(model.config, "type_vocab_size", 0) or 0
    return ("input_ids", "attention_mask", "token_type_ids")[: 3 if types > 1 else 2]


def trace(model: PreTrainedModel, max_tokens: int) -> ir.Model:
    """The tidied float32 graph: int64[n, length] inputs -> `logits` float32[n, labels], for any n and length.

    Every weight is an initializer under its name of `kept_names`. Where the head reads the first token alone,
    the last layer computes only that one.
    """
    graph = export_graph(model, max_tokens)
    names = kept_names(model)
    for name, value in list(graph.graph.initializers.items()):
        value.name = names.get(name.removeprefix("model."), name.removeprefix("model."))
    tidy(graph)
    keep_first_position(graph)
    return graph


def export_graph(model: PreTrainedModel, max_tokens: int) -> ir.Model:
    """The graph as PyTorch's exporter writes it, before anything is rewritten."""
    inputs = input_names(model)
    size = {0: torch.export.Dim("n", min=1, max=4096), 1: torch.export.Dim("length", min=2, max=max_tokens)}
    ids = torch.full((3, 5), 5, dtype=torch.int64)
    example = {
        name: torch.ones_like(ids) if name == "attention_mask" else torch.zeros_like(ids) for name in inputs
    }
    example["input_ids"] = ids
    with _quiet_exporter(), torch.no_grad():
        program = torch.onnx.export(
            Classifier(model).eval(),
            kwargs=example,
            dynamo=True,
            external_data=False,
            optimize=False,
            verbose=False,
            opset_version=OPSET,
            dynamic_shapes=dict.fromkeys(inputs, size),
            input_names=list(inputs),
            output_names=["logits"],
        )
    if program is None:
        raise GraphError("the exporter gave no graph")
    graph: ir.Model = program.model
    return graph


def store_half(graph: ir.Model, parameters: Collection[str]) -> None:
    """Keeps those initializers as float16 under the same name, with a Cast to float32 behind each; in place.

    Raises GraphError when a weight is not a float16 value, so that nothing is lost here.
    """
    for name in parameters:
        value = graph.graph.initializers.get(name)
        if value is None or value.const_value is None:
            continue
        full = value.const_value.numpy()
        half = full.astype(np.float16)
        if not np.array_equal(half.astype(np.float32), full):
            raise GraphError(f"{name} is not rounded to float16")
        uses = list(value.uses())
        del graph.graph.initializers[name]
        widen = ir.node("Cast", [add_constant(graph, name, half)], {"to": ir.DataType.FLOAT})
        widen.outputs[0].name = f"{name}.float32"
        widen.outputs[0].shape, widen.outputs[0].dtype = value.shape, ir.DataType.FLOAT
        graph.graph.insert_before(graph.graph[0], widen)
        for user, position in uses:
            user.replace_input_with(position, widen.outputs[0])


def graph_weights(path: Path) -> dict[str, NDArray[np.float32]]:
    """The weights that a float graph holds, by name, bit by bit as they are stored."""
    return {
        tensor.name: onnx.numpy_helper.to_array(tensor).astype(np.float32)
        for tensor in onnx.load(path).graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT16
    }


def rebuild(weights: Mapping[str, NDArray[np.float32]], architecture: Mapping[str, Any]) -> PreTrainedModel:
    """The eager model that a float file was made from: its logits float32[n, labels] are the reference.

    The network is made from the configuration in the manifest, by the library's code where it has one. A
    parameter that the file does not use has no part in the logits and is left at zero. Raises GraphError.
    """
    model, left = _network(architecture), dict(weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = left.pop(name, None)
            if weight is not None and weight.shape != parameter.shape:
                raise GraphError(f"{name} is {weight.shape}, the model wants {tuple(parameter.shape)}")
            parameter.copy_(torch.zeros_like(parameter) if weight is None else torch.from_numpy(weight))
    if left:
        raise GraphError(f"the model has no {', '.join(sorted(left))}")
    rebuilt: PreTrainedModel = model.eval()
    return rebuilt


def _network(architecture: Mapping[str, Any]) -> Any:
    settings = dict(architecture)
    kind = settings.pop("model_type")
    if kind == MODEL_TYPE:
        return rebuild_own(settings).written_out()
    config = AutoConfig.for_model(kind, **settings)
    return AutoModelForSequenceClassification.from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation="eager", dtype=torch.float32
    )


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """The exporter warns of things that are meant (torchvision is not there, axes share a name)."""
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        exporter.setLevel(level)
