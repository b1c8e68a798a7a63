"""What only the TorchScript engine has: weights stored as float16, modules that do not run, and is served."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from service.core import TokenBatch
from service.errors import StartupError
from service.store import open_version
from tests.models import make_version
from tests.scripts import make_script, scripted
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


def test_weights_are_constants_and_every_call_runs_the_same_graph() -> None:
    """Seen by an operator of the test's own inside the module.

    What hangs on the weights alone is computed at load, once. Nothing is profiled or optimised in a call,
    whichever thread it comes from: the first calls would be answered by other code than the later ones.
    """
    weight = (7, 2)
    seen: list[tuple[tuple[int, ...], bool]] = []

    def watch(value: torch.Tensor) -> torch.Tensor:
        seen.append((tuple(value.shape), torch._C._get_graph_executor_optimize()))  # noqa: SLF001 - no other says it
        return value.clone()

    library = torch.library.Library("valence_tests", "DEF")  # type: ignore[no-untyped-call]
    library.define("watch(Tensor value) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("watch", watch, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    code = f"""{TENSORS}) -> Tensor:
    weight = torch.ops.valence_tests.watch(self.weight)
    return torch.ops.valence_tests.watch(input_ids[:, :1].float()) * weight[:1]"""
    engine = SCRIPT.open(scripted(code, weight=torch.ones(weight)))
    assert [one for one, _ in seen].count(weight) == 1
    seen.clear()
    batch = TokenBatch.of(encodings())
    for _ in range(3):
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(engine.run, batch).result().shape == (len(batch), 2)
    engine.run(batch)
    assert seen == [((len(batch), 1), False)] * 4


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
