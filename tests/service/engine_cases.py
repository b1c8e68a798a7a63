"""What the tests of all engines need to know of each: how a file is made for it, and what it says."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from service.core import Encoding
from service.engines import Engine, EngineOptions, ModelShape
from service.store import Version, open_version
from tests.models import Weights, bert_tokenizer, make_onnx, make_version, make_weights
from tests.scripts import make_script

ROOT = Path(__file__).parents[2]
SHAPE = ModelShape(labels=2, max_tokens=64, pad_id=0)
ON_CPU = EngineOptions(device="cpu")


@dataclass(frozen=True)
class Case:
    """An engine.

    Attributes:
        name: the engine and its format.
        kind: its class, in its module.
        maker: what makes the file of some weights, by its module and its name there.
        file: the name of that file in a version.
        version: arguments of `make_version` for a version that has this file alone.
        library: what it imports when it is chosen.
        no_model: what it says of bytes that are no model.
        unknown_id: what it raises for a token that is not in the vocabulary.
        sleepers: whether the library starts one more pool, of threads - 1, that such a model never uses
            (torch: the pool of XNNPACK, which `set_num_threads` makes).
    """

    name: str
    kind: str
    maker: Callable[..., bytes]
    file: str
    library: str
    no_model: str
    unknown_id: str
    sleepers: bool = False
    version: Mapping[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> Any:
        """The module of the engine."""
        return import_module(f"service.engines.{self.name}")

    def open(self, content: bytes, *, shape: ModelShape = SHAPE, **options: Any) -> Engine:
        """The engine on the bytes of a file, on the CPU unless the options say otherwise."""
        kind: Callable[..., Engine] = getattr(self.module, self.kind)
        return kind(content, shape=shape, precision="float32", options=replace(ON_CPU, **options))

    def make_version(self, store: Path, **changes: Any) -> Version:
        """A verified version that has a file for this engine alone."""
        make_version(store, **{**self.version, **changes})
        return open_version(store, "sentiment")

    def run_alone(self, code: str) -> "subprocess.CompletedProcess[str]":
        """Run code in a process of its own, where `engine_of(lanes, threads)` opens the engine."""
        start = f"""
import os
from service.core import Encoding, TokenBatch
from service.engines import EngineOptions, ModelShape
from service.engines.{self.name} import {self.kind}
from tests.models import bert_tokenizer, make_weights
from {self.maker.__module__} import {self.maker.__name__} as make

content = make(make_weights(bert_tokenizer(), 2))

def engine_of(lanes, threads):
    options = EngineOptions(device="cpu", lanes=lanes, threads_per_lane=threads)
    return {self.kind}(content, shape=ModelShape(2, 64, 0), precision="float32", options=options)
"""
        return python(start + code)


CASES = (
    Case(
        "onnx",
        "OnnxEngine",
        make_onnx,
        "model.onnx",
        library="onnxruntime",
        no_model="onnxruntime cannot load the model",
        unknown_id="out of data bounds",
    ),
    Case(
        "torchscript",
        "TorchScriptEngine",
        make_script,
        "model.torchscript",
        library="torch",
        no_model="torch cannot load the model",
        unknown_id="index out of range",
        sleepers=True,
        version={"precisions": (), "script": make_script},
    ),
)


def python(code: str) -> "subprocess.CompletedProcess[str]":
    """Run code in a process of its own, with warnings as errors. Fails the test when it fails."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr
    return ran


def weights(labels: int = 2) -> Weights:
    """The weights that every file here is made of."""
    return make_weights(bert_tokenizer(), labels)


def encodings(lengths: Sequence[int] = (3, 16, 2, 64, 7, 1, 33, 64, 5), *, seed: int = 3) -> list[Encoding]:
    """Texts of the lengths at which padding, one text and long rows show their faults."""
    random = np.random.default_rng(seed)
    vocabulary = bert_tokenizer().get_vocab_size()
    return [Encoding(random.integers(1, vocabulary, n).tolist()) for n in lengths]
