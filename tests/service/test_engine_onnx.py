"""What only the ONNX engine has: the inputs that a graph declares, int8, providers, processors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import onnxruntime
import pytest

from service.core import Encoding, TokenBatch
from service.engines import EngineOptions, open_engine
from service.engines.onnx import has_int8_instructions
from service.errors import StartupError
from tests.models import BERT_INPUTS, PLAIN_INPUTS, bert_tokenizer, make_onnx
from tests.service.engine_cases import CASES, encodings, weights

ONNX = next(case for case in CASES if case.name == "onnx")


@pytest.mark.parametrize("inputs", [BERT_INPUTS, PLAIN_INPUTS])
@pytest.mark.parametrize("integers", ["int32", "int64"])
def test_r40_feeds_what_the_graph_declares(
    inputs: Sequence[str], integers: Literal["int32", "int64"]
) -> None:
    texts = encodings()
    logits = ONNX.open(make_onnx(weights(), inputs=inputs, integers=integers)).run(TokenBatch.of(texts))
    np.testing.assert_allclose(logits, [weights().logits(text.ids) for text in texts], atol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ((*PLAIN_INPUTS, "position_ids"), "does not give: position_ids"),
        (("input_ids", "mask"), "does not give: mask"),
        (("input_ids", "token_type_ids"), "does not take attention_mask"),
    ],
)
def test_r40_a_graph_with_other_inputs_is_refused_with_the_reason(inputs: Sequence[str], reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        ONNX.open(make_onnx(weights(), inputs=inputs))


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime offers CUDA")
    with pytest.raises(StartupError, match=r"device cuda .* offers only .*CPUExecutionProvider"):
        ONNX.open(make_onnx(weights()), device="cuda")


def test_auto_serves_on_the_cpu_where_cuda_is_offered_and_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = ["CUDAExecutionProvider", *onnxruntime.get_available_providers()]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: offered)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    version = ONNX.make_version(tmp_path, precisions=("float32", "int8"))
    engine = open_engine(version, EngineOptions())
    assert (engine.device, engine.precision) == ("cpu", "int8")
    with pytest.raises(StartupError):
        open_engine(version, EngineOptions(device="cuda"))


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
    version = ONNX.make_version(tmp_path, precisions=precisions)
    engine = open_engine(version, EngineOptions(precision=asked, device="cpu"))
    assert (engine.name, engine.precision, engine.device) == ("onnx", expected, "cpu")
    golden = version.manifest.golden_texts[0]
    logits = engine.run(TokenBatch.of([Encoding(bert_tokenizer().encode(golden.text).ids)]))
    np.testing.assert_allclose(logits[0], golden.logits[f"onnx/{expected}"], atol=1e-5)


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
