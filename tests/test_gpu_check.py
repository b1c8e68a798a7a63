"""The check of a GPU does what a CPU can settle, and names everything that it could not check."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest
import torch

from load_tests import gpu_report
from load_tests.chosen import chosen_version
from load_tests.gpu_check import check_engine, main, prepare
from load_tests.gpu_report import OK, OPEN, WRONG, Report
from load_tests.gpu_subjects import Buffered
from service.core import FloatArray, TokenBatch

ROOT = Path(__file__).parent.parent
HAS_CUDA = "CUDAExecutionProvider" in onnxruntime.get_available_providers() or torch.cuda.is_available()
without_cuda = pytest.mark.skipif(HAS_CUDA, reason="this machine offers CUDA: run scripts/gpu_check itself")

ON_CUDA = {
    *(
        f"cuda, {form}: {part}"
        for form in ("onnx/float32", "onnx/float16", "torchscript/float32", "torchscript/float16")
        for part in ("golden texts", "parity and neighbours", "all shapes", "speed")
    ),
    "cuda, onnx/int8: is refused",
    "cuda: served",
}


@without_cuda
def test_without_a_gpu_the_cpu_halves_pass_and_the_rest_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--short", "--out", str(tmp_path / "report")]) == 2
    record = json.loads((tmp_path / "report/gpu_check.json").read_text(encoding="utf-8"))
    outcomes = {check["name"]: check["outcome"] for check in record["checks"]}
    assert {name for name, outcome in outcomes.items() if outcome == OPEN} == ON_CUDA
    assert {name for name, outcome in outcomes.items() if outcome == WRONG} == set()
    for precision in ("float32", "float16"):
        for part in ("golden texts", "parity with float32 on a CPU, and neighbours", "all shapes"):
            assert outcomes[f"cpu, bound buffers, {precision}: {part}"] == OK
    for engine in ("onnx", "torchscript"):
        assert outcomes[f"{engine}: does not start where cuda is asked for and hidden"] == OK
    assert {figure["engine"] for figure in record["figures"]} == {
        "cpu, onnx/float32, one thread",
        "cpu, onnx/int8, one thread",
    }
    page = (tmp_path / "report/gpu_check.md").read_text(encoding="utf-8")
    assert all(f"| {name} | {outcome} |" in page for name, outcome in outcomes.items())
    assert "0 wrong, 18 not checked" in capsys.readouterr().out


class Off(Buffered):
    """Logits that are wrong by a tenth."""

    def run(self, batch: TokenBatch) -> FloatArray:
        return super().run(batch) + 0.1


def test_an_engine_that_is_off_is_told_and_fails_the_check() -> None:
    version = chosen_version()
    means = prepare(version, short=True, sentences=["good", "a waste of time"])
    report = Report(["a machine"])
    check_engine(report, "off", Off(version, "float32"), means, shape=(1, 16))
    assert [(check.name, check.outcome) for check in report.checks][:2] == [
        ("off: golden texts", WRONG),
        ("off: parity with float32 on a CPU, and neighbours", WRONG),
    ]
    assert "bound 0.001" in report.checks[1].detail
    assert report.exit_code() == 1


def test_out_of_time_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "LIMIT_S", 0.0)
    report = Report(["a machine"])
    report.check("late", lambda: "fine")
    assert [(check.outcome, check.detail) for check in report.checks] == [(OPEN, "out of time")]
    assert report.exit_code() == 2
    report = Report(["a machine"])
    assert report.exit_code() == 0


@pytest.mark.skipif(shutil.which("sh") is None, reason="no shell")
def test_the_command_says_what_it_does() -> None:
    ran = subprocess.run(
        [ROOT / "scripts/gpu_check", "--help"],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "--short" in ran.stdout
