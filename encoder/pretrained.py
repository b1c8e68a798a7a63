"""Loads fine-tuned classifiers of the BERT family into our encoder, by an explicit table of names.

Strict: each tensor of the file has its place, each place its tensor, in the right shape; what does not fit is
named. Knows nothing of transformers (the library), tokenizers, training or serving.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from encoder.config import EncoderConfig, Head
from encoder.model import SequenceClassifier


class PretrainedError(ValueError):
    """The checkpoint is not one of the family, or not whole; the message names what is wrong."""


@dataclass(frozen=True, slots=True)
class Family:
    """How a kind of checkpoint names things.

    Attributes:
        read: its configuration -> ours.
        table: our module -> its module.
        layers: where its layers are, the prefix of `in_layer`.
        in_layer: the same inside a layer.
        ignored: tensors that hold no weights; old releases saved them.
    """

    read: Callable[[Mapping[str, Any]], EncoderConfig]
    table: Mapping[str, str]
    in_layer: Mapping[str, str]
    layers: str
    ignored: frozenset[str]

    def names(self, config: EncoderConfig) -> dict[str, str]:
        """The name in the checkpoint of each of our parameters, in our order."""
        with torch.device("meta"):
            ours = [name for name, _ in SequenceClassifier(config).named_parameters()]
        return {name: self._name(name) for name in ours}

    def _name(self, ours: str) -> str:
        module, _, leaf = ours.rpartition(".")
        if module in self.table:
            return f"{self.table[module]}.{leaf}"
        number, _, part = module.removeprefix("encoder.layers.").partition(".")
        return f"{self.layers}.{number}.{self.in_layer[part]}.{leaf}"


_BERT_LAYER = MappingProxyType(
    {
        "attention.query": "attention.self.query",
        "attention.key": "attention.self.key",
        "attention.value": "attention.self.value",
        "attention.output": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "feed_forward_norm": "output.LayerNorm",
    }
)
_DISTILBERT_LAYER = MappingProxyType(
    {
        "attention.query": "attention.q_lin",
        "attention.key": "attention.k_lin",
        "attention.value": "attention.v_lin",
        "attention.output": "attention.out_lin",
        "attention_norm": "sa_layer_norm",
        "up": "ffn.lin1",
        "down": "ffn.lin2",
        "feed_forward_norm": "output_layer_norm",
    }
)


def _read_bert(config: Mapping[str, Any]) -> EncoderConfig:
    return _read(config, head="bert")


def _read_roberta(config: Mapping[str, Any]) -> EncoderConfig:
    # Positions are counted from the id of the padding token + 1.
    return _read(config, head="roberta", position_offset=int(config.get("pad_token_id", 1)) + 1)


def _read(config: Mapping[str, Any], *, head: Head, position_offset: int = 0) -> EncoderConfig:
    """BERT, MiniLM and RoBERTa name their sizes alike."""
    _require(config, "hidden_act", "gelu")
    _require(config, "position_embedding_type", "absolute")
    _require(config, "is_decoder", False)
    dropout = float(config.get("hidden_dropout_prob", 0.1))
    head_dropout = config.get("classifier_dropout")
    return EncoderConfig(
        words=config["vocab_size"],
        max_tokens=config["max_position_embeddings"] - position_offset,
        labels=_labels(config),
        width=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        inner_width=config["intermediate_size"],
        norm_first=False,
        position_offset=position_offset,
        token_types=config.get("type_vocab_size", 2),
        head=head,
        dropout=dropout,
        attention_dropout=float(config.get("attention_probs_dropout_prob", 0.1)),
        head_dropout=dropout if head_dropout is None else float(head_dropout),
        norm_eps=float(config.get("layer_norm_eps", 1e-12)),
    )


def _read_distilbert(config: Mapping[str, Any]) -> EncoderConfig:
    _require(config, "activation", "gelu")
    return EncoderConfig(
        words=config["vocab_size"],
        max_tokens=config["max_position_embeddings"],
        labels=_labels(config),
        width=config["dim"],
        layers=config["n_layers"],
        heads=config["n_heads"],
        inner_width=config["hidden_dim"],
        norm_first=False,
        head="distilbert",
        dropout=float(config.get("dropout", 0.1)),
        attention_dropout=float(config.get("attention_dropout", 0.1)),
        head_dropout=float(config.get("seq_classif_dropout", 0.2)),
    )


def _require(config: Mapping[str, Any], name: str, value: object) -> None:
    """Raises PretrainedError when the configuration says something else; what it leaves out is the usual."""
    if config.get(name, value) != value:
        raise PretrainedError(f"{name} is {config[name]!r}, and the encoder has {value!r}")


def _labels(config: Mapping[str, Any]) -> int:
    return len(config["id2label"]) if "id2label" in config else int(config.get("num_labels", 2))


_ROBERTA = Family(
    read=_read_roberta,
    table=MappingProxyType(
        {
            "encoder.words": "roberta.embeddings.word_embeddings",
            "encoder.positions": "roberta.embeddings.position_embeddings",
            "encoder.types": "roberta.embeddings.token_type_embeddings",
            "encoder.norm": "roberta.embeddings.LayerNorm",
            "head.dense": "classifier.dense",
            "head.output": "classifier.out_proj",
        }
    ),
    layers="roberta.encoder.layer",
    in_layer=_BERT_LAYER,
    ignored=frozenset({"roberta.embeddings.position_ids"}),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "bert": Family(
            read=_read_bert,
            table=MappingProxyType(
                {
                    "encoder.words": "bert.embeddings.word_embeddings",
                    "encoder.positions": "bert.embeddings.position_embeddings",
                    "encoder.types": "bert.embeddings.token_type_embeddings",
                    "encoder.norm": "bert.embeddings.LayerNorm",
                    "head.dense": "bert.pooler.dense",
                    "head.output": "classifier",
                }
            ),
            layers="bert.encoder.layer",
            in_layer=_BERT_LAYER,
            ignored=frozenset({"bert.embeddings.position_ids"}),
        ),
        "distilbert": Family(
            read=_read_distilbert,
            table=MappingProxyType(
                {
                    "encoder.words": "distilbert.embeddings.word_embeddings",
                    "encoder.positions": "distilbert.embeddings.position_embeddings",
                    "encoder.norm": "distilbert.embeddings.LayerNorm",
                    "head.dense": "pre_classifier",
                    "head.output": "classifier",
                }
            ),
            layers="distilbert.transformer.layer",
            in_layer=_DISTILBERT_LAYER,
            ignored=frozenset({"distilbert.embeddings.position_ids"}),
        ),
        "roberta": _ROBERTA,
        "xlm-roberta": _ROBERTA,
        "camembert": _ROBERTA,
    }
)
"""By `model_type` of the configuration. MiniLM is a small BERT."""


def read_config(config: Mapping[str, Any], *, norm_first: bool = False) -> EncoderConfig:
    """The shape of a checkpoint, from its config.json.

    Raises:
        PretrainedError: another family, a size is missing or senseless, something that the encoder does not
            compute, or `norm_first`: these models are post-norm, and in a pre-norm encoder their weights fit
            and give wrong answers.
    """
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise PretrainedError(f"model_type is {kind!r}; there are {', '.join(FAMILIES)}")
    if norm_first:
        raise PretrainedError(
            f"{kind} is post-norm: its weights fit a pre-norm encoder, and give wrong answers"
        )
    try:
        return FAMILIES[kind].read(config)
    except PretrainedError:
        raise
    except KeyError as error:
        raise PretrainedError(f"the configuration does not say {error.args[0]}") from error
    except (TypeError, ValueError) as error:
        raise PretrainedError(f"the configuration makes no sense: {error}") from error


def from_checkpoint(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, norm_first: bool = False
) -> SequenceClassifier:
    """A classifier with the weights of a checkpoint, by its names, as float32.

    Raises:
        PretrainedError: a tensor is missing, unexpected or of another shape (it is named); `read_config`.
    """
    shape = read_config(config, norm_first=norm_first)
    family = FAMILIES[config["model_type"]]
    names = family.names(shape)
    if missing := sorted(set(names.values()) - set(tensors)):
        raise PretrainedError(f"{missing[0]} is missing{_and_more(missing)}")
    if unexpected := sorted(set(tensors) - set(names.values()) - family.ignored):
        raise PretrainedError(f"{unexpected[0]} has no place in the encoder{_and_more(unexpected)}")
    with torch.device("meta"):
        classifier = SequenceClassifier(shape)
    for ours, parameter in classifier.named_parameters():
        given = tensors[names[ours]]
        if given.shape != parameter.shape:
            raise PretrainedError(f"{names[ours]} is {[*given.shape]}, and {[*parameter.shape]} is wanted")
    weights = {ours: tensors[name].to(torch.float32, copy=True) for ours, name in names.items()}
    classifier.load_state_dict(weights, assign=True)
    return classifier


def to_checkpoint(classifier: SequenceClassifier, kind: str) -> dict[str, Tensor]:
    """The weights under the names of that `model_type`: what `from_checkpoint` reads."""
    names = FAMILIES[kind].names(classifier.config)
    return {names[ours]: parameter.detach() for ours, parameter in classifier.named_parameters()}


def _and_more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""
