"""The shape of an encoder and its classifier. Knows nothing of torch, checkpoints or training."""

from dataclasses import dataclass
from typing import Literal, get_args

Positions = Literal["learned", "sinusoidal", "none"]
Head = Literal["bert", "distilbert", "roberta"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """The shape of a classifier.

    Attributes:
        max_tokens: the longest text, special tokens included.
        inner_width: width of the feed-forward part, usually 4 d.
        norm_first: LayerNorm before each part (pre-norm, the one to train from random weights) or after the
            residual sum (post-norm, BERT).
        position_offset: rows of the position table that stand unused before position 0 (RoBERTa: 2).
        token_types: rows of the table of token types (BERT: 2); 0 for none.
        head: how the first state becomes logits; see `ClassificationHead`.

    Raises:
        ValueError: with what does not fit.
    """

    words: int
    max_tokens: int
    labels: int = 2
    width: int = 384
    layers: int = 6
    heads: int = 12
    inner_width: int = 1536
    norm_first: bool = True
    positions: Positions = "learned"
    position_offset: int = 0
    token_types: int = 0
    head: Head = "bert"
    bias: bool = True
    dropout: float = 0.1
    attention_dropout: float = 0.1
    head_dropout: float = 0.1
    norm_eps: float = 1e-12
    spread: float = 0.02

    def __post_init__(self) -> None:
        sizes = ("words", "max_tokens", "labels", "width", "layers", "heads", "inner_width")
        for name in (*sizes, "position_offset", "token_types"):
            value, least = getattr(self, name), int(name in sizes)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: {value!r} is no whole number from {least} up")
        for name, choices in (("positions", get_args(Positions)), ("head", get_args(Head))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not one of {', '.join(choices)}")
        for name in ("dropout", "attention_dropout", "head_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not from 0 to below 1")
        if self.norm_eps <= 0:
            raise ValueError(f"norm_eps: {self.norm_eps} is not above 0")
        if self.width % self.heads:
            raise ValueError(f"width: {self.width} cannot be shared out to {self.heads} heads")
        if self.positions == "sinusoidal" and self.width % 2:
            raise ValueError(f"width: {self.width} is odd, and sinusoidal positions come in pairs")
