"""Parity with the transformers library: random weights of each family, and the weights of the repository."""

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from encoder.model import SequenceClassifier
from encoder.pretrained import from_checkpoint
from service.store import open_version
from tests.encoder.builders import batch, largest
from tests.encoder.checkpoints import KINDS, LONGEST, load_saved, make_library, pad_id_of

BOUND = 1e-4
STORE = Path(__file__).parents[2] / "model_store"
LENGTHS = ([7, 3, LONGEST, 1, 12], [1], [LONGEST, LONGEST], [2, 5])


def library_logits(model: PreTrainedModel, ids: Tensor, mask: Tensor, types: Tensor | None = None) -> Tensor:
    extra = {} if types is None else {"token_type_ids": types}
    logits: Tensor = model(input_ids=ids, attention_mask=mask, **extra).logits
    return logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("labels", [1, 2, 3, 12])
@torch.no_grad()
def test_random_weights_of_each_family(kind: str, labels: int, tmp_path: Path) -> None:
    library = make_library(kind, labels=labels)
    library.save_pretrained(tmp_path)
    ours = load_saved(tmp_path)
    for seed, lengths in enumerate(LENGTHS):
        ids, mask = batch(lengths, pad_id=pad_id_of(kind), seed=seed)
        expected = library_logits(library, ids, mask)
        assert expected.shape == (len(lengths), labels)
        for fused in (True, False):
            assert largest(ours.fuse_attention(fused)(ids, mask) - expected) <= BOUND
    with pytest.raises(ValueError, match=f"{LONGEST + 1} tokens are more than the {LONGEST} "):
        ours(batch([LONGEST + 1]).ids)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("bert", {}), ("bert", {"type_vocab_size": 5}), ("roberta", {"type_vocab_size": 3})],
)
@torch.no_grad()
def test_token_types(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    library = make_library(kind, **changes)
    library.save_pretrained(tmp_path)
    ids, mask = batch([7, 3, 12], pad_id=pad_id_of(kind))
    types = ids % library.config.type_vocab_size
    expected = library_logits(library, ids, mask, types)
    assert largest(load_saved(tmp_path)(ids, mask, types) - expected) <= BOUND
    assert largest(library_logits(library, ids, mask) - expected) > 0.01


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_all_states_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    library = make_library(kind)
    library.save_pretrained(tmp_path)
    encoder = load_saved(tmp_path).encoder
    ids, mask = batch([7, 3, 12], pad_id=pad_id_of(kind))
    output = library.base_model(input_ids=ids, attention_mask=mask, output_attentions=True)
    shown = encoder(ids, mask, return_weights=True)
    real = mask == 1
    assert largest(shown.states[real] - output.last_hidden_state[real]) <= BOUND
    for ours, theirs in zip(shown.weights, output.attentions, strict=True):
        by_query = (ours - theirs).transpose(1, 2)  # [b, n, h, n]
        assert largest(by_query[real]) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_dropout_falls_where_the_library_has_it(kind: str, tmp_path: Path) -> None:
    # DistilBERT has none behind attention, where we have it as the paper says: it is left out here.
    changes: dict[str, Any] = {"dropout": 0.0} if kind == "distilbert" else {}
    library = make_library(kind, **changes)
    library.save_pretrained(tmp_path)
    ours = load_saved(tmp_path).fuse_attention(False).train()
    library.train()
    ids, mask = batch([7, 3, 12], pad_id=pad_id_of(kind))
    answers: list[Tensor] = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        answers.append(library_logits(library, ids, mask))
        torch.manual_seed(seed)
        # All states, since the dice fall otherwise where fewer are computed.
        answers.append(ours.head(ours.encoder(ids, mask).states[:, 0]))
    assert largest(answers[0] - answers[1]) <= BOUND
    assert largest(answers[4] - answers[5]) <= BOUND
    assert torch.equal(answers[1], answers[3])
    assert largest(answers[1] - answers[5]) > 0.01


@pytest.fixture(scope="module")
def kept() -> tuple[PreTrainedModel, SequenceClassifier]:
    """The library's model and ours, both of the weights that the newest version of the repository keeps."""
    version = open_version(STORE, "sentiment")
    architecture = version.manifest.architecture
    config = AutoConfig.for_model(**architecture)
    library = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")  # type: ignore[no-untyped-call]
    wanted = dict(library.named_parameters())
    weights = {
        given.name: torch.tensor(numpy_helper.to_array(given))
        for given in onnx.load(version.path / "model.onnx").graph.initializer
        if given.name in wanted
    }
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    library.load_state_dict({**library.state_dict(), **{name: weights[name].float() for name in wanted}})
    return library.eval(), from_checkpoint(architecture, weights).eval()


@pytest.mark.parametrize("lengths", [[2, 9, 33, 128, 64, 5], [512, 17], [1, 300]])
@torch.no_grad()
def test_real_weights(kept: tuple[PreTrainedModel, SequenceClassifier], lengths: list[int]) -> None:
    library, ours = kept
    ids, mask = batch(lengths, words=library.config.vocab_size)
    expected = library_logits(library, ids, mask)
    for fused in (True, False):
        assert largest(ours.fuse_attention(fused)(ids, mask) - expected) <= BOUND
