"""A Transformer encoder from first principles: read it from top to bottom in one sitting, then use it.

Attention, the layer, the encoder, the classifier, as in Vaswani et al. 2017 ("Attention Is All You Need") and
Devlin et al. 2019 ("BERT"). Knows nothing of text, of checkpoints, of training or of serving.

Shapes: b texts of n tokens (padded), d the width, h heads of e = d / h each, v words, c labels.
"""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from encoder.config import EncoderConfig


class Attended(NamedTuple):
    """States float[b, n, d], and the weights [b, h, n, n] that each query gave each key, if asked for."""

    states: Tensor
    weights: Tensor | None


class Encoded(NamedTuple):
    """States float[b, n, d], and the attention weights of each layer, if asked for."""

    states: Tensor
    weights: tuple[Tensor, ...]


class MultiHeadSelfAttention(nn.Module):
    """softmax(Q Kᵀ / √e) V in each of h heads, joined and projected (Vaswani et al. 2017, eq. 1 and 3.2.2).

    Two ways compute the same: written out, and PyTorch's fused `scaled_dot_product_attention` (`fused`),
    which never holds the whole [n, n] in memory.
    """

    def __init__(self, width: int, heads: int, *, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.head_width = width // heads  # e
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, width, bias=bias)
        self.value = nn.Linear(width, width, bias=bias)
        self.output = nn.Linear(width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.fused = True

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        first_only: bool = False,
        return_weights: bool = False,
    ) -> Attended:
        """x [b, n, d], bias added to the scores (see `attention_bias`) -> states [b, n, d].

        With `first_only` the first token alone asks, of all tokens: states [b, 1, d]. To return the weights,
        attention is written out whatever `fused` says.
        """
        asking = x[:, :1] if first_only else x  # [b, q, d]: q is n, or 1
        if first_only and bias is not None:
            bias = bias[:, :, :1]
        q = self._split(self.query(asking))  # [b, h, q, e]
        k = self._split(self.key(x))  # [b, h, n, e]
        v = self._split(self.value(x))  # [b, h, n, e]
        weights = None
        if self.fused and not return_weights:
            p = self.dropout.p if self.training else 0.0
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p)
        else:
            scores = q @ k.transpose(2, 3) / math.sqrt(self.head_width)  # [b, h, q, n]
            if bias is not None:
                scores = scores + bias
            weights = scores.softmax(dim=-1)  # each row sums to 1
            mixed = self.dropout(weights) @ v  # [b, h, q, e]
        joined = mixed.transpose(1, 2).flatten(2)  # [b, q, d]
        return Attended(self.output(joined), weights if return_weights else None)

    def _split(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        return x.view(b, n, self.heads, self.head_width).transpose(1, 2)  # [b, n, d] -> [b, h, n, e]


class TransformerEncoderLayer(nn.Module):
    """Attention, then a feed-forward part for each token by itself; each adds to what came in (residual)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.attention = MultiHeadSelfAttention(
            config.width, config.heads, bias=config.bias, dropout=config.attention_dropout
        )
        self.attention_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.up = nn.Linear(config.width, config.inner_width, bias=config.bias)
        self.down = nn.Linear(config.inner_width, config.width, bias=config.bias)
        self.feed_forward_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        first_only: bool = False,
        return_weights: bool = False,
    ) -> Attended:
        """x [b, n, d] -> [b, n, d], or [b, 1, d] with `first_only`."""
        # Pre-norm: x + f(norm(x)), so that the sum runs through untouched. Post-norm: norm(x + f(x)).
        given = self.attention_norm(x) if self.norm_first else x
        attended, weights = self.attention(given, bias, first_only=first_only, return_weights=return_weights)
        x = (x[:, :1] if first_only else x) + self.dropout(attended)
        if self.norm_first:
            return Attended(x + self._feed_forward(self.feed_forward_norm(x)), weights)
        x = self.attention_norm(x)
        return Attended(self.feed_forward_norm(x + self._feed_forward(x)), weights)

    def _feed_forward(self, x: Tensor) -> Tensor:
        # The exact GELU, x · Φ(x) with the error function (Hendrycks and Gimpel 2016); [b, n, 4d] inside.
        fed: Tensor = self.dropout(self.down(functional.gelu(self.up(x))))
        return fed


class Encoder(nn.Module):
    """Words and positions become states, which the layers refine."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.words = nn.Embedding(config.words, config.width)
        rows = config.position_offset + config.max_tokens
        if config.positions == "learned":
            self.positions = nn.Embedding(rows, config.width)
        elif config.positions == "sinusoidal":
            self.register_buffer("waves", sinusoids(rows, config.width), persistent=False)
        self.types = nn.Embedding(config.token_types, config.width) if config.token_types else None
        # One LayerNorm more: post-norm norms what goes into the first layer, pre-norm what leaves the last.
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(TransformerEncoderLayer(config) for _ in range(config.layers))

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        *,
        token_types: Tensor | None = None,
        causal: bool = False,
        first_only: bool = False,
        return_weights: bool = False,
    ) -> Encoded:
        """ids int64[b, n], mask [b, n] (1 or True where a token is real) -> states [b, n, d].

        Args:
            token_types: int64[b, n]; type 0 everywhere when None.
            causal: a token looks at itself and what stands before it.
            first_only: the last layer computes the first token alone (states [b, 1, d]); nothing else reads
                the others, and the result is the same.
            return_weights: also the attention weights of each layer, [b, h, n, n].
        """
        x = self._embed(ids, token_types)  # [b, n, d]
        bias = attention_bias(mask, x, causal=causal)
        x = self.dropout(x if self.config.norm_first else self.norm(x))
        kept: list[Tensor] = []
        for number, layer in enumerate(self.layers, 1):
            last = number == len(self.layers)
            x, weights = layer(x, bias, first_only=first_only and last, return_weights=return_weights)
            if weights is not None:
                kept.append(weights)
        return Encoded(self.norm(x) if self.config.norm_first else x, tuple(kept))

    def _embed(self, ids: Tensor, token_types: Tensor | None) -> Tensor:
        n, first = ids.shape[1], self.config.position_offset
        tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if not tracing and n > self.config.max_tokens:
            raise ValueError(
                f"{n} tokens are more than the {self.config.max_tokens} that there are positions for"
            )
        x: Tensor = self.words(ids)
        if self.types is not None:
            x = x + (self.types.weight[0] if token_types is None else self.types(token_types))
        # Attention does not know the order of the tokens: what stands where must be in the states.
        if self.config.positions == "learned":
            x = x + self.positions.weight[first : first + n]
        elif self.config.positions == "sinusoidal":
            x = x + self.get_buffer("waves")[first : first + n].to(x.dtype)
        return x


class ClassificationHead(nn.Module):
    """The first token's state -> logits: a layer, an activation, a projection to the labels.

    BERT calls the first layer its pooler (tanh), DistilBERT a pre-classifier (ReLU); RoBERTa (tanh) drops out
    before it, too.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.kind = config.head
        self.dense = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.head_dropout)
        self.output = nn.Linear(config.width, config.labels)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, d] -> logits [b, c]."""
        x = self.dense(self.dropout(x) if self.kind == "roberta" else x)
        x = functional.relu(x) if self.kind == "distilbert" else torch.tanh(x)
        logits: Tensor = self.output(self.dropout(x))
        return logits


class SequenceClassifier(nn.Module):
    """An encoder and a head. New weights are drawn as BERT's: normal with deviation `spread`, biases 0."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.head = ClassificationHead(config)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=config.spread)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor, mask: Tensor | None = None, token_types: Tensor | None = None) -> Tensor:
        """ids int64[b, n], mask [b, n] (1 or True where a token is real) -> logits float[b, c]."""
        states = self.encoder(ids, mask, token_types=token_types, first_only=True).states  # [b, 1, d]
        logits: Tensor = self.head(states[:, 0])
        return logits

    def fuse_attention(self, fused: bool) -> Self:
        """Chooses the way that attention is computed in every layer. Returns the classifier itself."""
        for module in self.modules():
            if isinstance(module, MultiHeadSelfAttention):
                module.fused = fused
        return self


def attention_bias(mask: Tensor | None, x: Tensor, *, causal: bool = False) -> Tensor | None:
    """What is added to the scores: 0 where a query may look, the least number where not.

    mask [b, n], states x [b, n, d] -> [b, 1, 1, n], causal [b or 1, 1, n, n], or None: all may be seen.
    The least number, and not minus infinity: where nothing may be seen all weights are equal, and not 0 / 0.
    """
    allowed = None if mask is None else mask.to(torch.bool)[:, None, None, :]  # [b, 1, 1, n]
    if causal:
        n = x.shape[1]
        # Row is the query, column the key.
        before = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()  # [n, n]
        allowed = before[None, None] if allowed is None else allowed & before
    if allowed is None:
        return None
    # A product, so that a trace holds no tensor of the device that it was made on.
    return (~allowed).to(x.dtype) * torch.finfo(x.dtype).min


def sinusoids(rows: int, width: int) -> Tensor:
    """float32[rows, width]: sine and cosine of the position at wavelengths from 2π to 10000·2π, in pairs.

    Vaswani et al. 2017, section 3.5: PE(p, 2i) = sin(p / 10000^(2i/d)), PE(p, 2i+1) = cos of the same.
    """
    # In float64: an angle of hundreds has too few digits behind the point in float32.
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10_000.0) / width))  # [d/2]
    angles = torch.arange(rows)[:, None] * rates  # [rows, d/2]
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1).float()
