"""G. Files and engines on another machine: devices, first calls of a shape, files that lean on others."""

import io
import time
import warnings
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from service.core import Encoding, TokenBatch
from service.engines.onnx import OnnxEngine
from service.errors import StartupError
from service.warmup import shapes
from tests.models import make_onnx
from tests.server import SAFETY_S, eventually, local_server
from tests.service.engine_cases import CASES, Case, weights
from tests.service.stand_ins import Opener

BY_NAME = {case.name: case for case in CASES}


def bound_to(device: str) -> bytes:
    """A classifier with a constant on this device, as a trace made there has."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        script = torch.jit.script(type("Bound", (torch.nn.Module,), {})())
        script.define(
            f"""
def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    bias = torch.ones([2], device="{device}")
    return input_ids.to(torch.float32).sum(1, keepdim=True) * bias
"""
        )
        torch.jit.save(script, content)
    return content.getvalue()


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_r43_a_file_bound_to_another_device_is_refused_with_the_device(device: str) -> None:
    """It is run once when it is loaded, where it will be served."""
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(StartupError, match=r"does not run on cpu|cannot load the model"):
        BY_NAME["torchscript"].open(bound_to(device))
    assert BY_NAME["torchscript"].open(bound_to("cpu")).device == "cpu"


def test_r44_ready_comes_after_every_shape_was_run(store: Path) -> None:
    """The gate holds the first call: readiness waits for it, and for the whole grid."""
    opener = Opener(lambda engine: engine.gate.clear())
    with (
        local_server(open_engine=opener, model_store=store, ready=False, lanes=2) as server,
        server.client() as client,
    ):
        assert opener.opened.wait(SAFETY_S)
        eventually(lambda: len(opener.engine.calls) == 1, "the first golden text is in the engine")
        assert client.get("/health/ready").status_code == 503
        assert client.get("/health/live").status_code == 200
        opener.engine.gate.set()
        eventually(lambda: client.get("/health/ready").status_code == 200, "ready")
        run = {(len(lengths), max(lengths)) for lengths, _ in opener.engine.calls}
    settings = server.life.settings
    assert run >= set(
        shapes(
            max_tokens=64,
            max_batch_items=settings.max_batch_items,
            max_batch_tokens=settings.max_batch_tokens,
        )
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_r44_r45_a_new_shape_costs_no_more_than_a_known_one(case: Case) -> None:
    """In processor time of this thread, over 40 shapes; to compile one takes hundreds of times as long."""
    engine = case.open(case.maker(weights()))
    new: list[float] = []
    known: list[float] = []
    for number in range(40):
        batch = TokenBatch.of([Encoding([5] * (2 + number))] * (1 + number % 7))
        for times in (new, known):
            start_s = time.thread_time()
            engine.run(batch)
            times.append(time.thread_time() - start_s)
    assert sum(new[5:]) < 5 * sum(known[5:])


# --- three more


def test_weights_in_a_file_beside_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what has a hash in the manifest is used: a graph that points to another file is refused."""
    (tmp_path / "beside.bin").write_bytes(bytes(10_000))
    monkeypatch.chdir(tmp_path)
    model = onnx.load_from_string(make_onnx(weights()))
    table = model.graph.initializer[0]
    size = len(table.raw_data)
    table.ClearField("raw_data")
    table.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "beside.bin"), ("offset", "0"), ("length", str(size))):
        table.external_data.add(key=key, value=value)
    with pytest.raises(StartupError, match="onnxruntime cannot load the model"):
        BY_NAME["onnx"].open(model.SerializeToString())


@pytest.mark.parametrize("change", ["opset", "operator"])
def test_a_graph_for_a_later_release_is_refused_with_the_reason(change: str) -> None:
    model = onnx.load_from_string(make_onnx(weights()))
    if change == "opset":
        model.opset_import[0].version = 999
    else:
        model.graph.node[0].op_type = "GatherBetter"
    with pytest.raises(StartupError, match="onnxruntime cannot load the model"):
        BY_NAME["onnx"].open(model.SerializeToString())


def test_a_graph_that_holds_for_one_shape_alone_is_refused_when_it_is_proven(store: Path) -> None:
    """An export with fixed axes runs its own example and nothing else."""
    model = onnx.load_from_string(make_onnx(weights()))
    for value in model.graph.input:
        value.type.tensor_type.shape.CopyFrom(
            helper.make_tensor_value_info("x", TensorProto.INT64, [1, 16]).type.tensor_type.shape
        )

    def fixed(_: object, __: object) -> OnnxEngine:
        engine = BY_NAME["onnx"].open(model.SerializeToString())
        assert isinstance(engine, OnnxEngine)
        return engine

    with local_server(model_store=store, open_engine=fixed, ready=False) as server:
        assert server.wait() == 1
