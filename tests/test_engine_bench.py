"""The bench of the engines measures what it says: every engine that can run, on the same texts."""

import json
from pathlib import Path

import pytest

from load_tests.chosen import chosen_version
from load_tests.engine_bench import (
    FUSED_YARDSTICK,
    YARDSTICK,
    main,
    measure,
    plans,
    subjects,
    texts_of,
)
from load_tests.engine_profile import profile
from service.core import Encoding, TokenBatch
from service.engines import choose_model

ENCODINGS = [Encoding([1] * length) for length in (3, 40, 5, 17, 4, 2, 9, 33, 6)]


def test_every_plan_runs_every_text_once() -> None:
    for name, batches in plans(ENCODINGS).items():
        lengths = [int(length) for batch in batches for length in batch.lengths]
        assert sorted(lengths) == sorted(map(len, ENCODINGS)), name
    assert [len(batch) for batch in plans(ENCODINGS)["by length, 8"]] == [8, 1]
    assert plans(ENCODINGS)["by length, 8"][1].lengths.tolist() == [40]
    assert plans(ENCODINGS)["FIFO, 16"][0].lengths.tolist() == [len(one) for one in ENCODINGS]
    assert len(plans(ENCODINGS)["one by one"]) == len(ENCODINGS)


def test_the_yardsticks_are_the_same_model_and_what_is_missing_is_said() -> None:
    version = chosen_version()
    found, reasons = subjects(version, ["onnx", YARDSTICK, FUSED_YARDSTICK])
    assert list(found) == ["onnx/float32", "onnx/int8", YARDSTICK, FUSED_YARDSTICK]
    assert len(reasons) == 1
    assert "no onnx file in bfloat16" in reasons[0]
    text = TokenBatch.of([Encoding([101, 2307, 3185, 102])])
    exact = found["onnx/float32"].run(text)
    for name, subject in found.items():
        assert subject.run(text) == pytest.approx(exact, abs=1), name


def test_a_row_is_texts_over_seconds_and_its_ratio_to_the_yardstick() -> None:
    version = chosen_version()
    found, _ = subjects(version, ["onnx/int8", YARDSTICK])
    batches = [TokenBatch.of([Encoding([101, 2307, 102])])] * 3
    rows = {row.engine: row for row in measure(found, batches, rounds=2, names=("texts", "plan"))}
    assert rows[YARDSTICK].to_yardstick == 1
    ours = rows["onnx/int8"]
    assert ours.best_tokens_per_s == pytest.approx(3 * ours.best_texts_per_s)
    assert ours.median_texts_per_s <= ours.best_texts_per_s
    assert ours.to_yardstick == pytest.approx(ours.best_texts_per_s / rows[YARDSTICK].best_texts_per_s)


def test_reviews_are_of_mixed_lengths() -> None:
    lengths = [len(text) for text in texts_of(chosen_version(), 24)["reviews"]]
    assert len(lengths) == 12
    assert min(lengths) < 40
    assert max(lengths) > 300


def test_the_command_prints_a_table_and_writes_the_same_figures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record = tmp_path / "figures.json"
    wanted = ["--rounds", "1", "--texts", "6", "--kinds", "sentences", "--json", str(record)]
    main([*wanted, "--plans", "by length, 8", "--engines", "onnx/int8", "openvino/float32"])
    printed = capsys.readouterr().out
    rows = json.loads(record.read_text(encoding="utf-8"))["rows"]
    assert [(row["plan"], row["engine"]) for row in rows] == [
        ("by length, 8", "onnx/int8"),
        ("by length, 8", "openvino/float32"),
    ]
    assert "onnxruntime 1." in printed
    for row in rows:
        assert f"| {row['plan']} | {row['engine']} | {row['best_texts_per_s']:.0f} (" in printed


def test_the_profile_names_the_nodes_and_what_they_took(tmp_path: Path) -> None:
    version = chosen_version()
    model = version.read(choose_model(version.manifest, "onnx", precision="int8", device="cpu"))
    by_kind, whole_us = profile(model, 2, 7, folder=tmp_path)
    assert by_kind["MatMulIntegerToFloat"] > max(by_kind["Gelu"], by_kind["Gather"]) > 0
    assert by_kind.total() <= whole_us
