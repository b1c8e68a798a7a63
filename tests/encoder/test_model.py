"""Layers, positions and the classifier, against PyTorch's own layers and the formulas of the papers."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from encoder.config import EncoderConfig
from encoder.model import (
    ClassificationHead,
    Encoder,
    SequenceClassifier,
    TransformerEncoderLayer,
    sinusoids,
)
from tests.encoder.builders import LONGEST, batch, build, largest, scatter, small

IDS, MASK = batch()
NORMS = pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])


def pytorch_layer(ours: TransformerEncoderLayer, config: EncoderConfig) -> nn.TransformerEncoderLayer:
    """PyTorch's layer with our weights."""
    theirs = nn.TransformerEncoderLayer(
        config.width,
        config.heads,
        config.inner_width,
        dropout=0.0,
        activation="gelu",
        layer_norm_eps=config.norm_eps,
        batch_first=True,
        norm_first=config.norm_first,
    )
    asking = (ours.attention.query, ours.attention.key, ours.attention.value)
    with torch.no_grad():
        theirs.self_attn.in_proj_weight.copy_(torch.cat([part.weight for part in asking]))
        theirs.self_attn.in_proj_bias.copy_(torch.cat([part.bias for part in asking]))
    theirs.self_attn.out_proj.load_state_dict(ours.attention.output.state_dict())
    theirs.linear1.load_state_dict(ours.up.state_dict())
    theirs.linear2.load_state_dict(ours.down.state_dict())
    theirs.norm1.load_state_dict(ours.attention_norm.state_dict())
    theirs.norm2.load_state_dict(ours.feed_forward_norm.state_dict())
    return theirs


@NORMS
@pytest.mark.parametrize("causal", [False, True])
def test_encoder_is_that_of_pytorch(*, norm_first: bool, causal: bool) -> None:
    config = small(norm_first=norm_first, layers=3, norm_eps=1e-3, token_types=2)
    torch.manual_seed(0)
    encoder = scatter(Encoder(config))
    types = IDS % 2
    n = IDS.shape[1]
    assert encoder.types is not None
    x = encoder.words(IDS) + encoder.types(types) + encoder.positions(torch.arange(n))
    x = x if norm_first else encoder.norm(x)
    ahead = torch.ones(n, n, dtype=torch.bool).triu(1) if causal else None
    for layer in encoder.layers:
        assert isinstance(layer, TransformerEncoderLayer)
        x = pytorch_layer(layer, config)(x, src_mask=ahead, src_key_padding_mask=MASK == 0)
    expected = encoder.norm(x) if norm_first else x
    states = encoder(IDS, MASK, token_types=types, causal=causal).states
    real = MASK == 1
    assert largest(states[real] - expected[real]) <= 1e-4


def test_pre_norm_and_post_norm_differ() -> None:
    before, after = (build(norm_first=norm_first) for norm_first in (True, False))
    after.load_state_dict(before.state_dict())
    assert largest(before(IDS, MASK) - after(IDS, MASK)) > 0.01


def test_no_types_given_means_type_0() -> None:
    classifier = build(token_types=2)
    assert torch.equal(classifier(IDS, MASK), classifier(IDS, MASK, torch.zeros_like(IDS)))
    assert largest(classifier(IDS, MASK) - classifier(IDS, MASK, torch.ones_like(IDS))) > 1e-3


@pytest.mark.parametrize("rows", [1, 7, 512])
def test_sinusoids_are_those_of_the_paper(rows: int) -> None:
    width = 32
    table = [
        [f(p / 10_000 ** (2 * i / width)) for i in range(width // 2) for f in (math.sin, math.cos)]
        for p in range(rows)
    ]
    assert largest(sinusoids(rows, width) - torch.tensor(table)) <= 1e-6


def shuffled(ids: Tensor) -> Tensor:
    """The same words in another order behind the first."""
    order = torch.tensor([0, *range(ids.shape[1] - 1, 0, -1)])
    return ids[:, order]


@NORMS
def test_without_positions_a_shuffled_text_gets_the_same_answer(*, norm_first: bool) -> None:
    classifier = build(positions="none", norm_first=norm_first)
    assert largest(classifier(IDS) - classifier(shuffled(IDS))) <= 1e-5


@NORMS
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_positions_tell_a_shuffled_text_apart(positions: str, *, norm_first: bool) -> None:
    classifier = build(positions=positions, norm_first=norm_first)
    assert largest(classifier(IDS[1:2]) - classifier(shuffled(IDS[1:2]))) > 1e-3


def test_positions_start_behind_the_offset() -> None:
    plain, offset = build(), build(position_offset=2)
    table = offset.encoder.positions.weight.detach()
    weights = {**offset.state_dict(), "encoder.positions.weight": table[2:]}
    plain.load_state_dict(weights)
    assert table.shape == (LONGEST + 2, 32)
    assert torch.equal(plain(IDS, MASK), offset(IDS, MASK))


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "none"])
@pytest.mark.parametrize("position_offset", [0, 2])
def test_a_text_that_is_too_long_is_refused(positions: str, position_offset: int) -> None:
    classifier = build(positions=positions, position_offset=position_offset)
    assert classifier(batch([LONGEST]).ids).isfinite().all()
    with pytest.raises(ValueError, match="17 tokens are more than the 16 "):
        classifier(batch([LONGEST + 1]).ids)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({name: 0}, f"{name}: 0") for name in ("words", "max_tokens", "labels", "width", "layers")),
        ({"heads": 0}, "heads: 0"),
        ({"inner_width": -1}, "inner_width: -1 is no whole number from 1 up"),
        ({"width": 32.0}, "width: 32.0 is no whole number"),
        ({"positions": "sinusodial"}, "positions: 'sinusodial' is not one of learned, sinusoidal, none"),
        ({"head": "brt"}, "head: 'brt' is not one of bert, distilbert, roberta"),
        ({"dropout": 7.0}, "dropout: 7.0 is not from 0 to below 1"),
        ({"norm_eps": -1.0}, "norm_eps: -1.0 is not above 0"),
        ({"token_types": -1}, "token_types: -1 is no whole number from 0 up"),
        ({"position_offset": -1}, "position_offset: -1"),
        ({"heads": 5}, "width: 32 cannot be shared out to 5 heads"),
        ({"width": 33, "heads": 3, "positions": "sinusoidal"}, "width: 33 is odd"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        small(**changes)


@pytest.mark.parametrize(
    ("kind", "activation"), [("bert", torch.tanh), ("distilbert", torch.relu), ("roberta", torch.tanh)]
)
def test_heads_follow_their_formula(kind: str, activation: Any) -> None:
    torch.manual_seed(0)
    head = scatter(ClassificationHead(small(head=kind)))
    x = torch.randn(5, 32)
    inside = activation(functional.linear(x, head.dense.weight, head.dense.bias))
    assert largest(head(x) - functional.linear(inside, head.output.weight, head.output.bias)) <= 1e-6


def test_classifier_reads_the_first_token() -> None:
    classifier = build()
    states = classifier.encoder(IDS, MASK).states
    assert largest(classifier(IDS, MASK) - classifier.head(states[:, 0])) <= 1e-5
    assert classifier(IDS, MASK).shape == (4, 3)


def test_new_weights_are_drawn_as_those_of_bert() -> None:
    torch.manual_seed(0)
    classifier = SequenceClassifier(small(width=64, spread=0.02, layers=1))
    for name, parameter in classifier.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("weight")))), name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.numel() > 1000:
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.1), name


def test_linear_layers_of_the_encoder_can_go_without_biases() -> None:
    names = [name for name, _ in build(bias=False).encoder.named_parameters() if name.endswith("bias")]
    assert names
    assert all("norm" in name for name in names)
    assert build(bias=False)(IDS, MASK).isfinite().all()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_other_precisions_run(positions: str, *, fused: bool) -> None:
    mask = MASK.clone()
    mask[1] = 0
    classifier = build(positions=positions, fused=fused, token_types=2)
    plain = classifier(IDS, mask)
    exact = classifier.to(torch.float64)(IDS, mask)
    assert exact.dtype == torch.float64
    assert largest(exact - plain) <= 1e-4
    rough = classifier.to(torch.bfloat16)(IDS, mask)
    assert rough.dtype == torch.bfloat16
    assert rough.isfinite().all()
    assert largest(rough - plain) <= 0.1 * largest(plain)
