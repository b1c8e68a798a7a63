"""Every engine gives each text its own logits whoever is beside it, and refuses what does not fit.

One more engine is one more entry in `engine_cases.CASES`.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.core import Encoding, TokenBatch
from service.engines import ENGINES, EXTRAS, FORMATS, EngineOptions, choose_model, open_engine, pad
from service.errors import EngineFailed, StartupError
from service.store import Manifest, ModelFile
from tests.models import Weights, bert_tokenizer
from tests.scripts import make_script
from tests.service.engine_cases import CASES, ON_CPU, SHAPE, Case, encodings, python, weights

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(params=CASES, ids=list(BY_NAME))
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


def test_every_engine_has_its_case_and_what_to_install() -> None:
    assert list(BY_NAME) == list(ENGINES) == list(EXTRAS)
    assert {case.name: case.format for case in CASES} == FORMATS


def test_pads_to_the_right_with_a_mask() -> None:
    ids, mask = pad(TokenBatch.of([Encoding([5, 6, 7]), Encoding([8])]), 9)
    assert ids.tolist() == [[5, 6, 7], [8, 9, 9]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]


def test_pads_to_a_length_that_is_asked_for() -> None:
    ids, mask = pad(TokenBatch.of([Encoding([5, 6, 7]), Encoding([8])]), 9, 4)
    assert ids.tolist() == [[5, 6, 7, 9], [8, 9, 9, 9]]
    assert mask.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("labels", [1, 2, 12])
def test_each_text_gets_its_own_logits(case: Case, labels: int) -> None:
    texts = encodings()
    engine = case.open(case.maker(weights(labels)), shape=replace(SHAPE, labels=labels))
    logits = engine.run(TokenBatch.of(texts))
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, [weights(labels).logits(text.ids) for text in texts], atol=1e-5)


def test_r32_the_answer_does_not_depend_on_the_neighbours(case: Case) -> None:
    engine, texts = case.open(case.maker(weights())), encodings()
    alone = np.concatenate([engine.run(TokenBatch.of([text])) for text in texts])
    np.testing.assert_allclose(engine.run(TokenBatch.of(texts)), alone, atol=1e-5)
    np.testing.assert_allclose(engine.run(TokenBatch.of(texts[::-1]))[::-1], alone, atol=1e-5)


def test_r35_the_same_call_gives_the_same_bits(case: Case) -> None:
    engine, batch = case.open(case.maker(weights())), TokenBatch.of(encodings())
    first = engine.run(batch).tobytes()
    assert {engine.run(batch).tobytes() for _ in range(20)} == {first}
    with ThreadPoolExecutor(4) as executor:
        assert {logits.tobytes() for logits in executor.map(engine.run, [batch] * 20)} == {first}


@pytest.mark.parametrize("inputs", [("input_ids", "mask"), ("input_ids", "attention_mask", "position_ids")])
def test_r40_other_inputs_are_refused_at_load(case: Case, inputs: Sequence[str]) -> None:
    with pytest.raises(StartupError, match=inputs[-1]):
        case.open(case.maker(weights(), inputs=inputs))


def test_r37_another_number_of_labels_is_refused(case: Case) -> None:
    with pytest.raises(StartupError, match="for 2 labels"):
        case.open(case.maker(weights(labels=3)))


def test_other_numbers_are_refused(case: Case) -> None:
    with pytest.raises(StartupError, match=r"double|float64"):
        case.open(case.maker(weights(), output="double"))


@pytest.mark.parametrize("content", [b"", b"not a model"])
def test_what_is_no_model_is_refused(case: Case, content: bytes) -> None:
    with pytest.raises(StartupError, match=case.no_model):
        case.open(content)


def test_closed_it_runs_nothing_and_closes_twice(case: Case) -> None:
    engine = case.open(case.maker(weights()))
    engine.close()
    engine.close()
    with pytest.raises(EngineFailed, match="closed"):
        engine.run(TokenBatch.of(encodings()))


def test_a_failed_call_does_not_harm_the_next(case: Case) -> None:
    engine, good = case.open(case.maker(weights())), TokenBatch.of(encodings())
    before = engine.run(good).tobytes()
    with pytest.raises(Exception, match=case.unknown_id):
        engine.run(TokenBatch.of([Encoding([10**9])]))
    assert engine.run(good).tobytes() == before


def test_r48_starts_quietly_on_a_part_of_the_cores(case: Case) -> None:
    out = case.run_alone(
        """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from service.quota import cpu_quota
engine_of(1, 2).run(TokenBatch.of([Encoding([5, 6])]))
print(cpu_quota())
"""
    )
    assert float(out.stdout) <= 1
    assert out.stderr == ""


@pytest.mark.parametrize(("lanes", "threads"), [(1, 1), (3, 1), (1, 3), (2, 3)])
def test_r51_threads_stay_within_lanes_times_threads(case: Case, lanes: int, threads: int) -> None:
    """Callers and the library's own, counted by the system while all lanes are there and have run.

    A thread has run when the system switched away from it since the engine was loaded. Where calls are
    handed over, it is two for a call, of which one waits.
    """
    out = case.run_alone(
        f"""
import threading
import time

def switches():
    found = {{}}
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{{task}}/status") as status:
            found[task] = [line for line in status if "ctxt_switches" in line]
    return found

before = set(switches())
engine = engine_of({lanes}, {threads})
batch = TokenBatch.of([Encoding([5] * 64)] * 256)
lanes_ready, all_ran = threading.Barrier({lanes} + 1), threading.Barrier({lanes} + 1)
counted = threading.Event()

def lane():
    lanes_ready.wait()
    for _ in range(5):
        engine.run(batch)
    time.sleep(0.001)  # the system switches away from who sleeps: this one has run, and is seen to
    all_ran.wait()
    counted.wait()

callers = [threading.Thread(target=lane) for _ in range({lanes})]
for caller in callers:
    caller.start()
loaded = switches()
lanes_ready.wait()
all_ran.wait()
ran = {{task: count for task, count in switches().items() if task not in before}}
print(len(ran), sum(loaded.get(task) != count for task, count in ran.items()))
counted.set()
for caller in callers:
    caller.join()
"""
    )
    there, running = map(int, out.stdout.split())
    assert lanes <= running <= lanes * threads + lanes * case.hands_over
    assert there <= lanes * threads + case.sleepers(lanes, threads)
    assert out.stderr == ""


def test_r50_r51_memory_does_not_grow_with_new_shapes(case: Case) -> None:
    """465 shapes, each once, after the largest was run; what is left of a shape would be seen."""
    out = case.run_alone(
        """
def resident_mb():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

def run(count, length):
    engine.run(TokenBatch.of([Encoding([5] * length)] * count))

engine = engine_of(1, 1)
for _ in range(20):
    run(32, 64)
before = resident_mb()
for count in range(1, 31, 2):
    for length in range(2, 64, 2):
        run(count, length)
print(resident_mb() - before)
"""
    )
    assert float(out.stdout) < 20


def test_a_device_that_is_not_there_is_refused(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(StartupError, match="device cuda was asked for"):
        case.open(case.maker(weights()), device="cuda")


def test_auto_serves_on_the_cpu_where_there_is_no_cuda(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    version = case.make_version(tmp_path)
    engine = open_engine(version, replace(case.options, device="auto"))
    assert (engine.name, engine.device, engine.precision) == (case.name, "cpu", "float32")
    assert (engine.labels, engine.max_tokens) == (2, 64)
    with pytest.raises(StartupError, match="device cuda was asked for"):
        open_engine(version, replace(case.options, device="cuda"))


def test_the_golden_texts_get_their_logits(case: Case, tmp_path: Path) -> None:
    version = case.make_version(tmp_path)
    engine = open_engine(version, case.options)
    for golden in version.manifest.golden_texts:
        logits = engine.run(TokenBatch.of([Encoding(bert_tokenizer().encode(golden.text).ids)]))
        np.testing.assert_allclose(logits[0], golden.logits[f"{case.format}/float32"], atol=1e-5)


def test_a_precision_that_the_version_lacks_is_refused_with_those_it_has(case: Case, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=case.no_int8):
        open_engine(case.make_version(tmp_path), replace(case.options, precision="int8"))


def test_another_engines_file_is_not_taken(case: Case, tmp_path: Path) -> None:
    version = case.make_version(tmp_path)
    for other in (one for one in CASES if one.format != case.format):
        with pytest.raises(StartupError, match=rf"has no {other.format} file in float32; it has none"):
            open_engine(version, other.options)


def test_a_damaged_file_is_refused_with_its_path(case: Case, tmp_path: Path) -> None:
    def no_model(_: Weights) -> bytes:
        return b"no model"

    maker = "model" if case.format == "onnx" else "script"
    version = case.make_version(tmp_path, **{maker: no_model})
    with pytest.raises(StartupError, match=rf"1/{case.file}: {case.no_model}"):
        open_engine(version, case.options)


def test_a_file_that_changed_after_it_was_verified_is_not_loaded(case: Case, tmp_path: Path) -> None:
    version = case.make_version(tmp_path)
    (version.path / case.file).write_bytes(case.maker(weights(labels=3)))
    with pytest.raises(StartupError, match=case.file):
        open_engine(version, case.options)


def test_a_file_that_the_manifest_does_not_name_is_not_loaded(case: Case, tmp_path: Path) -> None:
    other = next(one for one in CASES if one.format != case.format)
    version = other.make_version(tmp_path)
    (version.path / case.file).write_bytes(case.maker(weights()))
    with pytest.raises(StartupError, match=rf"has no {case.format} file"):
        open_engine(version, case.options)


def test_a_store_that_changes_while_serving_does_no_harm(case: Case, tmp_path: Path) -> None:
    version = case.make_version(tmp_path)
    engine, batch = open_engine(version, case.options), TokenBatch.of(encodings())
    before = engine.run(batch).tobytes()
    (version.path / case.file).write_bytes(b"")
    assert engine.run(batch).tobytes() == before


def test_auto_takes_the_first_engine_that_has_a_file(tmp_path: Path) -> None:
    both = BY_NAME["onnx"].make_version(tmp_path, script=make_script)
    assert open_engine(both, ON_CPU).name == "onnx"
    assert open_engine(both, replace(ON_CPU, engine="torchscript")).name == "torchscript"


def manifest_with(store: Path, files: Sequence[tuple[Any, Any]]) -> Manifest:
    manifest = BY_NAME["onnx"].make_version(store).manifest
    return replace(manifest, models=[ModelFile(f"{f}.{p}", f, p, 1, "", 1e-3) for f, p in files])


def test_auto_is_refused_when_no_engine_has_a_file(tmp_path: Path) -> None:
    version = BY_NAME["onnx"].make_version(tmp_path)
    other = replace(version, manifest=manifest_with(tmp_path / "other", [("openvino", "bfloat16")]))
    with pytest.raises(StartupError, match=r"has files for openvino; the engines read onnx, torchscript"):
        open_engine(other, ON_CPU)


def test_auto_is_float32_with_cuda(tmp_path: Path) -> None:
    manifest = manifest_with(tmp_path, [("onnx", "int8"), ("onnx", "float32"), ("openvino", "bfloat16")])
    assert choose_model(manifest, "onnx", precision="auto", device="cuda").precision == "float32"
    assert choose_model(manifest, "openvino", precision="bfloat16", device="cpu").format == "openvino"


def test_an_unknown_engine_is_refused_with_those_that_are(tmp_path: Path) -> None:
    version = BY_NAME["onnx"].make_version(tmp_path)
    with pytest.raises(StartupError, match=f"no engine steam; there are {', '.join(ENGINES)}"):
        open_engine(version, EngineOptions(engine="steam"))


def test_the_engine_is_imported_when_it_is_chosen() -> None:
    code = f"import sys, service.engines; print(set(sys.modules) & { ({case.library for case in CASES})!r})"
    assert python(code).stdout == "set()\n"


def test_a_library_that_is_not_installed_is_named_with_what_to_install(case: Case, tmp_path: Path) -> None:
    case.make_version(tmp_path)
    code = f"""
import sys
from pathlib import Path
sys.modules[{case.library!r}] = None
from service.engines import EngineOptions, open_engine
from service.errors import StartupError
from service.store import open_version
try:
    open_engine(open_version(Path({str(tmp_path)!r}), "sentiment"), EngineOptions(engine={case.name!r}))
except StartupError as error:
    print(error)
"""
    expected = f"engine {case.name} needs {case.library}: install {EXTRAS[case.name]}\n"
    assert python(code).stdout == expected
