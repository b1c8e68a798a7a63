"""What only the TorchScript engine has: weights stored as float16, modules that do not run, and is served."""

import io
import warnings
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from service.core import TokenBatch
from service.errors import StartupError
from service.store import open_version
from tests.models import make_version
from tests.scripts import make_script
from tests.server import serving
from tests.service.engine_cases import CASES, encodings, weights

SCRIPT = next(case for case in CASES if case.name == "torchscript")


def test_weights_stored_as_float16_are_computed_with_in_float32() -> None:
    texts = encodings()
    content = make_script(weights(), half=True)
    assert len(content) < len(make_script(weights()))
    logits = SCRIPT.open(content).run(TokenBatch.of(texts))
    halves = [
        table.astype(np.float16).astype(np.float32) for table in (weights().embedding, weights().kernel)
    ]
    expected = [halves[0][list(text.ids)].mean(axis=0) @ halves[1] for text in texts]
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_a_device_that_is_not_there_is_refused_with_the_build_of_torch() -> None:
    if torch.cuda.is_available():
        pytest.skip("this torch has CUDA")
    with pytest.raises(StartupError, match=r"device cuda was asked for, but this torch \(\d"):
        SCRIPT.open(make_script(weights()), device="cuda")


def scripted(code: str) -> bytes:
    """A file with this `forward`, from its arguments on."""
    holder: torch.nn.Module = type("Odd", (torch.nn.Module,), {})()
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        script = torch.jit.script(holder)
        script.define(f"def forward(self, {code}\n")
        torch.jit.save(script, content)
    return content.getvalue()


TENSORS = "input_ids: Tensor, attention_mask: Tensor"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (f"{TENSORS}) -> Tensor:\n    raise RuntimeError('made to fail')", "made to fail"),
        (
            f"{TENSORS}) -> Tuple[Tensor, Tensor]:\n    return input_ids, attention_mask",
            "not two tensors to one",
        ),
        (
            "input_ids: Tensor, attention_mask: int) -> Tensor:\n    return input_ids",
            "not two tensors to one",
        ),
        (
            f"{TENSORS}) -> Tensor:\n    return input_ids",
            r"torch\.int64\[2, 3\], not torch\.float32\[2, 2\]",
        ),
    ],
)
def test_a_module_that_is_no_classifier_is_refused_at_load(code: str, reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        SCRIPT.open(scripted(code))


def test_the_service_answers_with_a_torchscript_file_alone(tmp_path: Path) -> None:
    make_version(tmp_path, precisions=(), script=make_script)
    with serving(model_store=tmp_path, engine="torchscript", device="cpu") as server:
        answer = httpx.post(f"{server.url}/predict", json={"inputs": ["a great film", "awful"]}, timeout=60)
        health = httpx.get(f"{server.url}/health", timeout=60).json()
    assert [one["label"] for one in answer.json()["predictions"]] == ["positive", "negative"]
    assert "torchscript" in str(health)
    # Every line was JSON, so torch printed nothing of its own; nor did it warn through the log.
    assert not [line for line in server.lines if "deprecated" in str(line)]


def test_a_file_that_is_not_the_one_in_the_manifest_is_refused_by_the_store(tmp_path: Path) -> None:
    path = make_version(tmp_path, precisions=(), script=make_script)
    content = (path / "model.torchscript").read_bytes()
    (path / "model.torchscript").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(StartupError, match=r"model\.torchscript"):
        open_version(tmp_path, "sentiment")
