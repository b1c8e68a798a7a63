"""Builds tiny encoders with random weights, their tokenizers, and labelled files."""

import gzip
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
)

from tests.models import BAD, BERT_SPECIAL, GOOD, ROBERTA_SPECIAL, bert_tokenizer, roberta_tokenizer
from training.config import FitConfig

Kind = Literal["bert", "distilbert", "roberta", "mpnet"]
BYTE_KINDS = ("roberta", "mpnet")
POSITIONS = 64
# So small a model, with the usual 0.02, does not leave its start within a hundred steps.
SPREAD = 0.1

FRAMES = ("the film is {}", "a {} movie", "it was {}", "very {}", "a {} product", "i was {} of it", "{} time")
ALL_ROWS = tuple(
    (frame.format(word), label)
    for label, words in ((1, GOOD), (0, BAD))
    for word in words
    for frame in FRAMES
)
# Every word and every frame is in both, no row is.
DEV_ROWS = ALL_ROWS[::8]
TRAIN_ROWS = tuple(row for row in ALL_ROWS if row not in DEV_ROWS)
# A dozen, six of each label, for what needs no learning.
ROWS = (*TRAIN_ROWS[:6], *TRAIN_ROWS[-6:])


def write_rows(path: Path, rows: Iterable[tuple[str, int]], *, header: str = "text\tlabel") -> Path:
    """A file of rows, compressed when the name ends in .gz."""
    content = "".join(
        f"{line}\n" for line in (header, *(f"{text}\t{label}" for text, label in rows))
    ).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_data(folder: Path, *, train: Sequence[tuple[str, int]] = ROWS) -> Path:
    """A folder with train.tsv and dev.tsv."""
    write_rows(folder / "train.tsv", train)
    write_rows(folder / "dev.tsv", DEV_ROWS)
    return folder


def make_base(folder: Path, kind: Kind = "bert") -> Path:
    """An encoder with random weights and without a head, and its tokenizer.

    The tokenizer's file carries a fixed padding and a truncation, as those of the sentence transformers do.
    """
    torch.manual_seed(1)
    backend = _merged(roberta_tokenizer()) if kind in BYTE_KINDS else bert_tokenizer()
    _model(kind, backend.get_vocab_size()).save_pretrained(folder)
    backend.enable_padding(length=16)
    backend.enable_truncation(max_length=16)
    names = ROBERTA_SPECIAL if kind in BYTE_KINDS else BERT_SPECIAL
    _wrap(backend, names, kind).save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def _merged(backend: Tokenizer) -> Tokenizer:
    """Bytes merged to the words of the rows, as in a real vocabulary; the special tokens keep their ids."""
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=list(ROBERTA_SPECIAL),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text for text, _ in ALL_ROWS], trainer)
    return backend


def _model(kind: Kind, vocabulary: int) -> PreTrainedModel:
    if kind == "distilbert":
        return DistilBertModel(
            DistilBertConfig(
                vocab_size=vocabulary,
                dim=32,
                n_layers=2,
                n_heads=2,
                hidden_dim=64,
                max_position_embeddings=POSITIONS,
                initializer_range=SPREAD,
            )
        )
    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": POSITIONS,
        "initializer_range": SPREAD,
    }
    if kind == "roberta":
        return RobertaModel(
            RobertaConfig(**shape, type_vocab_size=1, bos_token_id=0, pad_token_id=1, eos_token_id=2)
        )
    if kind == "mpnet":
        return MPNetModel(MPNetConfig(**shape, bos_token_id=0, pad_token_id=1, eos_token_id=2))
    return BertModel(BertConfig(**shape))


def _wrap(backend: Tokenizer, names: Sequence[str], kind: Kind) -> PreTrainedTokenizerFast:
    if kind in BYTE_KINDS:
        bos, pad, eos, unk, mask = names
        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=backend,
            bos_token=bos,
            cls_token=bos,
            pad_token=pad,
            eos_token=eos,
            sep_token=eos,
            unk_token=unk,
            mask_token=mask,
        )
    pad, unk, cls, sep, mask = names
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, pad_token=pad, unk_token=unk, cls_token=cls, sep_token=sep, mask_token=mask
    )


def tiny_config(base: Path, data: Path, **changes: Any) -> FitConfig:
    """Quick choices: for a dozen rows 3 steps an epoch."""
    return FitConfig(
        **{
            "base": str(base),
            "data": (str(data),),
            "learning_rate": 1e-3,
            "epochs": 4,
            "batch_items": 4,
            "max_tokens": 32,
            **changes,
        }
    )
