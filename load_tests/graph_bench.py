"""Compares the graphs of one model: as the library exports it, tidied, and made through our own encoder.

Each is run by the service's engine on one thread, in turns, on real sentences. Prints texts a second of CPU
time, one by one and in batches of 8 by length, the least of the rounds, and the ratio to the first graph.

    VALENCE_DATA=… python -m load_tests.graph_bench [model_store/<name>/<version>] [--int8] [--rounds 5]
"""

import argparse
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from load_tests import alone
from load_tests.chosen import chosen_version
from load_tests.texts import sentences, source
from service.core import Encoding, TokenBatch
from service.engines import EngineOptions, ModelShape
from service.engines.onnx import OnnxEngine
from training.graph import export_graph, graph_weights, rebuild, trace
from training.own import through_encoder
from training.quantize import quantize


def main() -> None:
    """Makes the graphs, runs them in turns, prints a table."""
    parser = argparse.ArgumentParser(description="Compares the graphs of one model.")
    parser.add_argument("version", type=Path, nargs="?", help="its folder; the one that is served")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=300)
    parser.add_argument("--int8", action="store_true", help="quantise the graphs first")
    options = parser.parse_args()
    torch.set_num_threads(1)
    version = chosen_version(options.version)
    manifest = version.manifest
    library = rebuild(graph_weights(version.path / "model.onnx"), manifest.architecture)
    shape = ModelShape(len(manifest.labels), manifest.max_tokens, manifest.pad_id)
    texts = _texts(version.path, options.texts)
    engines = {
        name: _engine(graph, shape=shape, int8=options.int8)
        for name, graph in _graphs(library, shape.max_tokens, tidied_only=options.int8).items()
    }
    plans = {"one by one": alone.batches(texts, 1), "by length, 8": alone.batches(texts, 8)}
    print(
        f"{platform.machine()}, {os.cpu_count()} cores,"
        f" onnxruntime {onnxruntime.__version__}, torch {torch.__version__}; {len(texts)} texts: {source()}"
    )
    for plan, batches in plans.items():
        best = dict.fromkeys(engines, np.inf)
        for _ in range(options.rounds):
            for name, engine in engines.items():
                best[name] = min(best[name], _cpu_s(engine, batches))
        first = next(iter(best.values()))
        for name, spent_s in best.items():
            print(f"{plan:14} {name:34} {len(texts) / spent_s:7.0f} texts/s/core   ×{first / spent_s:.2f}")


def _graphs(library: PreTrainedModel, max_tokens: int, *, tidied_only: bool) -> dict[str, ir.Model]:
    ours = through_encoder(library)
    makers: dict[str, Callable[[], ir.Model]] = {
        "library, as exported": lambda: export_graph(library, max_tokens),
        "library, tidied, last layer narrowed": lambda: trace(library, max_tokens),
        "own encoder, as exported": lambda: export_graph(ours, max_tokens),
        "own encoder, tidied": lambda: trace(ours, max_tokens),
    }
    return {name: make() for name, make in makers.items() if "tidied" in name or not tidied_only}


def _engine(graph: ir.Model, *, shape: ModelShape, int8: bool) -> OnnxEngine:
    if int8:
        quantize(graph)
    content = ir.to_proto(graph).SerializeToString()
    return OnnxEngine(content, shape=shape, precision="int8" if int8 else "float32", options=EngineOptions())


def _texts(version: Path, count: int) -> list[Encoding]:
    tokenizer = Tokenizer.from_file(str(version / "tokenizer.json"))
    return [Encoding(tokenizer.encode(sentence).ids) for sentence in sentences()[:count]]


def _cpu_s(engine: OnnxEngine, batches: Sequence[TokenBatch]) -> float:
    started_s = time.process_time()
    for batch in batches:
        engine.run(batch)
    return time.process_time() - started_s


if __name__ == "__main__":
    main()
