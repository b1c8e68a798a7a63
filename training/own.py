"""The project's own encoder, called and saved the way the models of transformers are.

An `OwnClassifier` stands in a Trainer, an evaluation or an export where a model of the library could. One
that took its weights from the library keeps the library's configuration, and gives them back by name; one
that began at random has a configuration of its own (`model_type` "valence").
Knows nothing of data, graphs, precision or versions.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from encoder.config import EncoderConfig
from encoder.model import SequenceClassifier
from encoder.pretrained import FAMILIES, PretrainedError, from_checkpoint, to_checkpoint
from training.config import ConfigError

MODEL_TYPE = "valence"


class OwnConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """What `config.json` says of a model that began at random; `encoder` holds its `EncoderConfig`."""

    model_type = MODEL_TYPE

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)


class OwnClassifier(PreTrainedModel):  # type: ignore[no-untyped-call]
    """The classifier of `encoder.model` behind the interface of a library's model."""

    config_class = OwnConfig
    main_input_name = "input_ids"
    _supports_sdpa = True

    def __init__(self, config: PretrainedConfig, network: SequenceClassifier | None = None) -> None:
        super().__init__(config)
        # The library would look for a loss by the name of the class, and complain.
        self.loss_type = "ForSequenceClassification"
        self.network = network or SequenceClassifier(EncoderConfig(**config.encoder))
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """ids, mask, types int64[n, length] -> logits float32[n, labels]; with labels, the loss too."""
        logits = self.network(input_ids, attention_mask, token_type_ids)
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def written_out(self) -> Self:
        """Has attention written out, which is what a graph is made from. Returns the model itself."""
        self.network.fuse_attention(False)
        return self

    def init_weights(self) -> None:
        """Nothing: the network has drawn or loaded its weights."""


def new_classifier(shape: EncoderConfig, *, labels: Sequence[str], pad_id: int) -> OwnClassifier:
    """A classifier of random weights, by PyTorch's seed; `shape` without its number of labels."""
    config = OwnConfig(
        encoder=asdict(replace(shape, labels=len(labels))),
        vocab_size=shape.words,
        max_position_embeddings=shape.max_tokens,
        pad_token_id=pad_id,
        id2label=dict(enumerate(labels)),
        label2id={name: index for index, name in enumerate(labels)},
        problem_type="single_label_classification",
    )
    return OwnClassifier(config)


def load_own(folder: Path) -> OwnClassifier:
    """The classifier that a folder of `save_pretrained` holds. Raises ConfigError."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "model.safetensors")
        model = rebuild_own(config)
        model.load_state_dict(weights)
        model.train(False)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{folder}: not a classifier of ours: {error}") from error
    return model


def rebuild_own(architecture: Mapping[str, Any]) -> OwnClassifier:
    """The network of a configuration (as JSON), with random weights. Raises ConfigError."""
    try:
        values = {name: value for name, value in architecture.items() if name != "model_type"}
        return OwnClassifier(OwnConfig(**values))
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"the configuration makes no sense: {error}") from error


def is_own(folder: Path) -> bool:
    """Whether the folder holds a classifier with a configuration of our own."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return bool(config.get("model_type") == MODEL_TYPE)
    except (OSError, ValueError, AttributeError):
        return False


def through_encoder(model: PreTrainedModel) -> PreTrainedModel:
    """Our encoder with the weights of a model, attention written out; another family is given back as it is.

    A graph that is made from it is plainer than one that is made from the library's model.
    """
    if isinstance(model, OwnClassifier):
        return model.written_out()
    try:
        return from_library(model).written_out().eval()  # type: ignore[no-any-return, no-untyped-call]
    except ConfigError:
        return model


def from_library(model: PreTrainedModel) -> OwnClassifier:
    """Our encoder with copies of the weights of a library's model. Raises ConfigError for another family."""
    try:
        network = from_checkpoint(model.config.to_dict(), model.state_dict())
    except PretrainedError as error:
        raise ConfigError(f"the encoder cannot take the weights: {error}") from error
    return OwnClassifier(copy.deepcopy(model.config), network)


def to_library(model: OwnClassifier) -> PreTrainedModel:
    """The library's model with the weights of ours; one that began at random is returned as it is."""
    kind = model.config.model_type
    if kind not in FAMILIES:
        return model
    library: PreTrainedModel = AutoModelForSequenceClassification.from_config(model.config)  # type: ignore[no-untyped-call]
    library.load_state_dict(to_checkpoint(model.network, kind))
    return library


def kept_names(model: PreTrainedModel) -> dict[str, str]:
    """The name under which each parameter is kept in a file: the library's, where it has one."""
    ours = [name for name, _ in model.named_parameters()]
    family = FAMILIES.get(model.config.model_type)
    if family is None or not isinstance(model, OwnClassifier):
        return {name: name for name in ours}
    names = family.names(model.network.config)
    return {name: names[name.removeprefix("network.")] for name in ours}
