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


def no_sleepers(_lanes: int, _threads: int) -> int:
    """None but those that work."""
    return 0


@dataclass(frozen=True)
class Case:
    """An engine.

    Attributes:
        name: the engine.
        format: that of its files.
        kind: its class, in its module.
        maker: what makes the file of some weights, by its module and its name there.
        file: the name of that file in a version.
        version: arguments of `make_version` for a version that has this file alone.
        library: what it imports when it is chosen.
        no_model: what it says of bytes that are no model.
        no_int8: what it says when it is asked for int8 and has float32.
        unknown_id: what it raises for a token that is not in the vocabulary.
        sleepers: how many threads the library starts beside those that compute, for lanes and threads.
        hands_over: whether a call may wait for a thread of the library that computes in its place.
    """

    name: str
    format: str
    kind: str
    maker: Callable[..., bytes]
    file: str
    library: str
    no_model: str
    no_int8: str
    unknown_id: str
    sleepers: Callable[[int, int], int] = no_sleepers
    hands_over: bool = False
    version: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> EngineOptions:
        """This engine in float32 on the CPU."""
        return replace(ON_CPU, engine=self.name, precision="float32")

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
        "onnx",
        "OnnxEngine",
        make_onnx,
        "model.onnx",
        library="onnxruntime",
        no_model="onnxruntime cannot load the model",
        no_int8="no onnx file in int8; it has float32",
        unknown_id="out of data bounds",
    ),
    Case(
        "torchscript",
        "torchscript",
        "TorchScriptEngine",
        make_script,
        "model.torchscript",
        library="torch",
        no_model="torch cannot load the model",
        no_int8="no torchscript file in int8; it has float32",
        unknown_id="index out of range",
        # The pool of XNNPACK, which `set_num_threads` makes.
        sleepers=lambda _lanes, threads: threads - 1,
        version={"precisions": (), "script": make_script},
    ),
    Case(
        "openvino",
        "onnx",
        "OpenVinoEngine",
        make_onnx,
        "model.onnx",
        library="openvino",
        no_model="openvino cannot load the model",
        no_int8="openvino computes in float32 or bfloat16, not in int8",
        unknown_id="out of the vocabulary",
        # One for each lane, which may compute in the place of its caller, and one for callbacks.
        sleepers=lambda lanes, _threads: lanes + 1,
        hands_over=True,
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
