"""A trial version goes through the gate: what it says of itself, and which files are turned away."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from service.core import FloatArray
from service.store import Source, Version, form
from service.tokenizer import Tokenizer
from tests.training.exported import MAX_TOKENS, traced, ungated_version, write_graph
from tests.training.tiny import ALL_ROWS
from training.data import DataError, Example
from training.gate import ALL_SETS, COMPANY_CHANGE, LEAST_ROWS, Commands, Outcome, check_rows, run_gate
from training.origin import Origin, open_origin
from training.parity import ParityError, Vocabulary, eager_logits, join
from training.torchscript import trace_script


@pytest.fixture(scope="module")
def origin() -> Origin:
    return open_origin(traced("bert").folder, base_model=Source("tiny", "Apache-2.0"))


@pytest.fixture(scope="module")
def logits(origin: Origin) -> FloatArray:
    """What the eager model says of all rows."""
    tokenizer = Tokenizer.load(origin.tokenizer_json, max_tokens=MAX_TOKENS, max_text_chars=1000)
    batch = join([tokenizer.encode(text).ids for text, _ in ALL_ROWS])
    return eager_logits(traced("bert").model, batch, 0)


@pytest.fixture(scope="module")
def examples(logits: FloatArray) -> list[Example]:
    """Rows that the eager model answers rightly, all of them, and not by a hair."""
    return [
        Example(text, int(row.argmax()))
        for (text, _), row in zip(ALL_ROWS, logits, strict=True)
        if np.ptp(row) > 0.3
    ]


def trial(
    folder: Path, origin: Origin, models: Mapping[str, PreTrainedModel], *, script: bytes | None = None
) -> Version:
    files = {
        precision: write_graph("bert", model, folder / precision, int8=precision == "int8")
        for precision, model in models.items()
    }
    return ungated_version(
        folder / "store", traced("bert").model, origin.tokenizer_json, files, script=script
    )


def pass_gate(
    version: Version, origin: Origin, examples: list[Example], *, more: Sequence[Example] = ()
) -> Outcome:
    sets = {name: rows for name, rows in (("tiny/dev", examples), ("more/dev", more)) if rows}
    return run_gate(
        version,
        traced("bert").model,
        vocabulary=Vocabulary(origin.special, origin.words, origin.pad_id),
        sets=sets,
        commands=Commands(
            "export", {(name, form(model)): "evaluate" for name in sets for model in version.manifest.models}
        ),
        threads=1,
    )


def leaning(logits: FloatArray) -> PreTrainedModel:
    """The model with a head that leans so far to one side that half of its answers are others."""
    model = traced("bert").copy_of_model()
    lean = float(np.median(logits[:, 1] - logits[:, 0])) / 2
    assert 0.05 < abs(lean) < 0.9
    with torch.no_grad():
        bias = dict(model.named_parameters())["classifier.bias"]
        bias.copy_((bias + torch.tensor([lean, -lean])).half().float())
    return model


def test_what_a_version_says_after_it_passed(tmp_path: Path, origin: Origin, examples: list[Example]) -> None:
    model = traced("bert").model
    outcome = pass_gate(trial(tmp_path, origin, {"float32": model, "int8": model}), origin, examples)
    accuracy = {m.precision: m for m in outcome.metrics if m.name == "accuracy"}
    assert accuracy["float32"].value == 1.0
    assert accuracy["int8"].value >= 0.995
    assert accuracy["int8"].examples == len(examples)
    assert {m.command for m in outcome.metrics} == {"export", "evaluate"}
    loss = next(m for m in outcome.metrics if m.name == "accuracy lost against float32")
    assert (loss.dataset, loss.examples) == (ALL_SETS, len(examples))
    assert loss.value == pytest.approx(1.0 - accuracy["int8"].value)
    for golden in outcome.golden_texts:
        assert set(golden.logits) == {"reference", "onnx/float32", "onnx/int8"}
        np.testing.assert_allclose(golden.logits["onnx/float32"], golden.logits["reference"], atol=1e-4)
    assert any(len(golden.text) > 2000 for golden in outcome.golden_texts)


def test_probabilities_are_compared_at_the_temperature_of_the_version(
    tmp_path: Path, origin: Origin, examples: list[Example]
) -> None:
    model = traced("bert").model
    version = trial(tmp_path, origin, {"float32": model, "int8": model})
    changes = {}
    for temperature in (1.0, 50.0):
        manifest = replace(version.manifest, temperature=temperature)
        outcome = pass_gate(replace(version, manifest=manifest), origin, examples)
        changes[temperature] = {m.name: m.value for m in outcome.metrics if m.precision == "int8"}
    names = ("p99 of the change of a probability against float32", COMPANY_CHANGE)
    assert all(changes[50.0][name] < changes[1.0][name] for name in names)
    assert changes[50.0][names[0]] < changes[1.0][names[0]] / 5
    assert changes[50.0]["accuracy"] == changes[1.0]["accuracy"]


def test_torchscript_is_measured_beside_onnx(tmp_path: Path, origin: Origin, examples: list[Example]) -> None:
    model = traced("bert").model
    outcome = pass_gate(
        trial(tmp_path, origin, {"float32": model}, script=trace_script(model)), origin, examples
    )
    by_form = {(m.name, f"{m.format}/{m.precision}"): m.value for m in outcome.metrics}
    assert by_form["accuracy", "onnx/float32"] == by_form["accuracy", "torchscript/float32"] == 1.0
    assert by_form["p99 of the change of a probability against float32", "torchscript/float32"] < 1e-4
    for golden in outcome.golden_texts:
        assert set(golden.logits) == {"reference", "onnx/float32", "torchscript/float32"}


def test_torchscript_alone_passes(tmp_path: Path, origin: Origin, examples: list[Example]) -> None:
    version = trial(tmp_path, origin, {}, script=trace_script(traced("bert").model))
    outcome = pass_gate(version, origin, examples)
    assert {m.format for m in outcome.metrics} == {"torchscript"}
    assert next(m for m in outcome.metrics if m.name == "accuracy").value == 1.0


def test_a_torchscript_file_of_another_model_is_refused(
    tmp_path: Path, origin: Origin, logits: FloatArray
) -> None:
    version = trial(tmp_path, origin, {}, script=trace_script(leaning(logits)))
    with pytest.raises(ParityError, match="float32, 1 texts"):
        pass_gate(version, origin, [])


def test_float32_alone_needs_no_sets(tmp_path: Path, origin: Origin) -> None:
    outcome = pass_gate(trial(tmp_path, origin, {"float32": traced("bert").model}), origin, [])
    assert {m.precision for m in outcome.metrics} == {"float32"}
    assert "accuracy" not in {m.name for m in outcome.metrics}


def test_int8_that_loses_accuracy_is_refused(
    tmp_path: Path, origin: Origin, examples: list[Example], logits: FloatArray
) -> None:
    version = trial(tmp_path, origin, {"float32": traced("bert").model, "int8": leaning(logits)})
    with pytest.raises(ParityError, match="int8 loses"):
        pass_gate(version, origin, examples)


def test_a_float_file_of_another_model_is_refused(tmp_path: Path, origin: Origin, logits: FloatArray) -> None:
    with pytest.raises(ParityError, match="float32, 1 texts"):
        pass_gate(trial(tmp_path, origin, {"float32": leaning(logits)}), origin, [])


def test_a_model_that_is_in_doubt_about_everything_is_refused(tmp_path: Path, origin: Origin) -> None:
    model = traced("bert").copy_of_model()
    with torch.no_grad():
        for kind in ("weight", "bias"):
            dict(model.named_parameters())[f"classifier.{kind}"].zero_()
    version = trial(tmp_path, origin, {"float32": model})
    with pytest.raises(ParityError, match="in doubt"):
        run_gate(
            version,
            model,
            vocabulary=Vocabulary(origin.special, origin.words, origin.pad_id),
            sets={},
            commands=Commands("export", {}),
            threads=1,
        )


def test_a_text_that_the_service_refuses_is_named_by_its_row(tmp_path: Path, origin: Origin) -> None:
    version = trial(tmp_path, origin, {"float32": traced("bert").model})
    with pytest.raises(DataError, match="tiny/dev, row 2: the service refuses the text"):
        pass_gate(version, origin, [Example("good", 1), Example("\u200b", 0)])


def test_too_few_rows_do_not_judge_int8() -> None:
    check_rows({"a": [Example("good", 1)] * 1500, "b": [Example("bad", 0)] * (LEAST_ROWS - 1500)})
    with pytest.raises(DataError, match="2,000"):
        check_rows({"a": [Example("good", 1)] * (LEAST_ROWS - 1)})


def test_a_text_of_two_sets_counts_once(tmp_path: Path, origin: Origin, examples: list[Example]) -> None:
    model = traced("bert").model
    version = trial(tmp_path, origin, {"float32": model, "int8": model})
    again = [Example(examples[0].text.upper(), examples[0].label), *examples[2:5]]
    outcome = pass_gate(version, origin, examples[1:], more=again)
    pooled = next(m for m in outcome.metrics if m.dataset == ALL_SETS)
    assert pooled.examples == len(examples)
