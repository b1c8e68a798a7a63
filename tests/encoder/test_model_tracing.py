"""Traced and exported, the classifier gives what it gives eagerly, whatever the shape of the batch."""

import warnings

import pytest
import torch

from encoder.model import SequenceClassifier
from tests.encoder.builders import LONGEST, Batch, batch, build, largest

SHAPES = ([5, 11, 3, 8], [2], [LONGEST], [7, 7], [1, 16, 4], [3] * 9)
WAYS = pytest.mark.parametrize("fused", [True, False], ids=["fused", "written out"])
KINDS = pytest.mark.parametrize(
    ("positions", "norm_first", "token_types"),
    [("learned", False, 2), ("learned", True, 0), ("sinusoidal", True, 0), ("none", False, 0)],
)


def inputs(lengths: list[int], token_types: int) -> tuple[torch.Tensor, ...]:
    """Ids and mask, and token types where there are any."""
    made: Batch = batch(lengths)
    return (*made, made.ids % 2) if token_types else tuple(made)


def built(positions: str, token_types: int, *, norm_first: bool, fused: bool) -> SequenceClassifier:
    return build(
        positions=positions, norm_first=norm_first, token_types=token_types, position_offset=2, fused=fused
    )


@KINDS
@WAYS
def test_traced(positions: str, token_types: int, *, norm_first: bool, fused: bool) -> None:
    classifier = built(positions, token_types, norm_first=norm_first, fused=fused)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch.jit")
        traced = torch.jit.trace(classifier, inputs([4, 6, 2], token_types))  # type: ignore[no-untyped-call]
    for lengths in SHAPES:
        given = inputs(lengths, token_types)
        assert largest(traced(*given) - classifier(*given)) <= 1e-5


@pytest.mark.parametrize(
    ("positions", "norm_first", "token_types", "fused"),
    [("learned", False, 2, False), ("sinusoidal", True, 0, True)],
    ids=["post-norm, written out", "pre-norm, fused"],
)
def test_exported(positions: str, token_types: int, *, norm_first: bool, fused: bool) -> None:
    classifier = built(positions, token_types, norm_first=norm_first, fused=fused)
    example = inputs([4, 6, 2], token_types)
    sizes = {0: torch.export.Dim("b", min=1, max=64), 1: torch.export.Dim("n", min=2, max=LONGEST)}
    shapes = dict.fromkeys(("ids", "mask", "token_types")[: len(example)], sizes)
    program = torch.export.export(classifier, example, dynamic_shapes=shapes)
    called = {str(node.target) for node in program.graph.nodes}
    assert any("scaled_dot_product_attention" in name for name in called) == fused
    exported = program.module()
    for lengths in SHAPES:
        given = inputs(lengths, token_types)
        assert largest(exported(*given) - classifier(*given)) <= 1e-5
