"""Any model of the family, from its folder through export and HTTP to the library's own answers."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from service.store import Manifest, open_version
from tests.server import local_server
from tests.training.families import FAMILIES, Expected, Family, Library, Saved, save_family
from training.cli import main

FORMS = ("onnx/float32", "onnx/int8", "torchscript/float32")
BOUNDS = {"float32": 1e-3, "int8": 0.1}
"""Largest change of a score against the library."""
LOGIT_BOUNDS = {"float32": 1e-3, "int8": 0.5}
COMPANY_BOUND = 1e-4
TEXTS = (
    "good",
    "Good",
    "a very sad film",
    "THIS IS A TERRIBLE WASTE OF TIME !",
    "the movie was not bad, i loved it and recommend it",
    "café naïve Straße: ¡qué película!",
    "cafe",
    "café",
    "great 😀 time",
    "[SEP] good [CLS] </s> bad <pad> <s>",
    "  it\twas\n\nexcellent  ",
)


@dataclass(frozen=True)
class Exported:
    """A family in the store, and what the library says of each text."""

    family: Family
    store: Path
    manifest: Manifest
    expected: dict[str, Expected]


def texts_of(family: Family) -> tuple[str, ...]:
    """The texts, and some of as many tokens as can be read, of one more, and of far more."""
    longest = family.max_tokens - 2
    return (*TEXTS, *(" ".join(["good"] * count) for count in (longest, longest + 1, 3 * longest)))


def export(saved: Saved, store: Path) -> int:
    """The command, on everything that can be asked for."""
    words = ["export", str(saved.folder), "--name", "tiny", "--version", "1", "--store", str(store)]
    more = ["--formats", "onnx,int8,torchscript", "--data", str(saved.rows), "--base-model", "tiny=MIT"]
    return main([*words, *more, "--threads", "1"])


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    family: Family = request.param
    saved = save_family(family, tmp_path_factory.mktemp("family"))
    store = saved.folder.parent / "store"
    assert export(saved, store) == 0
    texts = texts_of(family)
    expected = Library(family, saved.folder).answer(texts)
    manifest = open_version(store, "tiny").manifest
    return Exported(family, store, manifest, dict(zip(texts, expected, strict=True)))


@pytest.fixture(params=FORMS)
def client(exported: Exported, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A server of that form."""
    engine, _, precision = request.param.partition("/")
    with (
        local_server(
            model_store=exported.store,
            model="tiny",
            engine=engine,
            precision=precision,
            lanes=1,
            threads_per_lane=1,
        ) as server,
        server.client() as client,
    ):
        health = client.get("/health").json()
        assert f"{health['engine']}/{health['precision']}" == request.param
        yield client


def predict(client: httpx.Client, inputs: str | list[str], **options: Any) -> list[dict[str, Any]]:
    answer = client.post("/predict", json={"inputs": inputs, **options})
    assert answer.status_code == 200, answer.text
    predictions: list[dict[str, Any]] = answer.json()["predictions"]
    return predictions


def test_the_answers_over_http_are_those_of_the_library(exported: Exported, client: httpx.Client) -> None:
    precision = client.get("/health").json()["precision"]
    bound = BOUNDS[precision]
    texts = list(exported.expected)
    together = predict(client, texts)
    for text, expected, listed in zip(texts, exported.expected.values(), together, strict=True):
        [alone] = predict(client, text)
        for one in (alone, listed):
            assert one["scores"] == pytest.approx(expected.scores, abs=bound)
            assert (one["tokens"], one["truncated"]) == (expected.tokens, expected.truncated)
            assert one["label"] == next(iter(one["scores"]))
            assert list(one["scores"].values()) == sorted(one["scores"].values(), reverse=True)
            assert one["score"] == one["scores"][one["label"]]
        assert listed["scores"] == pytest.approx(alone["scores"], abs=COMPANY_BOUND)
    assert exported.manifest.labels == list(exported.family.labels)
    raw = [one["scores"] for one in predict(client, texts, raw_scores=True)]
    logits = [[scores[name] for name in exported.family.labels] for scores in raw]
    np.testing.assert_allclose(
        logits, [expected.logits for expected in exported.expected.values()], atol=LOGIT_BOUNDS[precision]
    )


def test_the_longest_text_is_as_long_as_the_model_can_read(exported: Exported) -> None:
    assert exported.manifest.max_tokens == exported.family.max_tokens
    *_, fits, one_more, far_more = exported.expected.values()
    lengths = [(one.tokens, one.truncated) for one in (fits, one_more, far_more)]
    longest = exported.family.max_tokens
    assert lengths == [(longest, False), (longest, True), (longest, True)]


def test_capitals_and_accents_count_where_the_tokenizer_keeps_them(exported: Exported) -> None:
    logits = {text: exported.expected[text].logits for text in ("good", "Good", "café", "cafe")}
    for one, other in (("good", "Good"), ("café", "cafe")):
        assert bool(np.abs(logits[one] - logits[other]).max() > 0.01) == exported.family.cased
