"""What only the OpenVINO engine has: it compiles another engine's file, in two precisions, and never answers
with what stood there before."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from service.core import Encoding, TokenBatch
from service.engines import Engine, EngineOptions, ModelShape, open_engine
from service.engines.openvino import has_bfloat16, padded
from service.errors import EngineFailed, StartupError
from service.store import Manifest, open_version
from service.tokenizer import Tokenizer
from service.warmup import check_golden_texts
from tests.models import make_onnx, make_version
from tests.service.engine_cases import CASES, encodings, python, weights
from tests.service.stand_ins import GatedEngine

OPENVINO = next(case for case in CASES if case.name == "openvino")
SENTIMENT = Path(__file__).parents[2] / "model_store"


@pytest.mark.parametrize("max_tokens", [64, 500, 512])
def test_lengths_are_rounded_up_by_an_eighth_at_most_and_to_few(max_tokens: int) -> None:
    lengths = [padded(length, max_tokens) for length in range(1, max_tokens + 1)]
    assert all(length <= new <= max(length + 3, length * 9 / 8) for length, new in enumerate(lengths, 1))
    assert lengths[-1] == max_tokens
    assert len(set(lengths)) <= 16 + 8 * 3


def test_a_text_beyond_the_longest_or_the_vocabulary_is_refused() -> None:
    engine = OPENVINO.open(make_onnx(weights()))
    for ids in ([5] * 65, [10**9], [weights().embedding.shape[0]]):
        with pytest.raises(EngineFailed, match="longer than 64 tokens, or has one that is out"):
            engine.run(TokenBatch.of([Encoding(ids)]))
    engine.run(TokenBatch.of([Encoding([weights().embedding.shape[0] - 1] * 64)]))


def with_positions(count: int) -> bytes:
    """The graph, with a table of so many positions added to the words: longer texts make a node fail."""
    model = onnx.load_from_string(make_onnx(weights(), inputs=("input_ids", "attention_mask")))
    table = np.zeros((1, count, weights().embedding.shape[1]), dtype=np.float32)
    model.graph.initializer.append(numpy_helper.from_array(table, "positions"))
    model.graph.node[0].output[0] = "plain_words"
    model.graph.node.insert(1, helper.make_node("Add", ["plain_words", "positions"], ["words"]))
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def test_a_call_that_fails_inside_is_not_answered_with_the_one_before() -> None:
    engine = OPENVINO.open(with_positions(16))
    good, bad = (TokenBatch.of([Encoding([9] * length)]) for length in (16, 24))
    before = engine.run(good)
    with pytest.raises(Exception, match=r"no answer for 1 texts of up to 24 tokens|[Ss]hape"):
        engine.run(bad)
    assert engine.run(good).tobytes() == before.tobytes()


def test_an_answer_is_not_overwritten_by_the_next_call() -> None:
    engine, texts = OPENVINO.open(make_onnx(weights())), encodings()
    answers = [engine.run(TokenBatch.of([text])) for text in texts]
    np.testing.assert_allclose(
        np.concatenate(answers), [weights().logits(text.ids) for text in texts], atol=1e-5
    )


def test_a_graph_that_does_not_look_up_the_ids_is_refused() -> None:
    shape = ["n", "length"]
    node = helper.make_node("Cast", ["input_ids"], ["real"], to=TensorProto.FLOAT)
    used = helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT)
    product = helper.make_node("Mul", ["real", "mask"], ["logits"])
    graph = helper.make_graph(
        [node, used, product],
        "no table",
        [
            helper.make_tensor_value_info(name, TensorProto.INT64, shape)
            for name in ("input_ids", "attention_mask")
        ],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(StartupError, match="does not look up the token ids in a table"):
        OPENVINO.open(bytes(model.SerializeToString()))


def test_int32_inputs_are_given_as_such() -> None:
    texts = encodings()
    logits = OPENVINO.open(make_onnx(weights(), integers="int32")).run(TokenBatch.of(texts))
    np.testing.assert_allclose(logits, [weights().logits(text.ids) for text in texts], atol=1e-5)


def test_precision_auto_is_what_the_processor_computes_in(tmp_path: Path) -> None:
    version = OPENVINO.make_version(tmp_path)
    engine = open_engine(version, replace(OPENVINO.options, precision="auto"))
    assert engine.precision == ("bfloat16" if has_bfloat16() else "float32")


def test_bfloat16_is_refused_where_the_processor_has_none(tmp_path: Path) -> None:
    if has_bfloat16():
        pytest.skip("this processor computes in bfloat16")
    with pytest.raises(StartupError, match="bfloat16 was asked for, but this processor does not"):
        open_engine(OPENVINO.make_version(tmp_path), replace(OPENVINO.options, precision="bfloat16"))


def test_auto_never_chooses_it(tmp_path: Path) -> None:
    version = OPENVINO.make_version(tmp_path)
    assert open_engine(version, EngineOptions(device="cpu")).name == "onnx"


def parts(store: Path, name: str = "sentiment") -> tuple[Tokenizer, Manifest]:
    version = open_version(store, name)
    manifest = version.manifest
    tokenizer = Tokenizer.load(
        version.read(manifest.tokenizer), max_tokens=manifest.max_tokens, max_text_chars=32_768
    )
    return tokenizer, manifest


def test_it_is_held_to_the_golden_texts_of_the_file_that_it_reads() -> None:
    """The model of the repository, also in bfloat16: of two texts only, as a processor without it is slow."""
    tokenizer, manifest = parts(SENTIMENT)
    version = open_version(SENTIMENT, "sentiment")
    engine = open_engine(version, OPENVINO.options)
    check_golden_texts(engine, tokenizer, manifest)
    file = next(one for one in manifest.models if (one.format, one.precision) == ("onnx", "float32"))
    shape = ModelShape(len(manifest.labels), manifest.max_tokens, manifest.pad_id)
    kind: Callable[..., Engine] = OPENVINO.module.OpenVinoEngine
    rounded = kind(version.read(file), shape=shape, precision="bfloat16", options=OPENVINO.options)
    few = sorted(manifest.golden_texts, key=lambda golden: len(golden.text))[:2]
    check_golden_texts(rounded, tokenizer, replace(manifest, golden_texts=few))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_other_weights_are_refused_by_the_golden_texts(tmp_path: Path, precision: str) -> None:
    def other(manifest: Manifest) -> Manifest:
        texts = [
            replace(one, logits={key: [value + 0.15 for value in row] for key, row in one.logits.items()})
            for one in manifest.golden_texts
        ]
        return replace(manifest, golden_texts=texts)

    make_version(tmp_path, change=other)
    tokenizer, manifest = parts(tmp_path)
    engine = OPENVINO.open(make_onnx(weights()))
    engine.precision = precision  # type: ignore[misc]
    with pytest.raises(StartupError, match=r"a logit is off by 0\.15"):
        check_golden_texts(engine, tokenizer, manifest)


def moved_by_company(precision: str, share: float) -> GatedEngine:
    """The engine, said to compute in a precision, with logits that company makes larger by a share."""
    engine = GatedEngine(OPENVINO.open(make_onnx(weights())))
    engine.precision = precision
    engine.change = lambda logits: logits * np.float32(1 + share * (len(logits) > 1))
    return engine


def test_company_may_move_bfloat16_a_little_and_float32_less(tmp_path: Path) -> None:
    make_version(tmp_path)
    tokenizer, manifest = parts(tmp_path)
    check_golden_texts(moved_by_company("bfloat16", 0.01), tokenizer, manifest)
    with pytest.raises(StartupError, match=r"in company and 0\.01 is allowed"):
        check_golden_texts(moved_by_company("bfloat16", 0.5), tokenizer, manifest)
    with pytest.raises(StartupError, match=r"in company and 0\.0001 is allowed"):
        check_golden_texts(moved_by_company("float32", 0.01), tokenizer, manifest)


def test_a_precision_that_the_version_has_no_logits_of_is_refused(tmp_path: Path) -> None:
    make_version(tmp_path, precisions=("int8",))
    tokenizer, manifest = parts(tmp_path)
    engine = OPENVINO.open(make_onnx(weights()))
    with pytest.raises(StartupError, match="onnx/float32, which the version does not have"):
        check_golden_texts(engine, tokenizer, manifest)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be exceeded")
def test_r51_one_lane_of_one_thread_uses_one_core() -> None:
    out = OPENVINO.run_alone(
        """
import threading
import time

engine, batch = engine_of(1, 1), TokenBatch.of([Encoding([5] * 64)] * 4096)
callers = [threading.Thread(target=lambda: [engine.run(batch) for _ in range(20)]) for _ in range(2)]
started_s, cpu_started_s = time.perf_counter(), time.process_time()
for caller in callers:
    caller.start()
for caller in callers:
    caller.join()
print((time.process_time() - cpu_started_s) / (time.perf_counter() - started_s))
"""
    )
    assert float(out.stdout) < 1.3


def test_it_calls_nobody_and_writes_nothing(tmp_path: Path) -> None:
    """Its telemetry is a package that it imports; nothing of it may run."""
    home = tmp_path / "home"
    home.mkdir()
    code = f"""
import os
import sys

def watch(event, arguments):
    if event.startswith(("socket.", "subprocess.", "os.mkdir", "os.posix_spawn")):
        raise SystemExit(f"{{event}} {{arguments}}")
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        raise SystemExit(f"{{event}} {{arguments}}")

os.environ["HOME"] = {str(home)!r}
sys.dont_write_bytecode = True
from tests.models import bert_tokenizer, make_onnx, make_weights
content = make_onnx(make_weights(bert_tokenizer(), 2))
sys.addaudithook(watch)
from service.core import Encoding, TokenBatch
from service.engines import EngineOptions, ModelShape
from service.engines.openvino import OpenVinoEngine
engine = OpenVinoEngine(content, shape=ModelShape(2, 64, 0), precision="float32", options=EngineOptions())
print(engine.run(TokenBatch.of([Encoding([5, 6])])).shape)
"""
    assert python(code).stdout == "(1, 2)\n"
    assert list(home.iterdir()) == []
