"""Builds tiny random classifiers of the transformers library, of each family, and reads what it has saved."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from encoder.model import SequenceClassifier
from encoder.pretrained import from_checkpoint
from tests.encoder.builders import WORDS, scatter

KINDS = ("bert", "distilbert", "roberta", "xlm-roberta", "camembert")
LONGEST = 30
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    # Far from the default: what does not read it is seen.
    "layer_norm_eps": 1e-2,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.2,
    "classifier_dropout": 0.3,
}
_DISTILBERT_SIZES: dict[str, Any] = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 40,
    "dropout": 0.1,
    "attention_dropout": 0.15,
    "seq_classif_dropout": 0.3,
}


def has_offset(kind: str) -> bool:
    """Whether its first position is that of row 2."""
    return kind not in {"bert", "distilbert"}


def pad_id_of(kind: str) -> int:
    return 1 if has_offset(kind) else 0


def make_library(kind: str, *, labels: int = 3, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A classifier of the library with random weights, that has opinions; attention written out."""
    sizes = _DISTILBERT_SIZES if kind == "distilbert" else _SIZES
    config = AutoConfig.for_model(
        kind,
        **{
            **sizes,
            "vocab_size": WORDS,
            "num_labels": labels,
            "max_position_embeddings": LONGEST + (2 if has_offset(kind) else 0),
            "initializer_range": 0.2,
            **changes,
        },
    )
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation="eager"
    )
    model.train(False)
    return scatter(model, seed=seed)


def load_saved(folder: Path, *, norm_first: bool = False) -> SequenceClassifier:
    """Ours of a folder that `save_pretrained` wrote, without dropout."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return from_checkpoint(config, load_file(folder / "model.safetensors"), norm_first=norm_first).eval()
