"""The wire, as a client sees it: a real server, a tiny real model, requests over a socket."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.schemas import Health, ModelList, PredictResponse, Problem
from tests.models import make_version
from tests.server import JSON, LocalServer, local_server

MAX_TOKENS = 64
MAX_TEXTS = 5


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    make_version(folder, max_tokens=MAX_TOKENS)
    make_version(folder, version=2, max_tokens=MAX_TOKENS, precisions=("float32", "int8"))
    make_version(folder, "one", labels=["hit"], activation="sigmoid")
    make_version(folder, "several", labels=["short", "long", "loud"], activation="sigmoid")
    make_version(folder, "graded", labels=["bad", "so so", "good"])
    broken = make_version(folder, "broken")
    (broken / "manifest.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[LocalServer]:
    with local_server(model_store=store, max_texts=MAX_TEXTS, precision="float32") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LocalServer) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def predict(client: httpx.Client, inputs: str | Sequence[str], **options: Any) -> list[dict[str, Any]]:
    response = client.post("/predict", json={"inputs": inputs, **options})
    assert response.status_code == 200, response.text
    answer = PredictResponse.model_validate_json(response.content)
    assert len(answer.predictions) == (1 if isinstance(inputs, str) else len(inputs))
    predictions: list[dict[str, Any]] = response.json()["predictions"]
    return predictions


def assert_problem(response: httpx.Response, status: int, code: str) -> Problem:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == Problem.media_type
    problem = Problem.model_validate_json(response.content)
    assert (problem.status, problem.code, problem.type) == (status, code, f"/docs#{code}")
    assert problem.request_id == response.headers["x-request-id"]
    return problem


# --- predictions


def test_one_text_gives_a_list_of_one(client: httpx.Client) -> None:
    response = client.post("/predict", json={"inputs": "a good film"})
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    assert list(answer) == ["model", "version", "predictions"]
    assert (answer["model"], answer["version"]) == ("sentiment", "2")
    [one] = answer["predictions"]
    assert list(one) == ["label", "score", "scores", "tokens", "truncated"]
    assert one["label"] == "positive"
    assert one["score"] == one["scores"]["positive"] > 0.5
    assert one["tokens"] == 5
    assert one["truncated"] is False


def test_a_list_comes_back_in_order(client: httpx.Client) -> None:
    texts = ["good", "bad", "a good film", "awful"]
    assert [one["label"] for one in predict(client, texts)] == ["positive", "negative"] * 2
    assert predict(client, texts) == [predict(client, text)[0] for text in texts]


def test_scores_stand_best_first_and_add_up(client: httpx.Client) -> None:
    for one in predict(client, ["good", "bad"]):
        assert list(one["scores"].values()) == sorted(one["scores"].values(), reverse=True)
        assert next(iter(one["scores"])) == one["label"]
        assert sum(one["scores"].values()) == pytest.approx(1, abs=1e-5)


def test_in_a_list_only_the_bad_text_fails(client: httpx.Client) -> None:
    good, empty, bad = predict(client, ["good", " \u200b", "bad"])
    assert (good["label"], bad["label"]) == ("positive", "negative")
    assert list(empty) == ["error"]
    assert empty["error"]["code"] == "text_empty"
    assert list(empty["error"]) == ["code", "detail"]
    assert predict(client, [""]) == [empty]


def test_a_single_bad_text_is_refused(client: httpx.Client) -> None:
    assert_problem(client.post("/predict", json={"inputs": ""}), 422, "text_empty")


def test_r22_a_long_text_is_cut_and_says_so_whatever_the_shape(client: httpx.Client) -> None:
    text = "good " * 1000
    [alone], [in_a_list] = predict(client, text), predict(client, [text])
    assert alone == in_a_list
    assert (alone["truncated"], alone["tokens"]) == (True, MAX_TOKENS)


def test_r21_a_long_text_is_refused_when_it_may_not_be_cut(client: httpx.Client) -> None:
    text = "good " * 1000
    response = client.post("/predict", json={"inputs": text, "truncate": False})
    assert_problem(response, 422, "text_too_long")
    short, long = predict(client, ["good", text], truncate=False)
    assert short["truncated"] is False
    assert long["error"]["code"] == "text_too_long"
    assert predict(client, "a" * 67_000)[0]["truncated"] is True


def test_raw_scores_are_logits(client: httpx.Client) -> None:
    [logits], [probabilities] = predict(client, "good", raw_scores=True), predict(client, "good")
    assert logits["label"] == probabilities["label"]
    assert logits["score"] == logits["scores"]["positive"]
    powers = {label: math.exp(logit) for label, logit in logits["scores"].items()}
    for label, probability in probabilities["scores"].items():
        assert powers[label] / sum(powers.values()) == pytest.approx(probability, abs=1e-5)


def test_top_k_keeps_the_best(store: Path) -> None:
    with local_server(model_store=store, model="graded") as running, running.client() as client:
        [every] = predict(client, "good")
        assert list(every["scores"]) == ["good", "so so", "bad"]
        for k in (1, 2, 3, 10**9):
            [some] = predict(client, "good", top_k=k)
            assert list(some["scores"].items()) == list(every["scores"].items())[:k]
            assert (some["label"], some["score"]) == (every["label"], every["score"])


def test_a_version_with_one_label_answers_its_sigmoid(store: Path) -> None:
    with local_server(model_store=store, model="one") as running, running.client() as client:
        [good], [bad] = predict(client, "good"), predict(client, "bad")
        assert (good["label"], bad["label"]) == ("hit", "hit")
        assert good["score"] > 0.5 > bad["score"]
        [logit] = predict(client, "good", raw_scores=True)
        assert 1 / (1 + math.exp(-logit["score"])) == pytest.approx(good["score"], abs=1e-5)


def test_a_multi_label_version_answers_the_sigmoid_of_each(store: Path) -> None:
    with local_server(model_store=store, model="several") as running, running.client() as client:
        [scores], [logits] = predict(client, "good"), predict(client, "good", raw_scores=True)
        assert list(scores["scores"]) == list(logits["scores"])
        for label, logit in logits["scores"].items():
            assert 1 / (1 + math.exp(-logit)) == pytest.approx(scores["scores"][label], abs=1e-5)
        assert scores["label"] == next(iter(scores["scores"]))


def test_stages_and_request_id_are_told(client: httpx.Client) -> None:
    response = client.post("/predict", json={"inputs": "good"}, headers={"x-request-id": "my-id.1"})
    assert response.headers["x-request-id"] == "my-id.1"
    stages = re.fullmatch(
        r"tokenize;dur=([\d.]+), queue;dur=([\d.]+), infer;dur=([\d.]+)", response.headers["server-timing"]
    )
    assert stages is not None
    assert all(float(stage) > 0 for stage in stages.groups())


def test_too_many_texts(client: httpx.Client) -> None:
    predict(client, ["good"] * MAX_TEXTS)
    response = client.post("/predict", json={"inputs": ["good"] * (MAX_TEXTS + 1)})
    assert "6 texts; at most 5" in assert_problem(response, 413, "too_many_texts").detail


def test_of_equal_keys_the_last_counts(client: httpx.Client) -> None:
    response = client.post("/predict", content=b'{"inputs": "bad", "inputs": "good"}', headers=JSON)
    assert response.json()["predictions"] == predict(client, "good")


# --- content type, methods and paths


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "APPLICATION/JSON",
        "application/json; charset=utf-8",
        'application/json;charset="UTF-8"',
        "application/json; charset=utf8; version=1",
    ],
)
def test_json_in_utf_8_by_any_of_its_names(client: httpx.Client, kind: str) -> None:
    body = json.dumps({"inputs": "good"})
    assert client.post("/predict", content=body, headers={"content-type": kind}).status_code == 200


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "",
        "text/plain",
        "text/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/vnd.api+json",
        "application/json; charset=latin-1",
        "application/jsonx",
    ],
)
def test_any_other_content_type_is_refused(client: httpx.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = client.post("/predict", content=b'{"inputs": "good"}', headers=headers)
    assert_problem(response, 415, "unsupported_media_type")


def test_a_compressed_body_is_refused(client: httpx.Client) -> None:
    for coding, status in (("gzip", 415), ("identity", 200)):
        headers = {**JSON, "content-encoding": coding}
        response = client.post("/predict", content=b'{"inputs": "good"}', headers=headers)
        assert response.status_code == status


GET_ROUTES = ("/health", "/health/live", "/health/ready", "/metrics", "/models", "/docs", "/openapi.json")


@pytest.mark.parametrize("path", GET_ROUTES)
def test_head_is_answered_as_get_is(client: httpx.Client, path: str) -> None:
    """A load balancer may ask so; FastAPI's own answer is 405."""
    got, head = client.get(path), client.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"") == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/predict", "POST"),
        ("HEAD", "/predict", "POST"),
        ("PUT", "/predict", "POST"),
        ("OPTIONS", "/predict", "POST"),
        *(("POST", path, "GET, HEAD") for path in GET_ROUTES),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(
    client: httpx.Client, method: str, path: str, allow: str
) -> None:
    response = client.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == allow
    if method != "HEAD":
        assert_problem(response, 405, "method_not_allowed")


@pytest.mark.parametrize("path", ["/", "/predict/", "/health/live/", "/Predict", "/nothing", "/predict%00"])
def test_a_path_that_is_none_is_not_redirected(client: httpx.Client, path: str) -> None:
    for response in (client.get(path), client.post(path, json={"inputs": "good"})):
        assert_problem(response, 404, "not_found")


# --- what the service says of itself


def test_health(client: httpx.Client) -> None:
    assert client.get("/health/live").json() == {"status": "live"}
    assert client.get("/health/ready").json() == {"status": "ready"}
    health = client.get("/health")
    assert health.status_code == 200
    assert health.json() == {
        "status": "ready",
        "model": "sentiment",
        "version": "2",
        "engine": "onnx",
        "precision": "float32",
        "device": "cpu",
    }
    Health.model_validate_json(health.content)


def test_models_are_listed_with_the_one_that_is_served(client: httpx.Client) -> None:
    response = client.get("/models")
    models = {(one.name, one.version): one for one in ModelList.model_validate_json(response.content).models}
    assert [key for key, one in models.items() if one.served] == [("sentiment", "2")]
    assert models["sentiment", "2"].forms == ["onnx/float32", "onnx/int8"]
    assert models["graded", "1"].labels == ["bad", "so so", "good"]
    assert models["broken", "1"].problem
    assert models["broken", "1"].labels is None


def test_metrics_tell_what_was_answered(server: LocalServer, client: httpx.Client) -> None:
    def counted() -> dict[str, float]:
        return {
            "answered": server.metric("valence_http_requests_total", route="/predict", status="200"),
            "refused": server.metric("valence_refusals_total", reason="text_empty"),
            "failed": server.metric("valence_text_errors_total", reason="text_empty"),
            "positive": server.metric("valence_predictions_total", label="positive"),
            "tokens": server.metric("valence_text_tokens_sum"),
            "truncated": server.metric("valence_texts_truncated_total"),
            "unknown": server.metric("valence_unknown_tokens_total"),
        }

    before = counted()
    predict(client, ["a good film", "good " * 100, "good ☃"])
    client.post("/predict", json={"inputs": ""})
    after = counted()
    assert {name: after[name] - before[name] for name in after} == {
        "answered": 1,
        "refused": 1,
        "failed": 1,
        "positive": 3,
        "tokens": 5 + MAX_TOKENS + 4,
        "truncated": 1,
        "unknown": 1,
    }
    page = client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"valence_ready 1.0" in page.content
    openmetrics = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")


# --- the document


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    made: dict[str, Any] = client.get("/openapi.json").json()
    return made


def test_every_example_works_when_it_is_pasted(client: httpx.Client, document: dict[str, Any]) -> None:
    content = document["paths"]["/predict"]["post"]["requestBody"]["content"]
    assert list(content) == ["application/json"]
    examples = content["application/json"]["examples"]
    assert len(examples) >= 3
    for example in examples.values():
        response = client.post("/predict", json=example["value"])
        assert response.status_code == 200, response.text
        for one in PredictResponse.model_validate_json(response.content).predictions:
            assert "error" not in one.model_dump()


def test_the_example_of_an_answer_is_one(document: dict[str, Any]) -> None:
    answered = document["paths"]["/predict"]["post"]["responses"]["200"]["content"]["application/json"]
    PredictResponse.model_validate_json(json.dumps(answered["example"]))
    assert answered["schema"] == {"$ref": "#/components/schemas/PredictResponse"}


def test_every_error_example_is_a_problem(document: dict[str, Any]) -> None:
    for status, response in document["paths"]["/predict"]["post"]["responses"].items():
        if status == "200":
            continue
        assert list(response["content"]) == [Problem.media_type]
        content = response["content"][Problem.media_type]
        assert content["schema"] == {"$ref": "#/components/schemas/Problem"}
        for code, example in content["examples"].items():
            problem = Problem.model_validate_json(json.dumps(example["value"]))
            assert (str(problem.status), problem.code) == (status, code)


def test_the_document_says_what_is_answered(client: httpx.Client, document: dict[str, Any]) -> None:
    """Each error that a body alone can bring about is documented with its status and code."""
    documented = {
        (int(status), code)
        for status, response in document["paths"]["/predict"]["post"]["responses"].items()
        for code in response["content"].get(Problem.media_type, {}).get("examples", {})
    }
    bodies: list[tuple[bytes, str]] = [
        (b"", "application/json"),
        (b"{}", "text/plain"),
        (b"{}", "application/json"),
        (b'{"inputs": ""}', "application/json"),
        (rb'{"inputs": "\ud800"}', "application/json"),
        (json.dumps({"inputs": "good " * 999, "truncate": False}).encode(), "application/json"),
        (json.dumps({"inputs": ["good"] * 99}).encode(), "application/json"),
        (b"x" * 2_000_001, "application/json"),
    ]
    seen = set()
    for body, kind in bodies:
        response = client.post("/predict", content=body, headers={"content-type": kind})
        seen.add((response.status_code, response.json()["code"]))
    assert len(seen) == len(bodies)
    assert seen <= documented


def test_the_document_has_no_form_that_is_not_ours(document: dict[str, Any]) -> None:
    assert "HTTPValidationError" not in json.dumps(document)
    referred = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert referred == set(document["components"]["schemas"])
    assert set(document["paths"]) == {
        "/predict",
        "/health",
        "/health/live",
        "/health/ready",
        "/metrics",
        "/models",
    }


def test_the_page_needs_nothing_from_elsewhere(client: httpx.Client, document: dict[str, Any]) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<script" not in page.text
    assert re.findall(r"""(?:src|href)=["']?([^"'>\s]+)""", page.text) == ["openapi.json"]
    assert set(re.findall(r"https?://[^\s/]+", page.text)) == {"http://127.0.0.1:8000"}
    for path in document["paths"]:
        assert path in page.text
    codes = {"not_found", "method_not_allowed"}
    for response in document["paths"]["/predict"]["post"]["responses"].values():
        codes |= set(response["content"].get(Problem.media_type, {}).get("examples", {}))
    for code in codes:
        assert f"id={code}>" in page.text, "the type of a problem leads here"
