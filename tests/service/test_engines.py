"""The engine gives each text its own logits whoever is beside it, and refuses what does not fit."""

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime
import pytest

from service.core import Encoding, TokenBatch
from service.engines import ENGINES, EngineOptions, ModelShape, choose_model, open_engine, pad
from service.engines.onnx import OnnxEngine, has_int8_instructions
from service.errors import EngineFailed, StartupError
from service.store import Manifest, ModelFile, Version, open_version
from tests.models import (
    BERT_INPUTS,
    PLAIN_INPUTS,
    Weights,
    bert_tokenizer,
    make_onnx,
    make_version,
    make_weights,
)

ROOT = Path(__file__).parents[2]
SHAPE = ModelShape(labels=2, max_tokens=64, pad_id=0)
ON_CPU = EngineOptions(device="cpu")


def weights(labels: int = 2) -> Weights:
    return make_weights(bert_tokenizer(), labels)


def encodings(seed: int = 3) -> list[Encoding]:
    """Texts of the lengths at which padding, one text and long rows show their faults."""
    random = np.random.default_rng(seed)
    vocabulary = bert_tokenizer().get_vocab_size()
    return [Encoding(random.integers(1, vocabulary, n).tolist()) for n in (3, 16, 2, 64, 7, 1, 33, 64, 5)]


def engine_of(model: bytes, **options: Any) -> OnnxEngine:
    return OnnxEngine(model, shape=SHAPE, precision="float32", options=replace(ON_CPU, **options))


def test_pads_to_the_right_with_a_mask() -> None:
    ids, mask = pad(TokenBatch.of([Encoding([5, 6, 7]), Encoding([8])]), 9)
    assert ids.tolist() == [[5, 6, 7], [8, 9, 9]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize("inputs", [BERT_INPUTS, PLAIN_INPUTS])
@pytest.mark.parametrize("integers", ["int32", "int64"])
def test_r40_feeds_what_the_graph_declares(
    inputs: Sequence[str], integers: Literal["int32", "int64"]
) -> None:
    texts = encodings()
    logits = engine_of(make_onnx(weights(), inputs=inputs, integers=integers)).run(TokenBatch.of(texts))
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, [weights().logits(text.ids) for text in texts], atol=1e-5)


def test_r32_the_answer_does_not_depend_on_the_neighbours() -> None:
    engine, texts = engine_of(make_onnx(weights())), encodings()
    alone = np.concatenate([engine.run(TokenBatch.of([text])) for text in texts])
    np.testing.assert_allclose(engine.run(TokenBatch.of(texts)), alone, atol=1e-5)
    np.testing.assert_allclose(engine.run(TokenBatch.of(texts[::-1]))[::-1], alone, atol=1e-5)


def test_r35_the_same_call_gives_the_same_bits() -> None:
    engine, batch = engine_of(make_onnx(weights())), TokenBatch.of(encodings())
    first = engine.run(batch).tobytes()
    assert {engine.run(batch).tobytes() for _ in range(20)} == {first}
    with ThreadPoolExecutor(4) as executor:
        assert {logits.tobytes() for logits in executor.map(engine.run, [batch] * 20)} == {first}


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ((*PLAIN_INPUTS, "position_ids"), "does not give: position_ids"),
        (("input_ids", "mask"), "does not give: mask"),
        (("input_ids", "token_type_ids"), "does not take attention_mask"),
    ],
)
def test_r40_a_graph_with_other_inputs_is_refused_at_load(inputs: Sequence[str], reason: str) -> None:
    model = make_onnx(weights(), inputs=inputs)
    with pytest.raises(StartupError, match=reason):
        engine_of(model)


def test_r37_a_graph_with_another_number_of_labels_is_refused() -> None:
    with pytest.raises(StartupError, match="for 2 labels"):
        engine_of(make_onnx(weights(labels=3)))


def test_a_graph_with_other_numbers_is_refused() -> None:
    with pytest.raises(StartupError, match=r"tensor\(double\)"):
        engine_of(make_onnx(weights(), output="double"))


@pytest.mark.parametrize("content", [b"", b"not a model"])
def test_what_is_no_model_is_refused(content: bytes) -> None:
    with pytest.raises(StartupError, match="onnxruntime cannot load the model"):
        engine_of(content)


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime offers CUDA")
    with pytest.raises(StartupError, match=r"device cuda .* offers only .*CPUExecutionProvider"):
        engine_of(make_onnx(weights()), device="cuda")


def test_auto_serves_on_the_cpu_where_cuda_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = ["CUDAExecutionProvider", *onnxruntime.get_available_providers()]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: offered)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    version = version_of(tmp_path, precisions=("float32", "int8"))
    engine = open_engine(version, EngineOptions())
    assert (engine.device, engine.precision) == ("cpu", "int8")
    with pytest.raises(StartupError):
        open_engine(version, EngineOptions(device="cuda"))


def test_r48_starts_quietly_on_a_part_of_the_cores() -> None:
    code = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from service.engines import EngineOptions, ModelShape
from service.engines.onnx import OnnxEngine
from service.quota import cpu_quota
from tests.models import bert_tokenizer, make_onnx, make_weights

model = make_onnx(make_weights(bert_tokenizer(), 2))
options = EngineOptions(device="cpu", lanes=1, threads_per_lane=2)
OnnxEngine(model, shape=ModelShape(2, 64, 0), precision="float32", options=options)
print(cpu_quota())
"""
    out = python(code)
    assert float(out.stdout) <= 1
    assert out.stderr == ""


def test_closed_it_runs_nothing_and_closes_twice() -> None:
    engine = engine_of(make_onnx(weights()))
    engine.close()
    engine.close()
    with pytest.raises(EngineFailed, match="closed"):
        engine.run(TokenBatch.of(encodings()))


def test_a_failed_call_does_not_harm_the_next() -> None:
    engine, good = engine_of(make_onnx(weights())), TokenBatch.of(encodings())
    before = engine.run(good).tobytes()
    with pytest.raises(Exception, match="out of data bounds"):
        engine.run(TokenBatch.of([Encoding([10**9])]))
    assert engine.run(good).tobytes() == before


@pytest.mark.parametrize(("lanes", "threads"), [(1, 1), (3, 1), (1, 3), (2, 3)])
def test_threads_of_all_lanes_stay_within_lanes_times_threads(lanes: int, threads: int) -> None:
    """Callers and onnxruntime's pool together, counted by the system in a process of their own."""
    code = f"""
import os
from service.engines import EngineOptions, ModelShape
from service.engines.onnx import OnnxEngine
from tests.models import bert_tokenizer, make_onnx, make_weights

model = make_onnx(make_weights(bert_tokenizer(), 2))
before = len(os.listdir("/proc/self/task"))
options = EngineOptions(device="cpu", lanes={lanes}, threads_per_lane={threads})
engine = OnnxEngine(model, shape=ModelShape(2, 64, 0), precision="float32", options=options)
print(len(os.listdir("/proc/self/task")) - before)
"""
    out = python(code)
    assert int(out.stdout) + lanes == lanes * threads
    assert out.stderr == ""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, cwd=ROOT
    )


def version_of(store: Path, **changes: Any) -> Version:
    make_version(store, **changes)
    return open_version(store, "sentiment")


@pytest.mark.parametrize(
    ("precisions", "asked", "expected"),
    [
        (("float32", "int8"), "auto", "int8"),
        (("float32",), "auto", "float32"),
        (("float32", "int8"), "float32", "float32"),
        (("float32", "int8"), "int8", "int8"),
    ],
)
def test_the_precision_asked_for_is_served(
    tmp_path: Path, precisions: Sequence[str], asked: str, expected: str
) -> None:
    version = version_of(tmp_path, precisions=precisions)
    engine = open_engine(version, EngineOptions(precision=asked, device="cpu"))
    assert (engine.name, engine.precision, engine.device) == ("onnx", expected, "cpu")
    assert (engine.labels, engine.max_tokens) == (2, 64)
    golden = version.manifest.golden_texts[0]
    ids = bert_tokenizer().encode(golden.text).ids
    logits = engine.run(TokenBatch.of([Encoding(ids)]))
    np.testing.assert_allclose(logits[0], golden.logits[f"onnx/{expected}"], atol=1e-5)


def test_a_precision_that_the_version_lacks_is_refused_with_those_it_has(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no onnx file in int8; it has float32"):
        open_engine(version_of(tmp_path), EngineOptions(precision="int8", device="cpu"))


def manifest_with(store: Path, files: Sequence[tuple[Any, Any]]) -> Manifest:
    manifest = version_of(store).manifest
    models = [ModelFile(f"{f}.{p}", f, p, 1, "", 1e-3) for f, p in files]
    return replace(manifest, models=models)


def test_auto_is_float32_with_cuda(tmp_path: Path) -> None:
    manifest = manifest_with(tmp_path, [("onnx", "int8"), ("onnx", "float32"), ("openvino", "bfloat16")])
    assert choose_model(manifest, "onnx", precision="auto", device="cuda").precision == "float32"
    assert choose_model(manifest, "openvino", precision="bfloat16", device="cpu").format == "openvino"
    with pytest.raises(StartupError, match="has no torchscript file in auto; it has none"):
        choose_model(manifest, "torchscript", precision="auto", device="cpu")


def test_an_unknown_engine_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"no engine steam; there are {', '.join(ENGINES)}"):
        open_engine(version_of(tmp_path), EngineOptions(engine="steam"))


def test_a_damaged_graph_is_refused_with_its_path(tmp_path: Path) -> None:
    version = version_of(tmp_path, model=lambda _: b"no graph")
    with pytest.raises(StartupError, match=r"1/model\.onnx: onnxruntime cannot load"):
        open_engine(version, ON_CPU)


def test_the_engine_is_imported_when_it_is_chosen() -> None:
    code = "import sys, service.engines; print('onnxruntime' in sys.modules)"
    assert python(code).stdout == "False\n"


def test_a_store_that_changes_while_serving_does_no_harm(tmp_path: Path) -> None:
    version = version_of(tmp_path)
    engine, batch = open_engine(version, ON_CPU), TokenBatch.of(encodings())
    before = engine.run(batch).tobytes()
    (version.path / "model.onnx").write_bytes(b"")
    assert engine.run(batch).tobytes() == before


@pytest.mark.parametrize(
    ("flags", "exact"), [("fpu avx512f avx512_vnni", True), ("avx2 avx_vnni", True), ("avx2 avx512f", False)]
)
def test_r31_knows_processors_without_exact_8_bit_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, exact: bool
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor : 0\nflags : {flags}\n")
    assert has_int8_instructions(path) is exact
    assert has_int8_instructions(tmp_path / "absent") is False
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert has_int8_instructions(path) is True
