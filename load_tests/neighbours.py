"""Asks whether a text gets the same answer whoever is beside it, of every engine and precision of a version.

Each text is run alone, and then first and last in batches of 2, 7, 32 and as many as there are labels, beside
neighbours of 3 tokens and of the longest length. Prints the largest change of a probability and how many
labels turn; `--usual` adds onnxruntime's ready-made dynamic int8 of the same weights, for comparison.

    VALENCE_DATA=… python -m load_tests.neighbours [model_store/<name>/<version>] [--texts 100] [--usual]
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
from onnxruntime.quantization import QuantType, quantize_dynamic

from load_tests.chosen import chosen_version
from load_tests.texts import sentences, source
from service.classifier import activate
from service.core import Encoding, FloatArray, TokenBatch
from service.engines import Engine, EngineOptions, ModelShape, open_engine
from service.engines.onnx import OnnxEngine
from service.store import Manifest, Version
from service.tokenizer import Tokenizer

SHORT = "ok"
LONG = "It was a long evening, and nobody in the room could say afterwards what it had been about. " * 40
BATCHES = (2, 7, 32)
LONGEST_CALL_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class Change:
    """What company did to the answers: the largest |Δp|, the labels that turned, and how many runs saw it."""

    largest: float
    flips: int
    runs: int


def company(
    text: Encoding, short: Encoding, long: Encoding, labels: int
) -> Iterator[tuple[list[Encoding], int]]:
    """Batches that hold the text, each with its place: first and last, beside short, long and both."""
    for size in sorted({*BATCHES, max(2, labels)}):
        others = (size - 1) * [short], (size - 1) * [long], ([short, long] * size)[: size - 1]
        for neighbours in others:
            longest = max(len(text), *(len(one) for one in neighbours))
            if size * longest <= LONGEST_CALL_TOKENS:
                yield [text, *neighbours], 0
                yield [*neighbours, text], size - 1


def change_by_company(
    engine: Engine, texts: Sequence[Encoding], beside: tuple[Encoding, Encoding], manifest: Manifest
) -> Change:
    """The change of the texts' probabilities, as they are served, against each alone.

    Args:
        beside: a short and a long neighbour.
    """
    short, long = beside
    largest, flips, runs = 0.0, 0, 0
    for text in texts:
        alone = engine.run(TokenBatch.of([text]))
        for batch, place in company(text, short, long, engine.labels):
            together = engine.run(TokenBatch.of(batch))[place : place + 1]
            largest = max(largest, _distance(alone, together, manifest))
            flips += int(_label(alone) != _label(together))
            runs += 1
    return Change(largest, flips, runs)


def main() -> None:
    """Prints a row for each engine and precision."""
    parser = argparse.ArgumentParser(description="The change of an answer by its neighbours.")
    parser.add_argument("version", type=Path, nargs="?", help="its folder; the one that is served")
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--usual", action="store_true", help="also onnxruntime's dynamic int8")
    options = parser.parse_args()
    version = chosen_version(options.version)
    manifest = version.manifest
    tokenizer = Tokenizer.load(
        version.read(manifest.tokenizer), max_tokens=manifest.max_tokens, max_text_chars=32_768
    )
    texts = [tokenizer.encode(text) for text in sentences()[: options.texts]]
    beside = tokenizer.encode(SHORT), tokenizer.encode(LONG)
    print(f"{len(texts)} texts: {source()}\n")
    print("| engine | precision | largest change of a probability | labels that turn | runs |")
    print("|---|---|---|---|---|")
    for name, engine in _engines(version, usual=options.usual):
        found = change_by_company(engine, texts, beside, manifest)
        print(
            f"| {name} | {engine.precision} | {found.largest:.1e} | {found.flips} | {found.runs:,} |",
            flush=True,
        )
        engine.close()


def _engines(version: Version, *, usual: bool) -> Iterator[tuple[str, Engine]]:
    for file in version.manifest.models:
        options = EngineOptions(engine=file.format, precision=file.precision, device="cpu")
        yield file.format, open_engine(version, options)
    if usual:
        manifest = version.manifest
        shape = ModelShape(len(manifest.labels), manifest.max_tokens, manifest.pad_id)
        content = ready_made_int8(version)
        yield "onnx, ready-made", OnnxEngine(content, shape=shape, precision="int8", options=EngineOptions())


def ready_made_int8(version: Version, *, per_channel: bool = True) -> bytes:
    """onnxruntime's dynamic int8 of the float32 graph: one scale for each batch, not for each token.

    Args:
        per_channel: whether each column of a weight has a scale of its own.
    """
    with tempfile.TemporaryDirectory() as work:
        plain, made = Path(work) / "plain.onnx", Path(work) / "usual.onnx"
        _fold_constants(version.path / "model.onnx", plain)
        quantize_dynamic(plain, made, weight_type=QuantType.QInt8, per_channel=per_channel)
        return made.read_bytes()


def _fold_constants(source: Path, target: Path) -> None:
    """The same graph with plain float32 weights: behind Cast and Transpose the ready-made way leaves them."""
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    settings.optimized_model_filepath = str(target)
    onnxruntime.InferenceSession(source, settings, providers=["CPUExecutionProvider"])


def _distance(one: FloatArray, other: FloatArray, manifest: Manifest) -> float:
    chances = [
        activate(logits, manifest.activation, temperature=manifest.temperature) for logits in (one, other)
    ]
    return float(np.abs(chances[0] - chances[1]).max())


def _label(logits: FloatArray) -> int:
    return int(logits[0, 0] > 0) if logits.shape[1] == 1 else int(logits[0].argmax())


if __name__ == "__main__":
    main()
