"""Loading is strict: whatever does not fit is refused by its name, and what fits is taken bit by bit."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from encoder.pretrained import PretrainedError, from_checkpoint, read_config, to_checkpoint
from tests.encoder.builders import batch
from tests.encoder.checkpoints import KINDS, load_saved, make_library


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def saved(kind: str, tmp_path: Path) -> Path:
    """A folder of each family, as `save_pretrained` writes it."""
    make_library(kind).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    make_library("bert").save_pretrained(tmp_path)
    return tmp_path


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **changes: Any) -> None:
    """None takes the key out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}), encoding="utf-8")


def refusal(folder: Path, **choices: bool) -> str:
    """What the error says."""
    with pytest.raises(PretrainedError) as raised:
        load_saved(folder, **choices)
    return str(raised.value)


def test_tensors_of_all_parts_are_asked_for(kind: str) -> None:
    library = make_library(kind)
    config, whole = library.config.to_dict(), dict(library.named_parameters())
    for name in list(whole)[::7]:
        rest = {other: tensor for other, tensor in whole.items() if other != name}
        with pytest.raises(PretrainedError, match=f"^{re.escape(name)} is missing$"):
            from_checkpoint(config, rest)
        tensor = whole[name]
        said = re.escape(f"{name} is {[*tensor[1:].shape]}, and {[*tensor.shape]} is wanted")
        with pytest.raises(PretrainedError, match=f"^{said}$"):
            from_checkpoint(config, {**rest, name: tensor[1:]})


def test_a_missing_tensor_of_a_file_is_named(bert: Path) -> None:
    change_tensors(bert, lambda tensors: tensors.pop("bert.pooler.dense.bias"))
    assert refusal(bert) == "bert.pooler.dense.bias is missing"


def test_missing_tensors_are_counted(bert: Path) -> None:
    change_tensors(bert, lambda tensors: (tensors.pop("classifier.bias"), tensors.pop("classifier.weight")))
    assert refusal(bert) == "classifier.bias is missing, and 1 more"


def test_a_base_without_a_head_is_refused(saved: Path, kind: str) -> None:
    base: PreTrainedModel = make_library(kind).base_model  # type: ignore[assignment]
    base.save_pretrained(saved)
    assert "is missing, and " in refusal(saved)


@pytest.mark.parametrize(
    "name",
    [
        "bert.encoder.layer.2.output.dense.bias",
        "cls.predictions.bias",
        "bert.embeddings.other",
        "position_ids",
    ],
)
def test_an_unexpected_tensor_is_named(bert: Path, name: str) -> None:
    change_tensors(bert, lambda tensors: tensors.update({name: torch.zeros(32)}))
    assert refusal(bert) == f"{name} has no place in the encoder"


def test_a_transposed_tensor_is_named(bert: Path) -> None:
    name = "bert.embeddings.word_embeddings.weight"
    change_tensors(bert, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))
    assert refusal(bert) == f"{name} is [32, 50], and [50, 32] is wanted"


def test_one_number_is_not_taken_for_many(bert: Path) -> None:
    change_tensors(bert, lambda tensors: tensors.update({"classifier.bias": torch.zeros(1)}))
    assert refusal(bert) == "classifier.bias is [1], and [3] is wanted"


@pytest.mark.parametrize("changes", [{"model_type": "mpnet"}, {"model_type": None}, {"model_type": ["bert"]}])
def test_another_family_is_named(bert: Path, changes: dict[str, Any]) -> None:
    change_config(bert, **changes)
    assert refusal(bert).startswith(
        f"model_type is {str(changes['model_type'])!r}; there are bert, distilbert"
    )


@pytest.mark.parametrize(
    "name", ["hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings"]
)
def test_a_size_that_is_not_said_is_named(bert: Path, name: str) -> None:
    change_config(bert, **{name: None})
    assert refusal(bert) == f"the configuration does not say {name}"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "relu"}, "hidden_act is 'relu', and the encoder has 'gelu'"),
        ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new', and the encoder has 'gelu'"),
        (
            {"position_embedding_type": "relative_key"},
            "position_embedding_type is 'relative_key', and the encoder has 'absolute'",
        ),
        ({"is_decoder": True}, "is_decoder is True, and the encoder has False"),
        ({"num_attention_heads": 5}, "the configuration makes no sense: width: 32 cannot be shared out to 5"),
        ({"hidden_size": "wide"}, "the configuration makes no sense: width: 'wide' is no whole number"),
        ({"hidden_size": 32.0}, "the configuration makes no sense: width: 32.0 is no whole number"),
        (
            {"num_hidden_layers": 0},
            "the configuration makes no sense: layers: 0 is no whole number from 1 up",
        ),
    ],
)
def test_what_the_encoder_does_not_compute_is_refused(bert: Path, changes: dict[str, Any], said: str) -> None:
    change_config(bert, **changes)
    assert refusal(bert).startswith(said)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("distilbert", {"activation": "relu"}, "activation is 'relu'"),
        ("roberta", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("camembert", {"is_decoder": True}, "is_decoder is True"),
        ("xlm-roberta", {"position_embedding_type": "relative_key_query"}, "position_embedding_type is "),
        ("roberta", {"pad_token_id": -5}, "the configuration makes no sense: position_offset: -4"),
    ],
)
def test_each_family_is_asked(kind: str, changes: dict[str, Any], said: str) -> None:
    config = {**make_library(kind).config.to_dict(), **changes}
    with pytest.raises(PretrainedError, match=said):
        read_config(config)


def test_pre_norm_is_refused(saved: Path, kind: str) -> None:
    assert refusal(saved, norm_first=True).startswith(f"{kind} is post-norm: ")
    assert not load_saved(saved).config.norm_first


def test_the_buffer_of_positions_is_harmless(saved: Path, kind: str) -> None:
    base = kind if kind in {"bert", "distilbert"} else "roberta"
    ids, mask = batch()
    expected = load_saved(saved)(ids, mask)
    buffer = torch.arange(32)[None]
    change_tensors(saved, lambda tensors: tensors.update({f"{base}.embeddings.position_ids": buffer}))
    assert torch.equal(load_saved(saved)(ids, mask), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_comes_out_as_float32(saved: Path, kind: str, dtype: torch.dtype) -> None:
    change_tensors(saved, lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()}))
    given = load_file(saved / "model.safetensors")
    ours = to_checkpoint(load_saved(saved), kind)
    for name, tensor in ours.items():
        assert tensor.dtype == torch.float32, name
        assert torch.equal(tensor, given[name].float()), name


def test_there_and_back_is_the_same_bit_by_bit(kind: str) -> None:
    library = make_library(kind)
    given = dict(library.named_parameters())
    ours = to_checkpoint(from_checkpoint(library.config.to_dict(), library.state_dict()), kind)
    assert set(ours) == set(given)
    for name, tensor in ours.items():
        assert torch.equal(tensor, given[name]), name


def test_weights_are_copies() -> None:
    library = make_library("bert")
    before = {name: tensor.clone() for name, tensor in library.state_dict().items()}
    ours = from_checkpoint(library.config.to_dict(), library.state_dict())
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    for name, tensor in library.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_what_is_loaded_answers_at_once_and_can_be_trained(saved: Path) -> None:
    ours = load_saved(saved)
    assert not any(module.training for module in ours.modules())
    ids, mask = batch()
    loss: Tensor = functional.cross_entropy(ours(ids, mask), torch.tensor([0, 1, 2, 0]))
    loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name


def test_dropout_is_read_from_the_configuration() -> None:
    shape = read_config(make_library("bert").config.to_dict())
    assert (shape.dropout, shape.attention_dropout, shape.head_dropout) == (0.1, 0.2, 0.3)
    shape = read_config(make_library("roberta", classifier_dropout=None).config.to_dict())
    assert (shape.dropout, shape.attention_dropout, shape.head_dropout) == (0.1, 0.2, 0.1)
    shape = read_config(make_library("distilbert").config.to_dict())
    assert (shape.dropout, shape.attention_dropout, shape.head_dropout) == (0.1, 0.15, 0.3)
