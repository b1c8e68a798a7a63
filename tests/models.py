"""Builds tiny real model versions on the spot: an ONNX classifier, its tokenizer and its manifest.

The classifier is the masked mean of token embeddings and one linear layer, so that every text has an answer
of its own: good words lean to the last label, bad words to the first. Needs neither torch nor transformers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from service.store import FileRecord, GoldenText, Manifest, ModelFile, Source, form, write_version

GOOD = ("good", "great", "loved", "excellent", "happy", "recommend", "outstanding")
BAD = ("bad", "terrible", "hated", "awful", "sad", "waste", "poor")
PLAIN = (
    "the",
    "a",
    "an",
    "film",
    "movie",
    "product",
    "is",
    "was",
    "it",
    "and",
    "not",
    "very",
    "i",
    "this",
    "of",
    "time",
)
POISON = "poison"
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'\"()[]<>/@#$%&*+-=_"

BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
BERT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
PLAIN_INPUTS = ("input_ids", "attention_mask")
GOLDEN_TEXTS = (
    "good",
    "a terrible waste of time",
    "the movie was not bad , i loved it and recommend it",
    "WHY ? 3 out of 10 !",
)
WIDTH = 8

Kind = Literal["bert", "roberta"]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Weights:
    """embedding float32[vocabulary, WIDTH], kernel float32[WIDTH, labels]."""

    embedding: Floats
    kernel: Floats

    def logits(self, ids: Sequence[int]) -> list[float]:
        """What the graph computes for one text, in numpy."""
        return [float(x) for x in self.embedding[list(ids)].mean(axis=0) @ self.kernel]


def bert_tokenizer() -> Tokenizer:
    """Lower-casing WordPiece with [CLS] … [SEP]; a character outside CHARACTERS is unknown."""
    words = (*BERT_SPECIAL, *GOOD, *BAD, *PLAIN, POISON, *CHARACTERS, *(f"##{c}" for c in CHARACTERS))
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(
        models.WordPiece(vocabulary, unk_token=BERT_SPECIAL[1], max_input_chars_per_word=100)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    tokenizer.add_special_tokens(list(BERT_SPECIAL))
    return tokenizer


def roberta_tokenizer() -> Tokenizer:
    """Bytes as tokens, with <s> … </s>; the words of the BERT vocabulary are not known as such."""
    words = (*ROBERTA_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=ROBERTA_SPECIAL[3]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(name, vocabulary[name]) for name in ("<s>", "</s>")]
    )
    tokenizer.add_special_tokens(list(ROBERTA_SPECIAL))
    return tokenizer


def make_weights(tokenizer: Tokenizer, labels: int, *, poisoned: bool = False) -> Weights:
    """The same weights for the same arguments. With `poisoned`, the word POISON makes every logit NaN."""
    random = np.random.default_rng(7)
    embedding = random.normal(0, 0.5, (tokenizer.get_vocab_size(), WIDTH)).astype(np.float32)
    embedding[:, 0] = 0
    for words, lean in ((GOOD, 8), (BAD, -8)):
        for word in words:
            index = tokenizer.token_to_id(word)
            if index is not None:
                embedding[index, 0] = lean
    if poisoned:
        embedding[tokenizer.token_to_id(POISON)] = np.nan
    kernel = random.normal(0, 0.3, (WIDTH, labels)).astype(np.float32)
    kernel[0] = np.linspace(-1, 1, labels) if labels > 1 else 1
    return Weights(embedding, kernel)


def rounded(weights: Weights) -> Weights:
    """The weights on a grid of 1/16: near to the given ones, not the same: a less exact precision."""
    return Weights(
        (np.round(weights.embedding * 16) / 16).astype(np.float32),
        (np.round(weights.kernel * 16) / 16).astype(np.float32),
    )


def make_onnx(
    weights: Weights,
    *,
    inputs: Sequence[str] = BERT_INPUTS,
    integers: Literal["int32", "int64"] = "int64",
    output: Literal["float", "double"] = "float",
) -> bytes:
    """The classifier as an ONNX file: `inputs` int[n, length] -> logits float[n, labels].

    An input other than the two first is looked up in a table of zeros, so that it changes nothing.
    """
    whole = TensorProto.INT32 if integers == "int32" else TensorProto.INT64
    real = TensorProto.FLOAT if output == "float" else TensorProto.DOUBLE
    tables: dict[str, NDArray[np.float32]] = {
        "embedding": weights.embedding,
        "kernel": weights.kernel,
        "nothing": np.zeros((4096, WIDTH), dtype=np.float32),
    }
    constants = [numpy_helper.from_array(table, name) for name, table in tables.items()]
    constants += [
        numpy_helper.from_array(np.array([a], dtype=np.int64), n) for n, a in (("last", 2), ("tokens", 1))
    ]
    nodes = [helper.make_node("Gather", ["embedding", inputs[0]], ["words"])]
    state = "words"
    for extra in inputs[2:]:
        nodes.append(helper.make_node("Gather", ["nothing", extra], [f"{extra}_zero"]))
        nodes.append(helper.make_node("Add", [state, f"{extra}_zero"], [f"{extra}_added"]))
        state = f"{extra}_added"
    nodes += [
        helper.make_node("Cast", [inputs[1]], ["real"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["real", "last"], ["real3"]),
        helper.make_node("Mul", [state, "real3"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "tokens"], ["total"], keepdims=0),
        helper.make_node("ReduceSum", ["real", "tokens"], ["count"], keepdims=1),
        helper.make_node("Div", ["total", "count"], ["mean"]),
        helper.make_node("MatMul", ["mean", "kernel"], ["raw"]),
        helper.make_node("Cast", ["raw"], ["logits"], to=real),
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(name, whole, ["n", "length"]) for name in inputs],
        [helper.make_tensor_value_info("logits", real, ["n", weights.kernel.shape[1]])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def make_version(
    store: Path,
    name: str = "sentiment",
    version: int = 1,
    *,
    labels: Sequence[str] = ("negative", "positive"),
    activation: Literal["softmax", "sigmoid"] = "softmax",
    max_tokens: int = 64,
    temperature: float = 1.0,
    precisions: Sequence[Literal["float32", "int8"]] = ("float32",),
    kind: Kind = "bert",
    poisoned: bool = False,
    golden_texts: Sequence[str] = GOLDEN_TEXTS,
    model: Callable[[Weights], bytes] | None = None,
    script: Callable[[Weights], bytes] | None = None,
    change: Callable[[Manifest], Manifest] = lambda manifest: manifest,
) -> Path:
    """Write a version into the store and give its folder.

    Args:
        precisions: of the ONNX files; with none, the version has no such file.
        model: makes the ONNX file of some weights; `make_onnx` with the inputs of the kind when None.
        script: makes a TorchScript file in float32, which the version then has, too.
        change: what to change in the manifest before it is written; the golden logits are right until then.
    """
    tokenizer = bert_tokenizer() if kind == "bert" else roberta_tokenizer()
    build = model or (lambda w: make_onnx(w, inputs=BERT_INPUTS if kind == "bert" else PLAIN_INPUTS))
    exact = make_weights(tokenizer, len(labels), poisoned=poisoned)
    by_precision = {p: exact if p == "float32" else rounded(exact) for p in precisions}
    records = [
        ModelFile(_file_name(precision), "onnx", precision, 0, "", 1e-3 if precision == "float32" else 0.05)
        for precision in precisions
    ]
    rows = {"reference": exact} | {form(record): by_precision[record.precision] for record in records}  # type: ignore[index]
    if script is not None:
        records.append(ModelFile("model.torchscript", "torchscript", "float32", 0, "", 1e-3))
        rows[form(records[-1])] = exact
    manifest = Manifest(
        schema_version=1,
        name=name,
        version=version,
        created="2026-01-01T00:00:00Z",
        labels=list(labels),
        activation=activation,
        max_tokens=max_tokens,
        padding_side="right",
        pad_id=BERT_SPECIAL.index("[PAD]") if kind == "bert" else ROBERTA_SPECIAL.index("<pad>"),
        base_model=Source("tiny", "Apache-2.0"),
        training_data=[],
        metrics=[],
        temperature=temperature,
        golden_texts=[_golden(text, tokenizer, rows, max_tokens) for text in golden_texts],
        tokenizer=FileRecord("tokenizer.json", 0, ""),
        models=records,
    )
    files: dict[str, bytes | Path] = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "README.md": b"# A tiny model for tests\n",
    }
    files |= {_file_name(precision): build(weights) for precision, weights in by_precision.items()}
    files |= {} if script is None else {"model.torchscript": script(exact)}
    return write_version(store, change(manifest), files)


def _file_name(precision: str) -> str:
    return "model.onnx" if precision == "float32" else f"model.{precision}.onnx"


def _golden(text: str, tokenizer: Tokenizer, rows: Mapping[str, Weights], max_tokens: int) -> GoldenText:
    ids = tokenizer.encode(text).ids
    kept = ids if len(ids) <= max_tokens else [*ids[: max_tokens - 1], ids[-1]]
    return GoldenText(text, {key: weights.logits(kept) for key, weights in rows.items()})
