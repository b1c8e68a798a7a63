"""Weights that are kept stay bit for bit, the rest learns; attention forgets as much as it is told."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from tests.training.tiny import Kind, make_base, tiny_config, write_data
from training.config import ConfigError
from training.partial import freeze, set_attention_dropout
from training.pretrained import load_base
from training.train import fit

KINDS: tuple[Kind, ...] = ("bert", "distilbert", "roberta", "mpnet")
LABELS = ("negative", "positive")


def opened(base: Path) -> PreTrainedModel:
    return load_base(str(base), LABELS)[0]


def is_above(name: str, layer: str) -> bool:
    """Whether a weight stands in this layer or in what comes after the encoder."""
    return f"layer.{layer}." in name or "pooler" in name or "classifier" in name


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_stay_bit_for_bit_and_all_others_move(tmp_path: Path, kind: Kind) -> None:
    """A tiny base has two layers: the first is kept, with the embeddings and what all layers share."""
    base = make_base(tmp_path / "base", kind)
    torch.manual_seed(42)
    before = opened(base).state_dict()
    config = tiny_config(base, write_data(tmp_path / "data"), epochs=1, freeze_layers=1)
    metrics = fit(config, tmp_path / "run", threads=1)
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert after.keys() == before.keys()
    same = {name for name, weight in before.items() if torch.equal(weight, after[name])}
    kept = {name for name in after if not is_above(name, "1")}
    assert kept <= same
    assert metrics["fresh_weights"]
    # The bias of the keys shifts all scores of a query alike, so that it has no gradient to speak of.
    assert {name for name in same - kept if not name.endswith(("k_lin.bias", "key.bias", "k.bias"))} == set()


@pytest.mark.parametrize("kind", KINDS)
def test_with_no_layer_to_keep_the_embeddings_alone_are_kept(tmp_path: Path, kind: Kind) -> None:
    model = opened(make_base(tmp_path / "base", kind))
    freeze(model, 0)
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    assert frozen
    assert all("embeddings" in name or "relative_attention_bias" in name for name in frozen)


@pytest.mark.parametrize("kind", KINDS)
def test_all_layers_may_be_kept_and_the_head_learns(tmp_path: Path, kind: Kind) -> None:
    model = opened(make_base(tmp_path / "base", kind))
    freeze(model, 2)
    learning = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert learning
    assert all("classifier" in name or "pooler" in name for name in learning)


@pytest.mark.parametrize("kind", KINDS)
def test_more_layers_than_there_are_cannot_be_kept(tmp_path: Path, kind: Kind) -> None:
    with pytest.raises(ConfigError, match="freeze_layers: the base has not one list of 3 layers or more"):
        freeze(opened(make_base(tmp_path / "base", kind)), 3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_dropout_of_attention_is_set_and_no_other(tmp_path: Path, kind: Kind) -> None:
    model = opened(make_base(tmp_path / "base", kind))
    before = {name: part.p for name, part in model.named_modules() if isinstance(part, nn.Dropout)}
    set_attention_dropout(model, 0.25)
    after = {name: part.p for name, part in model.named_modules() if isinstance(part, nn.Dropout)}
    changed = [name for name in before if before[name] != after[name]]
    assert len(changed) == 2
    assert all(after[name] == 0.25 and "att" in name for name in changed)


@pytest.mark.parametrize("kind", KINDS)
def test_without_dropout_in_attention_and_elsewhere_a_model_that_trains_answers_twice_the_same(
    tmp_path: Path, kind: Kind
) -> None:
    """What is set is what the attention reads: with only that dropout left, answers vary by it alone."""
    model = opened(make_base(tmp_path / "base", kind)).train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    words = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64)}
    set_attention_dropout(model, 0.5)
    assert not torch.equal(model(**words).logits, model(**words).logits)
    set_attention_dropout(model, 0.0)
    assert torch.equal(model(**words).logits, model(**words).logits)


def test_a_model_without_dropout_in_its_attention_is_refused(tmp_path: Path) -> None:
    model = opened(make_base(tmp_path / "base"))
    for part in model.modules():
        for name, child in list(part.named_children()):
            if isinstance(child, nn.Dropout):
                setattr(part, name, nn.Identity())
    with pytest.raises(ConfigError, match="attention_dropout: the base has no dropout in its attention"):
        set_attention_dropout(model, 0.0)


@pytest.mark.parametrize(("field", "value"), [("freeze_layers", -1), ("attention_dropout", 1.0)])
def test_values_that_make_no_sense_are_refused(tmp_path: Path, field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field}: "):
        tiny_config(tmp_path, tmp_path, **{field: value})


@pytest.mark.parametrize(("field", "value"), [("freeze_layers", 1), ("attention_dropout", 0.0)])
def test_our_own_encoder_is_not_for_this(tmp_path: Path, field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field}: .* of a library encoder"):
        tiny_config(tmp_path, tmp_path, encoder="own", **{field: value})
