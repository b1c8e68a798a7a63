"""F. Labels, scores, and files that do not fit together: what a server does with such a version."""

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.errors import StartupError
from service.metrics import Metrics
from service.predictor import Predictor
from service.schemas import PredictResponse
from service.settings import Settings
from service.store import open_version
from tests.models import Weights, bert_tokenizer, make_onnx, make_version, make_weights
from tests.reliability.gates import predict
from tests.server import local_server, starting

REPOSITORY = Path(__file__).parents[2] / "model_store"


def edit(folder: Path, change: Callable[[dict[str, Any]], object], **files: bytes) -> None:
    """Put other files into a version, and make its manifest agree with them."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for record in [manifest["tokenizer"], *manifest["models"]]:
        content = files.get(record["path"].partition(".")[0])
        if content is not None:
            (folder / record["path"]).write_bytes(content)
            record |= {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    change(manifest)
    path.write_text(json.dumps(manifest))


async def refusal(store: Path) -> str:
    """Why the version of the store is not served; it must not be."""
    predictor = Predictor(Settings(model_store=store, device="cpu", max_batch_tokens=64), Metrics())
    with pytest.raises(StartupError) as caught:
        await predictor.start()
    assert predictor.unready_reason() is not None
    await predictor.stop(60)
    return str(caught.value)


def test_r37_names_come_from_the_version_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    """Twelve labels, of which a sort by letters would put 10 and 11 behind 1; and the same two swapped."""
    twelve = [f"grade {number}" for number in range(12)]
    make_version(tmp_path, "twelve", labels=twelve)
    make_version(tmp_path, "swapped", labels=["positive", "negative"])
    with local_server(model_store=tmp_path, model="twelve") as server, server.client() as client:
        [good], [bad] = (predict(client, text).json()["predictions"] for text in ("good good", "bad bad"))
        assert (good["label"], bad["label"]) == ("grade 11", "grade 0")
        assert sorted(good["scores"], key=good["scores"].get, reverse=True)[:3] == [
            "grade 11",
            "grade 10",
            "grade 9",
        ]
    with local_server(model_store=tmp_path, model="swapped") as server, server.client() as client:
        assert predict(client, "good").json()["predictions"][0]["label"] == "negative"


@pytest.mark.parametrize("inputs", ["good", ["good"], ["good", "bad"], ["good", ""]])
@pytest.mark.parametrize("options", [{}, {"top_k": 1}, {"top_k": 9}, {"raw_scores": True}])
def test_r38_one_shape_whatever_was_asked(store: Path, inputs: str | list[str], options: Any) -> None:
    """Scores are looked up by label; an option changes how many there are, and no nesting."""
    with local_server(model_store=store) as server, server.client() as client:
        answer = predict(client, inputs, **options)
    body = answer.json()
    PredictResponse.model_validate_json(answer.content)
    assert list(body) == ["model", "version", "predictions"]
    assert len(body["predictions"]) == (1 if isinstance(inputs, str) else len(inputs))
    for one in body["predictions"]:
        if "error" in one:
            continue
        assert list(one) == ["label", "score", "scores", "tokens", "truncated"]
        assert one["scores"][one["label"]] == one["score"]
        assert len(one["scores"]) == min(2, options.get("top_k", 2))


def test_r39_a_process_with_a_foreign_tokenizer_ends_with_the_reason(tmp_path: Path) -> None:
    cased = json.loads(bert_tokenizer().to_str())
    cased["normalizer"]["lowercase"] = False
    edit(make_version(tmp_path), lambda _: None, tokenizer=json.dumps(cased).encode())
    with starting(model_store=tmp_path) as server:
        assert server.wait() == 1
        [failure] = server.events("start failed")
    assert "the tokenizer, the model" in failure["reason"]


async def test_r41_a_version_that_promises_more_than_its_positions_is_refused(tmp_path: Path) -> None:
    """The longest text is run before the first is served. The model of the repository has 512 positions."""
    newest = open_version(REPOSITORY, "sentiment").path
    copy = shutil.copytree(newest, tmp_path / "sentiment" / newest.name)
    edit(copy, lambda manifest: manifest.update(max_tokens=514))
    assert "the engine failed on 1 × 514 tokens" in await refusal(tmp_path)


# --- three more


async def test_labels_swapped_by_hand_are_refused(tmp_path: Path) -> None:
    """Names are not proven by the golden logits, but swapped columns are: weights and golden texts belong."""
    other = make_onnx(swapped_weights())
    edit(make_version(tmp_path), lambda _: None, model=other)
    assert "golden text 1: a logit is off" in await refusal(tmp_path)


def swapped_weights() -> Weights:
    weights = make_weights(bert_tokenizer(), 2)
    return Weights(weights.embedding, weights.kernel[:, ::-1].copy())


def test_names_of_any_characters_are_served_and_counted(tmp_path: Path) -> None:
    """Quotes, line ends, emoji: in the answer, and in the metrics as one series each."""
    labels = ['so "so"\\n\n', "\U0001f600 {x='1'}", "\u05d8\u05d5\u05d1"]
    make_version(tmp_path, labels=labels)
    with local_server(model_store=tmp_path) as server, server.client() as client:
        [one] = predict(client, "good").json()["predictions"]
        page = client.get("/metrics").text
    assert set(one["scores"]) == set(labels)
    [family] = [
        family for family in text_string_to_metric_families(page) if family.name == "valence_predictions"
    ]
    assert {sample.labels["label"]: sample.value for sample in family.samples} == {
        label: float(label == one["label"]) for label in labels
    }


def test_a_store_that_is_ruined_while_it_is_served_does_no_harm(tmp_path: Path) -> None:
    """Files cut short where they lie, then all removed: what is served is in memory, and the list says it."""
    folder = make_version(tmp_path)
    with local_server(model_store=tmp_path) as server, server.client() as client:
        before = predict(client, ["good", "bad film"]).json()
        for path in folder.iterdir():
            path.write_bytes(path.read_bytes()[:10])
        [listed] = client.get("/models").json()["models"]
        assert "not a JSON object" in listed["problem"]
        assert predict(client, ["good", "bad film"]).json() == before
        shutil.rmtree(tmp_path / "sentiment")
        assert client.get("/models").json() == {"models": []}
        assert predict(client, ["good", "bad film"]).json() == before
        assert client.get("/health/ready").status_code == 200


@pytest.mark.parametrize("file", ["manifest.json", "tokenizer.json", "model.onnx"])
async def test_a_link_to_itself_is_a_missing_file(tmp_path: Path, file: str) -> None:
    path = make_version(tmp_path) / file
    path.unlink()
    path.symlink_to(path)
    assert f"{file}: missing" in await refusal(tmp_path)
