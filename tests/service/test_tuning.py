"""A tuning finds what is faster, is used where nothing else is asked for, and is ignored where it is foreign.

No test compares times: what must lose is slower by design, many times over.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from service.calibration import calibrate, choose, forms, lane_plans
from service.core import FloatArray, TokenBatch
from service.engines import Engine, EngineOptions, open_engine
from service.errors import StartupError
from service.loading import LoadedModel, load, tune
from service.machine import Machine, this_machine
from service.metrics import Metrics
from service.predictor import Predictor
from service.quota import LanePlan
from service.settings import Settings
from service.store import Manifest, Version, list_models, open_version
from service.tokenizer import Tokenizer
from service.tuning import Choice, Record, Row, apply
from tests.models import make_version
from tests.service.stand_ins import GatedEngine, Opener
from tests.service.test_cli import valence

SLOW_S = 0.02  # of a call that takes a tenth of a millisecond otherwise
MACHINE = Machine("a processor", ["avx2"], 2.0, {"onnxruntime": "1"})
ONNX: dict[str, Any] = {"engine": "onnx", "device": "cpu"}


class SlowEngine:
    """A real engine; a call that `is_slow` names takes longer by design."""

    def __init__(self, engine: Engine, is_slow: Callable[[TokenBatch], bool]) -> None:
        self._engine = engine
        self._is_slow = is_slow
        self.name, self.precision, self.device = engine.name, engine.precision, engine.device
        self.labels, self.max_tokens = engine.labels, engine.max_tokens

    def run(self, batch: TokenBatch) -> FloatArray:
        if self._is_slow(batch):
            time.sleep(SLOW_S)
        return self._engine.run(batch)

    def close(self) -> None:
        self._engine.close()


class SlowOpener:
    """Opens real engines, and slow ones for the options that `is_slow` names."""

    def __init__(self, is_slow: Callable[[EngineOptions], bool]) -> None:
        self._is_slow = is_slow
        self.opened = 0

    def __call__(self, version: Version, options: EngineOptions) -> SlowEngine:
        self.opened += 1
        slow = self._is_slow(options)
        return SlowEngine(open_engine(version, options), lambda _: slow)


def slow_int8() -> SlowOpener:
    """With this one float32 wins, which is never the default where there is int8."""
    return SlowOpener(lambda options: options.precision == "int8")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_version(tmp_path / "store", precisions=("float32", "int8"))
    return tmp_path / "store"


def settings_for(store: Path, **changes: Any) -> Settings:
    return Settings(**{"model_store": store, **ONNX, **changes})


def calibrated(store: Path, opener: Any = open_engine, **changes: Any) -> Record:
    settings = settings_for(store, **changes)
    version = open_version(store, "sentiment")
    tokenizer = Tokenizer.load(
        version.read(version.manifest.tokenizer),
        max_tokens=version.manifest.max_tokens,
        max_text_chars=settings.max_text_chars,
    )
    return calibrate(version, tokenizer, settings, open_engine=opener, machine=MACHINE, seconds=0.5)


def loaded(settings: Settings) -> LoadedModel:
    """What a start makes; closed at once, since only its description is asked for."""
    model = load(settings, open_engine, go_on=lambda: True)
    model.tokenizer.close()
    model.engine.close()
    return model


def row(texts_per_s: float) -> Row:
    choice = Choice("onnx", "int8", "cpu", lanes=1, threads_per_lane=1, max_batch_tokens=512)
    return Row("forms", choice, texts_per_s=texts_per_s, lone_p50_s=1.0, cpu_s_per_text=1.0, rounds=1)


# --- what is measured, and what wins


@pytest.mark.parametrize(("slow", "wins"), [("int8", "float32"), ("float32", "int8")])
def test_the_faster_form_wins(store: Path, slow: str, wins: str) -> None:
    record = calibrated(store, SlowOpener(lambda options: options.precision == slow), lanes=1)
    assert record.choice.precision == wins
    of_forms = [one for one in record.table if one.part == "forms"]
    rates: dict[str, float] = {one.choice.precision: one.texts_per_s for one in of_forms}
    assert rates[wins] > rates[slow]
    assert record.choice in [one.choice for one in record.table]


def test_the_faster_lanes_win(store: Path) -> None:
    record = calibrated(store, SlowOpener(lambda options: options.lanes == 2), precision="int8")
    assert (record.choice.lanes, record.choice.threads_per_lane) == (1, 2)


def test_the_faster_token_budget_wins(store: Path) -> None:
    """Every call takes the same time, so that the largest batches win."""
    opener = SlowOpener(lambda _: True)
    record = calibrated(store, opener, precision="int8", lanes=1, max_padding_tokens=1000)
    assert record.choice.max_batch_tokens == 1024
    assert [one.choice.max_batch_tokens for one in record.table if one.part == "batches"] == [512, 256, 1024]


@pytest.mark.parametrize(
    ("rates", "winner"), [([100, 104], 0), ([100, 106], 1), ([100, 90], 0), ([100, 110, 120], 2), ([1], 0)]
)
def test_a_small_difference_goes_to_the_default(rates: list[float], winner: int) -> None:
    assert choose([row(rate) for rate in rates]) == winner


def test_what_is_given_is_not_varied(store: Path) -> None:
    record = calibrated(store, precision="float32", lanes=1, threads_per_lane=1, max_batch_tokens=300)
    [only] = record.table
    assert only.choice == Choice("onnx", "float32", "cpu", 1, 1, 300)
    assert record.given == ["engine", "precision", "device", "lanes", "threads_per_lane", "max_batch_tokens"]


def test_what_runs_on_a_gpu_is_the_default(store: Path) -> None:
    def opener(version: Version, options: EngineOptions) -> SlowEngine:
        engine = SlowEngine(open_engine(version, options), lambda _: False)
        if options.precision == "float32":
            engine.device = "cuda"
        return engine

    record = calibrated(store, opener, device="auto", lanes=1, max_batch_tokens=512)
    assert [(one.choice.precision, one.choice.device) for one in record.table] == [
        ("float32", "cuda"),
        ("int8", "cpu"),
    ]


def test_lanes_to_try() -> None:
    assert lane_plans(8.0, Settings()) == [LanePlan(8, 1), LanePlan(1, 8), LanePlan(4, 2)]
    assert lane_plans(2.5, Settings()) == [LanePlan(2, 1), LanePlan(1, 2)]
    assert lane_plans(0.5, Settings()) == [LanePlan(1, 1)]
    assert lane_plans(8.0, Settings(lanes=2)) == [LanePlan(2, 4)]


def test_forms_to_try(store: Path) -> None:
    manifest = open_version(store, "sentiment").manifest
    both = [("onnx", "int8"), ("onnx", "float32")]
    of_openvino = [("openvino", one) for one in ("int8", "bfloat16", "float32")]
    assert list(forms(manifest, Settings())) == both + of_openvino
    assert list(forms(manifest, Settings(precision="float32"))) == [both[1], of_openvino[2]]


def test_a_form_whose_answers_are_wrong_is_left_out_with_the_reason(tmp_path: Path) -> None:
    def spoil(manifest: Manifest) -> Manifest:
        first, *rest = manifest.golden_texts
        wrong = replace(first, logits={**first.logits, "onnx/int8": [9.0, -9.0]})
        return replace(manifest, golden_texts=[wrong, *rest])

    make_version(tmp_path, precisions=("float32", "int8"), change=spoil)
    record = calibrated(tmp_path, lanes=1, max_batch_tokens=512)
    assert [one.choice.precision for one in record.table] == ["float32"]
    [left_out] = record.left_out
    assert left_out.form == "onnx/int8"
    assert "golden text 1" in left_out.reason


def test_a_form_that_fails_while_it_is_measured_is_left_out(store: Path) -> None:
    """On long texts only, which the golden ones are not."""

    def opener(version: Version, options: EngineOptions) -> GatedEngine:
        def fault(batch: TokenBatch) -> None:
            if options.precision == "int8" and int(batch.lengths.max()) > 50:
                raise RuntimeError("too long for me")

        engine = GatedEngine(open_engine(version, options))
        engine.fault = fault
        return engine

    record = calibrated(store, opener, lanes=1, max_batch_tokens=512)
    assert record.choice.precision == "float32"
    assert [one.form for one in record.left_out] == ["onnx/int8"]
    assert "RuntimeError" in record.left_out[0].reason


def test_nothing_that_can_be_measured_is_an_error_with_the_reasons(store: Path) -> None:
    with pytest.raises(StartupError, match=r"nothing to tune: onnx/float32: .*cuda"):
        calibrated(store, device="cuda", precision="float32")
    with pytest.raises(StartupError, match="has no file"):
        calibrated(store, engine="torchscript")


def test_every_engine_is_closed(store: Path) -> None:
    engines = []

    def opener(version: Version, options: EngineOptions) -> GatedEngine:
        engines.append(GatedEngine(open_engine(version, options)))
        return engines[-1]

    calibrated(store, opener)
    assert len(engines) == 4
    assert all(engine.closed.is_set() for engine in engines)


# --- what is used at a start


def test_what_was_tuned_is_used_at_the_next_start(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = settings_for(store, tuning_s=0.1)
    before = loaded(settings).description
    assert (before.precision, before.tuned) == ("int8", ())
    record, path = tune(settings, slow_int8())
    assert path == store / "sentiment" / "1.tuning.json"
    after = loaded(settings)
    assert after.description.precision == record.choice.precision == "float32"
    assert after.description.tuned == ("precision", "lanes", "threads_per_lane", "max_batch_tokens")
    assert after.settings.max_batch_tokens == record.choice.max_batch_tokens
    assert "tuning" not in caplog.text


def test_a_record_beside_the_version_is_no_part_of_the_store(store: Path) -> None:
    before = list_models(store), open_version(store, "sentiment")
    tune(settings_for(store, tuning_s=0.1), open_engine)
    assert (list_models(store), open_version(store, "sentiment")) == before


def keep(store: Path, **choice: Any) -> Path:
    """A record that fits this machine, with this choice."""
    _, path = tune(settings_for(store, tuning_s=0.1, lanes=1, max_batch_tokens=512), open_engine)
    assert path is not None
    content = json.loads(path.read_bytes())
    content["given"] = ["engine", "device"]
    content["choice"] |= choice
    path.write_text(json.dumps(content))
    return path


async def test_the_token_budget_is_used(store: Path) -> None:
    await asyncio.to_thread(keep, store, max_batch_tokens=16, lanes=1, threads_per_lane=1)
    opener = Opener()
    predictor = Predictor(settings_for(store, max_padding_tokens=1000), Metrics(), open_engine=opener)
    try:
        await predictor.start()
        warm = len(opener.engine.calls)
        texts = [" ".join(words) for words in permutations(["the", "movie", "was", "not", "bad"], 2)]
        await predictor.predict(texts)
        batches = [lengths for lengths, _ in opener.engine.calls[warm:]]
        assert max(len(lengths) for lengths in batches) > 1
        assert max(max(lengths) * len(lengths) for lengths in batches) <= 16
    finally:
        await predictor.stop(60)


CHOSEN = Choice("openvino", "bfloat16", "cpu", lanes=3, threads_per_lane=2, max_batch_tokens=256)
LANES = {"lanes": 3, "threads_per_lane": 2}


@pytest.mark.parametrize(
    ("explicit", "taken"),
    [
        ({}, {"engine": "openvino", "precision": "bfloat16", **LANES, "max_batch_tokens": 256}),
        (
            {"engine": "auto", "precision": "bfloat16"},
            {"engine": "openvino", **LANES, "max_batch_tokens": 256},
        ),
        ({"engine": "onnx"}, {}),
        ({"precision": "float32"}, {}),
        ({"device": "cuda"}, {}),
        ({"lanes": 1}, {"engine": "openvino", "precision": "bfloat16"}),
        (
            {"lanes": 3},
            {"engine": "openvino", "precision": "bfloat16", "threads_per_lane": 2, "max_batch_tokens": 256},
        ),
        ({"max_batch_tokens": 512}, {"engine": "openvino", "precision": "bfloat16", **LANES}),
    ],
    ids=str,
)
def test_what_is_given_wins(explicit: dict[str, Any], taken: dict[str, Any]) -> None:
    """And what was measured together with something else is not taken alone."""
    settings = Settings(**explicit)
    used, names = apply(settings, CHOSEN)
    assert set(names) == set(taken)
    assert used == settings.model_copy(update=taken)


def test_a_given_precision_wins_over_a_tuned_one(store: Path) -> None:
    tune(settings_for(store, lanes=1, max_batch_tokens=512, tuning_s=0.1), slow_int8())
    description = loaded(settings_for(store, precision="int8", lanes=1, max_batch_tokens=512)).description
    assert (description.precision, description.tuned) == ("int8", ())


def other_machine(content: dict[str, Any]) -> None:
    content["machine"]["processor"] = "Another one"


def other_instructions(content: dict[str, Any]) -> None:
    content["machine"]["instructions"] = ["amx_bf16"]


def other_quota(content: dict[str, Any]) -> None:
    content["machine"]["cpu_quota_cores"] = 4096.0


def other_packages(content: dict[str, Any]) -> None:
    content["machine"]["packages"] = {"onnxruntime": "0.1"}


def other_files(content: dict[str, Any]) -> None:
    content["files"]["model.onnx"] = "0" * 64


def other_version(content: dict[str, Any]) -> None:
    content["version"] = 2


def narrower(content: dict[str, Any]) -> None:
    content["given"] = ["precision"]


def no_schema(content: dict[str, Any]) -> None:
    content["schema_version"] = 2


def no_lanes(content: dict[str, Any]) -> None:
    content["choice"]["lanes"] = 0


def more_words(content: dict[str, Any]) -> None:
    content["choice"]["colour"] = "red"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_machine, "another kind of machine: Another one"),
        (other_instructions, "another kind of machine"),
        (other_quota, "4096 cores"),
        (other_packages, "onnxruntime 0.1"),
        (other_files, "other files"),
        (other_version, "sentiment 2"),
        (narrower, "a fixed precision, which is open now"),
        (no_schema, "schema_version"),
        (no_lanes, "choice.lanes"),
        (more_words, "choice.colour"),
    ],
)
def test_a_record_that_says_nothing_here_is_ignored_with_one_line(
    store: Path, change: Callable[[dict[str, Any]], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = keep(store, precision="float32")
    assert loaded(settings_for(store)).description.precision == "float32"
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content))
    is_ignored(settings_for(store), path, reason, caplog)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "no record"), (b"[1", "no record"), (b"\xff\xfe", "no record"), (b" " * 2_000_000, "larger than")],
    ids=["empty", "cut off", "no text", "huge"],
)
def test_a_broken_record_is_ignored_with_one_line(
    store: Path, content: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = store / "sentiment" / "1.tuning.json"
    path.write_bytes(content)
    is_ignored(settings_for(store), path, reason, caplog)


def test_a_record_that_is_no_file_is_ignored_with_one_line(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = store / "sentiment" / "1.tuning.json"
    path.mkdir()
    is_ignored(settings_for(store), path, "no regular file", caplog)


def test_a_record_that_was_named_and_is_not_there_is_told(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "elsewhere.json"
    is_ignored(settings_for(store, tuning=str(path)), path, "not there", caplog)


def is_ignored(settings: Settings, path: Path, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    description = loaded(settings).description
    assert (description.precision, description.tuned) == ("int8", ())
    [line] = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert line.getMessage() == "tuning ignored"
    fields = vars(line)
    assert str(path) in str(fields)
    assert reason in str(fields)


def test_off_means_that_no_record_is_read(store: Path) -> None:
    keep(store, precision="float32")
    assert loaded(settings_for(store, tuning="off")).description.tuned == ()


# --- where it cannot be kept, and at the start


def test_a_store_that_cannot_be_written_is_told_before_anything_is_measured(store: Path) -> None:
    opener = SlowOpener(lambda _: False)
    with pytest.raises(StartupError, match=r"/proc/tuning.json: the tuning cannot be kept.*VALENCE_TUNING"):
        tune(settings_for(store, tuning="/proc/tuning.json"), opener)
    assert opener.opened == 0


def test_a_failed_write_leaves_nothing_behind(store: Path) -> None:
    (store / "sentiment" / "1.tuning.json").mkdir()
    with pytest.raises(StartupError, match="cannot be kept"):
        tune(settings_for(store, tuning_s=0.1), open_engine)
    assert sorted(path.name for path in (store / "sentiment").iterdir()) == ["1", "1.tuning.json"]


async def test_the_first_start_tunes_and_readiness_says_so(store: Path) -> None:
    settings = settings_for(store, tune_at_start=True, precision="int8", lanes=1, max_batch_tokens=512)
    opener = Opener()
    opener.may_open.clear()
    predictor = Predictor(settings, Metrics(), open_engine=opener)
    start = asyncio.create_task(predictor.start())
    try:
        assert predictor.unready_reason() == "starting"
        assert await asyncio.to_thread(opener.opening.wait, 60)
        assert predictor.unready_reason() == "tuning"
        await predictor.stop(0)
    finally:
        opener.may_open.set()
    with pytest.raises(StartupError, match="stopped"):
        await start


def test_a_start_tunes_once(store: Path) -> None:
    opener = slow_int8()
    told: list[str] = []
    opened: list[int] = []
    for _ in range(2):
        settings = settings_for(store, tune_at_start=True, lanes=1, max_batch_tokens=512, tuning_s=0.1)
        model = load(settings, opener, go_on=lambda: True, tell=told.append)
        model.tokenizer.close()
        model.engine.close()
        assert "precision" in model.description.tuned
        opened.append(opener.opened)
    assert told == ["tuning", "starting"]
    assert opened[1] == opened[0] + 1
    assert (store / "sentiment" / "1.tuning.json").is_file()


def test_a_start_that_cannot_keep_its_tuning_has_it_all_the_same(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_for(
        store, tune_at_start=True, lanes=1, max_batch_tokens=512, tuning_s=0.1, tuning="/proc/tuning.json"
    )
    model = load(settings, slow_int8(), go_on=lambda: True)
    model.tokenizer.close()
    model.engine.close()
    assert model.description.precision == "float32"
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == [
        "tuning ignored",
        "tuning not kept",
    ]


def test_a_start_that_cannot_tune_serves_untuned(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its engine works alone, and fails among many callers."""

    def opener(version: Version, options: EngineOptions) -> GatedEngine:
        engine = GatedEngine(open_engine(version, options))
        engine.fault = fail_on_long_ones
        return engine

    def fail_on_long_ones(batch: TokenBatch) -> None:
        if int(batch.lengths.max()) in {27, 39, 61}:  # which the warm-up leaves out
            raise RuntimeError("no")

    settings = settings_for(store, tune_at_start=True, tuning_s=0.1)
    model = load(settings, opener, go_on=lambda: True)
    model.tokenizer.close()
    model.engine.close()
    assert (model.description.precision, model.description.tuned) == ("int8", ())
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == ["tuning failed"]


# --- the command


def test_the_command_prints_what_it_found_and_keeps_it(store: Path) -> None:
    ran = valence("tune", "--seconds", "0.2", model_store=store, **ONNX)
    assert ran.returncode == 0, ran.stderr
    head, *lines = ran.stdout.splitlines()
    assert head.split() == [
        "part",
        "engine",
        "precision",
        "lanes",
        "batch",
        "texts/s",
        "lone",
        "ms",
        "CPU",
        "ms/text",
    ]
    forms_measured = [line.split()[1:3] for line in lines if line.startswith("forms")]
    assert sorted(forms_measured) == [["onnx", "float32"], ["onnx", "int8"]]
    path = store / "sentiment" / "1.tuning.json"
    assert lines[-1] == f"kept in {path}"
    chosen = json.loads(path.read_bytes())["choice"]
    assert lines[-2].startswith(f"chosen: onnx {chosen['precision']} on cpu")

    checked = json.loads(valence("check", model_store=store, **ONNX).stdout)
    assert "precision" in checked["tuned"]
    assert checked["precision"] == chosen["precision"]


def test_the_command_with_nowhere_to_keep_it(store: Path) -> None:
    fixed: dict[str, Any] = {
        **ONNX,
        "model_store": store,
        "precision": "float32",
        "lanes": 1,
        "tuning_s": 0.1,
    }
    ran = valence("tune", tuning="off", **fixed)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "kept nowhere: VALENCE_TUNING is off"
    assert [path.name for path in (store / "sentiment").iterdir()] == ["1"]

    refused = valence("tune", tuning="/proc/tuning.json", **fixed)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("valence: /proc/tuning.json: the tuning cannot be kept there")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "5000", "soon"])
def test_the_command_takes_a_sensible_time_only(seconds: str) -> None:
    ran = valence("tune", "--seconds", seconds)
    assert ran.returncode == 2
    assert "--seconds" in ran.stderr


def test_a_tuning_at_the_start_needs_one_to_be_allowed() -> None:
    ran = valence("check", tune_at_start=True, tuning="off")
    assert ran.returncode == 2
    assert ran.stderr == "valence: VALENCE_TUNE_AT_START is set, but VALENCE_TUNING is off\n"


# --- the machine


@pytest.mark.parametrize(
    ("cpuinfo", "processor", "instructions"),
    [
        (
            "processor\t: 0\nmodel name\t: A Xeon\nflags\t: fpu amx_bf16 avx2\n",
            "A Xeon",
            ["amx_bf16", "avx2"],
        ),
        (
            "Features\t: fp asimd bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n",
            "0x41 0xd4f",
            ["asimd", "bf16"],
        ),
        (None, "", []),
    ],
    ids=["x86", "Arm", "not Linux"],
)
def test_the_machine(tmp_path: Path, cpuinfo: str | None, processor: str, instructions: list[str]) -> None:
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_text(cpuinfo)
    machine = this_machine(1.5, cpuinfo=path)
    assert machine.processor
    assert machine.processor.endswith(processor)
    assert machine.instructions == instructions
    assert machine.cpu_quota_cores == 1.5
    assert "onnxruntime" in machine.packages or "onnxruntime-gpu" in machine.packages
