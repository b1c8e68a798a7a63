"""What the engines decide for a GPU, as far as a machine without one can show."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from service.core import TokenBatch
from service.engines import EngineOptions, choose_model, open_engine
from service.errors import StartupError
from service.store import ModelFile
from service.tokenizer import Tokenizer
from service.warmup import check_golden_texts
from tests.service.engine_cases import CASES, encodings, weights

ONNX, SCRIPT = (next(case for case in CASES if case.name == name) for name in ("onnx", "torchscript"))


@pytest.mark.parametrize(
    ("precisions", "device", "expected"),
    [
        (("int8", "float32", "float16"), "cuda", "float16"),
        (("int8", "float32"), "cuda", "float32"),
        (("int8", "float32", "float16"), "cpu", "int8"),
        (("float16", "float32"), "cpu", "float32"),
    ],
)
def test_auto_takes_the_precision_of_the_device(
    tmp_path: Path, precisions: tuple[str, ...], device: str, expected: str
) -> None:
    files = [ModelFile(f"{p}.onnx", "onnx", p, 1, "", 1e-3) for p in precisions]  # type: ignore[arg-type]
    manifest = replace(ONNX.make_version(tmp_path).manifest, models=files)
    assert choose_model(manifest, "onnx", precision="auto", device=device).precision == expected


def test_int8_is_refused_with_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = ["CUDAExecutionProvider", *onnxruntime.get_available_providers()]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: offered)
    version = ONNX.make_version(tmp_path, precisions=("float32", "int8"))
    with pytest.raises(StartupError, match="int8 is made for a CPU"):
        open_engine(version, EngineOptions(engine="onnx", precision="int8", device="cuda"))


def test_torchscript_computes_in_float16_from_the_float32_file(tmp_path: Path) -> None:
    version = SCRIPT.make_version(tmp_path)
    manifest = version.manifest
    engine = open_engine(version, replace(SCRIPT.options, precision="float16"))
    assert (engine.name, engine.precision) == ("torchscript", "float16")
    texts = encodings()
    logits = engine.run(TokenBatch.of(texts))
    exact = np.array([weights().logits(text.ids) for text in texts], dtype=np.float32)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, exact, atol=0.02)
    assert np.abs(logits - exact).max() > 1e-5, "computed in float32"
    tokenizer = Tokenizer.load(
        version.read(manifest.tokenizer), max_tokens=manifest.max_tokens, max_text_chars=1000
    )
    check_golden_texts(engine, tokenizer, manifest)


def test_torchscript_in_float32_is_as_it_was(tmp_path: Path) -> None:
    engine = open_engine(SCRIPT.make_version(tmp_path), SCRIPT.options)
    assert engine.precision == "float32"
    texts = encodings()
    exact = [weights().logits(text.ids) for text in texts]
    np.testing.assert_allclose(engine.run(TokenBatch.of(texts)), exact, atol=1e-5)
