"""Attention: two ways that agree, weights on request, and masks that hide what they say they hide."""

import pytest
import torch
from torch import Tensor, nn

from encoder.model import Encoder, MultiHeadSelfAttention, attention_bias
from tests.encoder.builders import LONGEST, WORDS, batch, build, largest, scatter, small

IDS, MASK = batch()
MASKS = pytest.mark.parametrize(
    ("mask", "causal"),
    [(None, False), (MASK, False), (None, True), (MASK, True)],
    ids=["all", "padding", "causal", "padding and causal"],
)
NORMS = pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
WAYS = pytest.mark.parametrize("fused", [True, False], ids=["fused", "written out"])


def same_encoders(*, norm_first: bool) -> tuple[Encoder, Encoder]:
    """Fused and written out, with the same weights."""
    fused, written = (build(norm_first=norm_first, fused=fused).encoder for fused in (True, False))
    return fused, written


@MASKS
@NORMS
def test_two_ways_agree(mask: Tensor | None, *, causal: bool, norm_first: bool) -> None:
    fused, written = same_encoders(norm_first=norm_first)
    ours, theirs = (encoder(IDS, mask, causal=causal).states for encoder in (fused, written))
    assert largest(ours - theirs) <= 1e-5


@MASKS
def test_two_ways_give_the_same_gradients(mask: Tensor | None, *, causal: bool) -> None:
    fused, written = same_encoders(norm_first=True)
    for encoder in (fused, written):
        encoder(IDS, mask, causal=causal).states.square().mean().backward()
    pairs = zip(fused.layers.parameters(), written.layers.parameters(), strict=True)
    for ours, theirs in pairs:
        assert ours.grad is not None
        assert theirs.grad is not None
        assert largest(ours.grad - theirs.grad) <= 1e-5


@pytest.mark.parametrize("bias", [True, False])
def test_attention_is_that_of_pytorch(*, bias: bool) -> None:
    torch.manual_seed(0)
    ours = scatter(MultiHeadSelfAttention(32, 4, bias=bias))
    theirs = nn.MultiheadAttention(32, 4, bias=bias, batch_first=True)
    parts = (ours.query, ours.key, ours.value)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        if bias:
            theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
    theirs.out_proj.load_state_dict(ours.output.state_dict())
    x = torch.randn(len(MASK), MASK.shape[1], 32)
    expected, weights = theirs(x, x, x, key_padding_mask=MASK == 0, average_attn_weights=False)
    shown = ours(x, attention_bias(MASK, x), return_weights=True)
    assert largest(shown.states - expected) <= 1e-5
    assert largest(shown.weights - weights) <= 1e-6


@MASKS
@WAYS
@NORMS
def test_weights_are_shown_and_change_nothing(
    mask: Tensor | None, *, causal: bool, fused: bool, norm_first: bool
) -> None:
    encoder = build(norm_first=norm_first, fused=fused).encoder
    shown = encoder(IDS, mask, causal=causal, return_weights=True)
    hidden = encoder(IDS, mask, causal=causal)
    assert hidden.weights == ()
    assert largest(shown.states - hidden.states) <= 1e-5
    b, n = IDS.shape
    assert [tuple(weights.shape) for weights in shown.weights] == [(b, 4, n, n)] * 2
    for weights in shown.weights:
        assert largest(weights.sum(3) - 1) <= 1e-5
        assert (weights >= 0).all()
        if mask is not None:
            assert not weights[(mask == 0)[:, None, None, :].expand_as(weights)].any()
        if causal:
            assert torch.equal(weights, weights.tril())
        seen = weights > 0
        allowed = torch.ones(n, n).tril() if causal else torch.ones(n, n)
        wanted = allowed.expand(b, n, n) if mask is None else allowed * mask[:, None, :]
        assert torch.equal(seen, wanted.bool()[:, None].expand_as(seen))


@WAYS
@NORMS
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("filling", ["zeros", "other words"])
def test_padding_changes_no_real_token(
    positions: str, filling: str, *, fused: bool, norm_first: bool
) -> None:
    encoder = build(positions=positions, norm_first=norm_first, fused=fused).encoder
    dice = torch.Generator().manual_seed(5)
    for length in (1, 4, LONGEST - 1):
        alone, real = batch([length], seed=length)
        added = torch.randint(1, WORDS, (1, LONGEST - length), generator=dice)
        ids = torch.cat([alone, added if filling == "other words" else torch.zeros_like(added)], 1)
        mask = torch.cat([real, torch.zeros_like(added)], 1)
        padded = encoder(ids, mask).states[:, :length]
        assert largest(padded - encoder(alone, real).states) <= 1e-5
        assert largest(padded - encoder(ids).states[:, :length]) > 1e-3  # the mask is what hides it


@WAYS
@NORMS
@pytest.mark.parametrize("padded", [False, True])
def test_causal_never_looks_ahead(*, fused: bool, norm_first: bool, padded: bool) -> None:
    encoder = build(norm_first=norm_first, fused=fused).encoder
    n = 6
    ids = torch.arange(5, 5 + n)[None]  # no word twice: a row of the table is one token of the text
    mask = torch.tensor([[1] * 4 + [0] * 2]) if padded else None
    for i in range(n if mask is None else 4):
        encoder.zero_grad()
        encoder(ids, mask, causal=True).states[0, i].square().sum().backward()
        gradient = encoder.words.weight.grad
        assert gradient is not None
        moved = gradient[ids[0]].abs().amax(1)
        assert not moved[i + 1 :].any()
        assert (moved[: i + 1] > 0).all()


@WAYS
@NORMS
@pytest.mark.parametrize("causal", [False, True])
def test_a_text_with_nothing_to_see_gives_no_nan(*, fused: bool, norm_first: bool, causal: bool) -> None:
    classifier = build(norm_first=norm_first, fused=fused)
    hidden = MASK.clone()
    hidden[1] = 0
    states = classifier.encoder(IDS, hidden, causal=causal).states
    assert states.isfinite().all()
    others = [0, 2, 3]
    alone = classifier.encoder(IDS[others], MASK[others], causal=causal).states
    assert largest(states[others] - alone) <= 1e-5
    (states.square().mean() + classifier(IDS, hidden).square().mean()).backward()
    for name, parameter in classifier.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@WAYS
@NORMS
@MASKS
def test_the_first_token_alone_is_what_the_whole_gives(
    mask: Tensor | None, *, causal: bool, fused: bool, norm_first: bool
) -> None:
    encoder = build(norm_first=norm_first, fused=fused).encoder
    whole = encoder(IDS, mask, causal=causal, return_weights=True)
    first = encoder(IDS, mask, causal=causal, first_only=True)
    assert first.states.shape == (len(IDS), 1, 32)
    assert largest(first.states - whole.states[:, :1]) <= 1e-5
    shown = encoder(IDS, mask, causal=causal, first_only=True, return_weights=True).weights
    assert largest(shown[0] - whole.weights[0]) <= 1e-6
    assert shown[1].shape == (len(IDS), 4, 1, IDS.shape[1])
    assert largest(shown[1] - whole.weights[1][:, :, :1]) <= 1e-6


@WAYS
def test_dropout_of_weights_is_for_training_alone(*, fused: bool) -> None:
    config = small(attention_dropout=0.5)
    torch.manual_seed(0)
    encoder = Encoder(config)
    for module in encoder.modules():
        if isinstance(module, MultiHeadSelfAttention):
            module.fused = fused
    assert largest(encoder(IDS, MASK).states - encoder(IDS, MASK).states) > 1e-3
    encoder.eval()
    assert torch.equal(encoder(IDS, MASK).states, encoder(IDS, MASK).states)
