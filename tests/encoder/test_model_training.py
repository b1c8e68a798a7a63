"""Gradients reach what they should, a step helps, and eight examples are learned by heart."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from encoder.model import SequenceClassifier
from tests.encoder.builders import batch, build, largest, small

IDS, MASK = batch([16, 9, 3, 12, 7, 5, 14, 2])
LABELS = torch.tensor([0, 1, 2, 1, 0, 2, 1, 0])
HEADS = ("bert", "distilbert", "roberta")


def loss_of(classifier: SequenceClassifier) -> Tensor:
    return functional.cross_entropy(classifier(IDS, MASK), LABELS)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "written out"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_gradients_reach_every_parameter(head: str, *, norm_first: bool, fused: bool) -> None:
    classifier = build(head=head, norm_first=norm_first, fused=fused, token_types=2)
    loss_of(classifier).backward()  # type: ignore[no-untyped-call]
    for name, parameter in classifier.named_parameters():
        assert parameter.grad is not None, name
        if name.endswith("attention.key.bias"):
            # It adds the same to all scores of a query, and the softmax takes that out: no gradient.
            assert largest(parameter.grad) <= 1e-6, name
        else:
            assert largest(parameter.grad) > 1e-5, name
    positions = classifier.encoder.positions.weight.grad
    assert isinstance(positions, Tensor)
    assert positions.any(dim=1).all()
    words = classifier.encoder.words.weight.grad
    assert isinstance(words, Tensor)
    assert words.any(dim=1).nonzero()[:, 0].tolist() == sorted(set(IDS[MASK == 1].tolist()))


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_a_step_reduces_the_loss(*, norm_first: bool) -> None:
    classifier = build(norm_first=norm_first)
    before = loss_of(classifier)
    before.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(classifier.parameters(), lr=0.01).step()
    assert float(loss_of(classifier).detach()) < float(before.detach()) - 1e-3


def test_eight_examples_are_learned_by_heart() -> None:
    torch.manual_seed(0)
    classifier = SequenceClassifier(small(spread=0.02, dropout=0.1, attention_dropout=0.1)).train()
    start = float(loss_of(classifier).detach())
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=5e-3)
    for _ in range(80):
        optimizer.zero_grad()
        loss_of(classifier).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert start > 1.0
    assert float(loss_of(classifier.eval()).detach()) < 0.05
