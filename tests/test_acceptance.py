"""The main job, end to end: the real model of the repository, a real server, SST-2 dev over HTTP.

What it shows, with 64 clients at once and each text sent once alone and once in a list of mixed size: every
answer is that of its own text. float32 equals the eager PyTorch model with the same (rounded) weights. int8
equals itself whoever shares its batch, and is as accurate.
"""

import asyncio
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from service.classifier import activate
from service.store import Version, open_version, versions
from service.tokenizer import Tokenizer
from tests.server import Server, serving
from training.data import Example, read_rows
from training.graph import graph_weights, rebuild

STORE = Path(__file__).parent.parent / "model_store"
CLIENTS = 64
CHANGE = "p99 of the change of a probability against float32"
LIST_SIZES = (1, 2, 3, 7, 16, 32, 40)
PRAISE = (
    "Great product, highly recommend!",
    "Absolutely loved it, will buy again.",
    "This is an outstanding purchase!",
)
BLAME = ("Terrible experience, waste of money.", "Poor quality, broke after a week.")
NEITHER = "Average, nothing special."

Positive = NDArray[np.float64]
"""float64[n]: the probability of the label positive, in the order of the texts."""


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    folder = os.environ.get("VALENCE_DATA")
    if not folder:
        pytest.skip("VALENCE_DATA is not set: the sentences of SST-2 are not in the repository")
    return [example for example, _ in read_rows(Path(folder) / "sst2" / "dev.tsv", labels=2)]


@pytest.fixture(scope="module")
def version() -> Version:
    return open_version(STORE, "sentiment")


@pytest.fixture(scope="module", params=["float32", "int8"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    # So long a deadline that a busy machine refuses nobody: what counts here is what is answered.
    with serving(model_store=STORE, precision=request.param, request_timeout_s=600) as running:
        yield running


@pytest.fixture(scope="module")
def reference(version: Version, examples: list[Example]) -> Positive:
    """What PyTorch says of each text alone, with the weights that lie in the version."""
    torch.set_num_threads(1)  # texts are too short for more, and the server wants the other core
    manifest = version.manifest
    tokenizer = Tokenizer.load(
        version.read(manifest.tokenizer), max_tokens=manifest.max_tokens, max_text_chars=1_000_000
    )
    model = rebuild(graph_weights(version.path / "model.onnx"), manifest.architecture)
    with torch.inference_mode():
        logits = torch.cat(
            [model(input_ids=torch.tensor([tokenizer.encode(one.text).ids])).logits for one in examples]
        )
    probabilities: Positive = torch.softmax(logits.double() / manifest.temperature, dim=1).numpy()
    return probabilities[:, manifest.labels.index("positive")]


def shuffled_requests(count: int) -> list[list[int]]:
    """Every place once in a list of its own and once in a list of mixed size; the same order in every run."""
    dice = random.Random(2026)
    places = list(range(count))
    dice.shuffle(places)
    requests = [[place] for place in places]
    while places:
        size = dice.choice(LIST_SIZES)
        requests.append(places[:size])
        places = places[size:]
    dice.shuffle(requests)
    return requests


async def ask(client: httpx.AsyncClient, texts: Sequence[str], *, single: bool) -> list[float]:
    """The probability of positive of each text, as the service answers it."""
    response = await client.post("/predict", json={"inputs": texts[0] if single else texts})
    assert response.status_code == 200, response.text
    predictions = response.json()["predictions"]
    assert len(predictions) == len(texts)
    return [prediction["scores"]["positive"] for prediction in predictions]


async def ask_one_by_one(server: Server, texts: Sequence[str]) -> Positive:
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        return np.array([(await ask(client, [text], single=True))[0] for text in texts])


async def ask_all_at_once(server: Server, texts: Sequence[str]) -> tuple[Positive, Positive]:
    """Answers to the texts sent singly, and to the texts sent in lists, from 64 clients at once."""
    answers = {"single": np.full(len(texts), np.nan), "list": np.full(len(texts), np.nan)}
    waiting = iter(shuffled_requests(len(texts)))
    seen: set[int] = set()

    async def one_client(client: httpx.AsyncClient) -> None:
        for places in waiting:
            single = len(places) == 1 and places[0] not in seen
            seen.update(places if single else ())
            found = await ask(client, [texts[place] for place in places], single=single)
            answers["single" if single else "list"][places] = found

    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        await asyncio.gather(*(one_client(client) for _ in range(CLIENTS)))
    return answers["single"], answers["list"]


def accuracy(positive: Positive, examples: Sequence[Example]) -> float:
    return float(np.mean((positive > 0.5) == np.array([example.label == 1 for example in examples])))


def recorded(version: Version, name: str, dataset: str, precision: str) -> float:
    """What the manifest says."""
    (found,) = [
        metric.value
        for metric in version.manifest.metrics
        if (metric.name, metric.dataset, metric.precision) == (name, dataset, precision)
    ]
    return found


async def test_872_sentences_come_back_each_to_its_own_text(
    server: Server, version: Version, examples: list[Example], reference: Positive
) -> None:
    texts = [example.text for example in examples]
    alone = await ask_one_by_one(server, texts)
    single, listed = await ask_all_at_once(server, texts)

    assert len(texts) == 872
    # A NaN is a text that nobody answered; it fails every bound below.
    assert np.max(np.abs(single - alone)) <= 1e-4
    assert np.max(np.abs(listed - alone)) <= 1e-4
    if server.precision == "float32":
        assert np.max(np.abs(alone - reference)) <= 1e-3
    else:
        assert abs(accuracy(alone, examples) - accuracy(reference, examples)) <= 0.005
        # Recorded over more sets than this one.
        change = recorded(version, CHANGE, "all sets", "int8")
        assert np.quantile(np.abs(alone - reference), 0.99) <= change + 0.02
    accurate = recorded(version, "accuracy", "sst2/dev", server.precision)
    assert accuracy(alone, examples) == pytest.approx(accurate, abs=0.005)


def test_praise_is_positive_and_blame_is_not(server: Server, version: Version) -> None:
    texts = [*PRAISE, NEITHER, *BLAME]
    response = httpx.post(f"{server.url}/predict", json={"inputs": texts}, timeout=600)
    body = response.json()
    assert (body["model"], body["version"]) == ("sentiment", str(version.manifest.version))
    labels = [prediction["label"] for prediction in body["predictions"]]
    assert labels[: len(PRAISE)] == ["positive"] * len(PRAISE)
    assert labels[-len(BLAME) :] == ["negative"] * len(BLAME)
    positive = [prediction["scores"]["positive"] for prediction in body["predictions"]]
    assert min(positive[: len(PRAISE)]) > positive[len(PRAISE)], "what is neither is less than praise"


async def test_golden_texts_are_answered_at_the_temperature_of_the_version(
    server: Server, version: Version
) -> None:
    """The recorded logits, divided by it, as probabilities."""
    manifest = version.manifest
    bound = {"float32": 1e-3, "int8": 0.05}[server.precision]
    golden = [text for text in manifest.golden_texts if f"onnx/{server.precision}" in text.logits]
    assert golden
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        answered = await ask(client, [text.text for text in golden], single=False)
    for text, found in zip(golden, answered, strict=True):
        logits = np.array(text.logits[f"onnx/{server.precision}"])
        chances = activate(logits[None], manifest.activation, temperature=manifest.temperature)[0]
        assert found == pytest.approx(chances[manifest.labels.index("positive")], abs=bound)


@pytest.mark.parametrize("number", versions(STORE, "sentiment"))
def test_every_version_of_the_repository_can_be_gone_back_to(number: int) -> None:
    with serving(model_store=STORE, version=number, request_timeout_s=600) as running:
        answer = httpx.post(f"{running.url}/predict", json={"inputs": PRAISE[0]}, timeout=600).json()
    assert answer["version"] == str(number)
    assert answer["predictions"][0]["label"] == "positive"
