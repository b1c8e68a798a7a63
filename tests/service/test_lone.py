"""One long text that is alone uses all cores, and nothing else does."""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from service.core import FloatArray
from service.engines import IntegerArray
from service.engines.lone import LONG_TOKENS, LoneLong
from tests.service.by_hand import SAFETY_S
from tests.service.engine_cases import CASES

LONG = {"input_ids": np.ones((1, LONG_TOKENS), dtype=np.int64)}
SHORT = {"input_ids": np.ones((1, LONG_TOKENS - 1), dtype=np.int64)}
TWO = {"input_ids": np.ones((2, LONG_TOKENS), dtype=np.int64)}


def answers(number: float, taken: list[float]) -> Any:
    def run(_: Any, feed: Mapping[str, IntegerArray]) -> list[FloatArray]:
        taken.append(number)
        return [np.full((len(feed["input_ids"]), 2), number, dtype=np.float32)]

    return run


def test_only_one_long_text_at_a_time_is_run_wide() -> None:
    taken: list[float] = []
    run = LoneLong(answers(1, taken), answers(2, taken))
    for feed in (SHORT, LONG, TWO, LONG):
        run(None, feed)
    assert taken == [1, 2, 1, 2]


def test_beside_another_call_it_is_run_narrow() -> None:
    taken: list[float] = []
    entered, go = threading.Event(), threading.Event()

    def waits(_: Any, feed: Mapping[str, IntegerArray]) -> list[FloatArray]:
        entered.set()
        assert go.wait(SAFETY_S)
        return [np.zeros((len(feed["input_ids"]), 2), dtype=np.float32)]

    run = LoneLong(answers(1, taken), waits)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, None, LONG)
        assert entered.wait(SAFETY_S)
        run(None, LONG)
        go.set()
        first.result(SAFETY_S)
    run(None, LONG)
    assert taken == [1]


def test_a_call_that_failed_is_over() -> None:
    def fails(*_: Any) -> list[FloatArray]:
        raise MemoryError

    taken: list[float] = []
    run = LoneLong(fails, answers(2, taken))
    with pytest.raises(MemoryError):
        run(None, SHORT)
    run(None, LONG)
    assert taken == [2]


def test_with_it_onnx_gives_the_same_answers_on_so_many_threads() -> None:
    """The threads are counted by the system: those of the library, beside the caller."""
    case = CASES[0]
    out = case.run_alone(
        f"""
import numpy as np
from dataclasses import replace
texts = [Encoding([5] * 3), Encoding([5, 6, 7, 8] * {LONG_TOKENS // 4}), Encoding([8] * {2 * LONG_TOKENS})]
threads, answers = [], []
for lone in (1, 4):
    before = len(os.listdir("/proc/self/task"))
    options = EngineOptions(device="cpu", lanes=2, lone_threads=lone)
    engine = OnnxEngine(content, shape=ModelShape(2, 1024, 0), precision="float32", options=options)
    answers.append(np.concatenate([engine.run(TokenBatch.of([text])) for text in texts]))
    threads.append(len(os.listdir("/proc/self/task")) - before)
    engine.close()
    del engine
assert np.abs(answers[0] - answers[1]).max() < 1e-5, answers
print(*threads)
"""
    )
    assert out.stdout.split() == ["0", "3"], out.stderr
