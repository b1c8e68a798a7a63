"""E. Wrong numbers: the model of the repository as it is served, and numbers at the edge of what there is."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime
import pytest

from service.classifier import activate
from service.core import Encoding, FloatArray, TokenBatch
from service.engines import Engine, EngineOptions, open_engine, pad
from service.errors import StartupError
from service.store import Version, open_version
from tests.models import make_version
from tests.reliability.gates import predict
from tests.server import LocalServer, local_server
from tests.service.stand_ins import Opener

REPOSITORY = Path(__file__).parents[2] / "model_store"
Running = tuple[LocalServer, Opener, httpx.Client]


@pytest.fixture(scope="module")
def version() -> Version:
    return open_version(REPOSITORY, "sentiment")


@pytest.fixture(scope="module", params=["float32", "int8"])
def engine(request: pytest.FixtureRequest, version: Version) -> Iterator[Engine]:
    made = open_engine(version, EngineOptions(device="cpu", precision=request.param))
    yield made
    made.close()


def texts(lengths: list[int], seed: int = 32) -> list[Encoding]:
    """Texts of the vocabulary of BERT, of so many tokens."""
    dice = np.random.default_rng(seed)
    return [Encoding([101, *dice.integers(1000, 29_000, length - 2).tolist(), 102]) for length in lengths]


def test_r32_the_served_model_answers_the_same_beside_anyone(engine: Engine, version: Version) -> None:
    """Alone, first and last, in twos, sevens and 32s, beside 3 and 500 tokens."""
    temperature = version.manifest.temperature

    def chances(batch: list[Encoding]) -> FloatArray:
        logits = engine.run(TokenBatch.of(batch))
        return activate(logits, "softmax", temperature=temperature).astype(np.float32)

    short, long = texts([3])[0], texts([500])[0]
    for text in texts([5, 40], seed=1):
        alone = chances([text])[0]
        companies = [[text, long], [long, text], [short, text], [text, text]]
        companies += [[text, *texts([12] * 6)], [*texts([3, 9, 27, 12, 5, 44]), text]]
        companies += [[*texts([8] * 16), text, *texts([17] * 15)]]
        for company in companies:
            together = chances(company)[company.index(text)]
            assert np.abs(together - alone).max() <= 1e-4
            assert together.argmax() == alone.argmax()


def test_r34_the_optimised_graph_gives_the_logits_of_the_plain_one(version: Version) -> None:
    """On batches padded to the right, with real masks; a manifest with other padding is refused."""
    plain_way = onnxruntime.SessionOptions()
    plain_way.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    plain_way.intra_op_num_threads = 1
    record = next(file for file in version.manifest.models if file.precision == "float32")
    plain = onnxruntime.InferenceSession(version.read(record), plain_way, providers=["CPUExecutionProvider"])
    served = open_engine(version, EngineOptions(device="cpu", precision="float32"))
    wanted = {node.name for node in plain.get_inputs()}
    for lengths in ([2, 3, 16], [3, 127, 64, 5], [130, 2]):
        batch = TokenBatch.of(texts(lengths))
        ids, mask = pad(batch, version.manifest.pad_id)
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        expected = plain.run(None, {name: feed[name] for name in wanted})[0]
        np.testing.assert_allclose(served.run(batch), expected, atol=1e-3)
    served.close()


def test_r35_one_text_has_one_answer_asked_20_times(store: Path) -> None:
    with local_server(model_store=store) as server, server.client() as client:
        answers = {predict(client, "not a bad film", raw_scores=True).content for _ in range(20)}
    assert len(answers) == 1


# --- numbers at the edge


@pytest.fixture(scope="module")
def running(store: Path) -> Iterator[Running]:
    opener = Opener()
    with local_server(open_engine=opener, model_store=store) as server, server.client() as client:
        yield server, opener, client


EDGES: dict[str, Callable[[FloatArray], Any]] = {
    "the largest floats": lambda logits: np.sign(logits) * np.float32(3.4e38),
    "zeros of both signs": lambda logits: logits * np.float32(-0.0),
    "the smallest floats": lambda logits: logits * np.float32(1e-44),
    "double precision": lambda logits: logits.astype(np.float64) * 1e300,
    "backwards in memory": np.asfortranarray,
}


@pytest.mark.parametrize("case", EDGES)
@pytest.mark.parametrize("raw_scores", [False, True])
def test_every_number_of_an_answer_is_one(running: Running, case: str, raw_scores: bool) -> None:
    """Nothing becomes NaN, Infinity or null, and a probability is one."""
    _, opener, client = running
    opener.engine.change = EDGES[case]
    answer = predict(client, ["good", "bad"], raw_scores=raw_scores)
    opener.engine.change = lambda logits: logits
    assert answer.status_code == 200

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    for one in json.loads(answer.content, parse_constant=refuse)["predictions"]:
        numbers = [one["score"], *one["scores"].values()]
        assert all(isinstance(number, float) and math.isfinite(number) for number in numbers)
        if not raw_scores:
            assert sum(one["scores"].values()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_r33_a_row_that_is_no_number_fails_that_text_and_is_counted(store: Path, number: float) -> None:
    """In one label only, in the middle of a list: its neighbours are answered as they are without it."""
    opener = Opener()
    batches: list[TokenBatch] = []

    def spoil(logits: FloatArray) -> FloatArray:
        spoilt = logits.copy()
        spoilt[batches[-1].lengths == 5, 0] = number
        return spoilt

    settings: dict[str, Any] = {"lanes": 1, "threads_per_lane": 1, "max_padding_tokens": 100}
    with (
        local_server(open_engine=opener, model_store=store, **settings) as server,
        server.client() as client,
    ):
        expected = predict(client, ["good", "bad"]).json()["predictions"]
        opener.engine.fault, opener.engine.change = batches.append, spoil
        first, middle, last = predict(client, ["good", "mid", "bad"]).json()["predictions"]
        assert [first, last] == expected
        assert middle["error"]["code"] == "engine_failed"
        assert server.metric("valence_text_errors_total", reason="engine_failed") == 1
    assert [len(batch) for batch in batches] == [3], "they shared a batch"


@pytest.mark.parametrize("temperature", [1e-308, 1e-40, 0.0, -1.0, 1e300, math.inf, math.nan])
def test_a_temperature_that_leaves_no_number_is_refused(tmp_path: Path, temperature: float) -> None:
    """A division by it would overflow, and the score be null."""
    with pytest.raises(StartupError, match="temperature is not between"):
        make_version(tmp_path, change=lambda manifest: replace(manifest, temperature=temperature))
