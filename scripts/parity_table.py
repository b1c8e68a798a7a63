"""Prints how near each form of a model is to the eager model of the library, as the table of docs/encoder.md.

python scripts/parity_table.py                        batches of up to 1,024 tokens, as the service makes them
python scripts/parity_table.py --batch-tokens 16384   the whole grid of the gate

A cell of an engine is the largest |Δlogit| against the eager model, and the largest change of a probability
by neighbours. Measured are the kept versions, and random weights of the size of MiniLM for each family.
Knows nothing of labelled data or tokenizers.
"""

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from encoder.config import EncoderConfig
from service.core import FloatArray, TokenBatch
from service.engines import Engine, EngineOptions, ModelShape
from service.engines.onnx import OnnxEngine
from service.engines.torchscript import TorchScriptEngine
from service.store import open_version, versions
from training.graph import graph_weights, rebuild, round_to_half, store_half, trace
from training.own import OwnClassifier, from_library, new_classifier, through_encoder
from training.parity import Vocabulary, check_company, eager_logits, grid
from training.quantize import quantize
from training.torchscript import trace_script

STORE = Path(__file__).parent.parent / "model_store"
MAX_TOKENS = 512
WORDS = 30_522
LABELS = 2
COMPANY_TEXTS = 32
COMPANY_TOKENS = 128
# With it a product keeps the size of a state of width 384, and logits are of order 1.
SPREAD = 0.05
MINILM: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
MINILM_AS_DISTILBERT: dict[str, Any] = {"dim": 384, "n_layers": 6, "n_heads": 12, "hidden_dim": 1536}
HEAD = (
    "model",
    "graph through",
    "encoder, written out",
    "encoder, fused",
    "onnx/float32",
    "onnx/int8",
    "torchscript/float32",
)


@dataclass(frozen=True)
class Subject:
    """A model to measure, eager and rounded to float16, and what its texts are made of."""

    name: str
    model: PreTrainedModel
    vocabulary: Vocabulary


def subjects() -> Iterator[Subject]:
    """The kept versions, then each family with random weights."""
    # [CLS] and [SEP] of BERT; the first 999 ids are control tokens and unused ones.
    bert = Vocabulary((101, 102), tuple(range(999, WORDS)), 0)
    for number in versions(STORE, "sentiment"):
        version = open_version(STORE, "sentiment", number)
        kept = rebuild(graph_weights(version.path / "model.onnx"), version.manifest.architecture)
        yield Subject(f"sentiment {number} (MiniLM), real weights", kept, bert)
    for kind in ("bert", "distilbert", "roberta"):
        special = (0, 2) if kind == "roberta" else (101, 102)
        pad_id = int(kind == "roberta")
        yield Subject(kind, random_model(kind), Vocabulary(special, tuple(range(999, WORDS)), pad_id))
    shape = EncoderConfig(words=WORDS, max_tokens=MAX_TOKENS, norm_first=True, spread=SPREAD)
    torch.manual_seed(0)
    own = new_classifier(shape, labels=("negative", "positive"), pad_id=0).written_out()
    yield Subject("pre-norm of our own", rounded(own), bert)
    yield Subject("mpnet", random_model("mpnet"), Vocabulary((0, 2), tuple(range(999, WORDS)), 1))


def random_model(kind: str) -> PreTrainedModel:
    """A classifier of the library with the size of MiniLM; the same weights each time."""
    offset = kind in {"roberta", "mpnet"}
    config = AutoConfig.for_model(
        kind,
        **(MINILM_AS_DISTILBERT if kind == "distilbert" else MINILM),
        vocab_size=WORDS,
        max_position_embeddings=MAX_TOKENS + 2 * offset,
        pad_token_id=int(offset),
        initializer_range=SPREAD,
        num_labels=LABELS,
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation="eager", dtype=torch.float32
    )
    return rounded(model)


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, without dropout, as a version keeps its weights."""
    model.train(False)
    round_to_half(model)
    return model


def row(subject: Subject, *, batch_tokens: int, threads: int) -> list[str]:
    """The cells of a model. Raises ParityError when neighbours change a probability above the bound."""
    batches = [
        batch
        for batch in grid(subject.vocabulary, MAX_TOKENS)
        if len(batch) * int(batch.lengths.max()) <= batch_tokens
    ]
    pad_id = subject.vocabulary.pad_id
    expected = [eager_logits(subject.model, batch, pad_id) for batch in batches]
    made = through_encoder(copy.deepcopy(subject.model))
    ours = isinstance(made, OwnClassifier)
    cells = [subject.name, "encoder/" if ours else "the library"]
    cells += encoder_cells(subject, batches, expected)
    for engine in engines(subject, made, threads):
        off = largest(engine.run, batches, expected)
        change, _ = check_company(engine, company(batches), "softmax")
        cells.append(f"{off:.1e} / {change:.1e}")
        engine.close()
    return cells


def encoder_cells(
    subject: Subject, batches: Sequence[TokenBatch], expected: Sequence[FloatArray]
) -> list[str]:
    """How far our eager encoder is from the library's eager model, in both ways of attention."""
    if subject.model.config.model_type == "mpnet":
        return ["–", "–"]
    own = subject.model if isinstance(subject.model, OwnClassifier) else from_library(subject.model)
    ours: OwnClassifier = copy.deepcopy(own).eval()  # type: ignore[no-untyped-call]
    cells = []
    for fused in (False, True):
        ours.network.fuse_attention(fused)
        off = largest(lambda b: eager_logits(ours, b, subject.vocabulary.pad_id), batches, expected)
        cells.append(f"{off:.1e}")
    # Written out, a model of our own is the reference itself.
    return cells if own is not subject.model else ["–", cells[1]]


def engines(subject: Subject, made: PreTrainedModel, threads: int) -> Iterator[Engine]:
    """The service's engine on each file, made in the way of an export. `made` is what graphs come from."""
    shape = ModelShape(LABELS, MAX_TOKENS, subject.vocabulary.pad_id)
    options = EngineOptions(device="cpu", threads_per_lane=threads)
    graph = trace(made, MAX_TOKENS)
    names = [name for name, _ in subject.model.named_parameters()]
    for precision in ("float32", "int8"):
        form = graph.clone()
        if precision == "int8":
            quantize(form)
        store_half(form, names)
        content = ir.to_proto(form).SerializeToString()
        yield OnnxEngine(content, shape=shape, precision=precision, options=options)
    yield TorchScriptEngine(trace_script(made), shape=shape, precision="float32", options=options)


def largest(
    run: Callable[[TokenBatch], FloatArray], batches: Sequence[TokenBatch], expected: Sequence[FloatArray]
) -> float:
    """The largest |Δlogit| over the batches."""
    pairs = zip(batches, expected, strict=True)
    return max(float(np.abs(run(batch) - logits).max()) for batch, logits in pairs)


def company(batches: Sequence[TokenBatch]) -> list[list[int]]:
    """Some of the texts of the batches, of all lengths up to COMPANY_TOKENS."""
    texts = [ids.tolist() for b in batches for ids in np.split(b.ids, np.cumsum(b.lengths)[:-1])]
    short = [ids for ids in texts if len(ids) <= COMPANY_TOKENS]
    return short[:: -(-len(short) // COMPANY_TEXTS)]


def main() -> None:
    """Prints the table, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(description="Prints the parity table of docs/encoder.md.")
    parser.add_argument("--batch-tokens", type=int, default=1024, help="largest batch (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for subject in subjects():
        cells = row(subject, batch_tokens=options.batch_tokens, threads=options.threads)
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
