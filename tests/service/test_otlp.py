"""Spans as a collector gets them over HTTP, from a real server; and one that does not take them."""

import logging
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from service import otlp
from service.otlp import OtlpSender, open_sender
from service.tracing import Spans, TraceIds
from tests.collector import Collector, Told, collecting
from tests.models import make_version
from tests.reliability.gates import hold, predict
from tests.server import SAFETY_S, eventually, local_server
from tests.service.stand_ins import Opener

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
MARKER = "xyzzy"
KEY = "k" * 32
WHOLE = "POST /predict"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    make_version(folder)
    return folder


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def stages_of(collector: Collector, whole: Told) -> dict[str, Told]:
    """The spans below the span of a request, by name."""
    return {one.name: one for one in collector.spans if one.parent_id == whole.span_id}


# --- what is sent


def test_a_request_and_its_stages(store: Path, collector: Collector) -> None:
    with (
        local_server(model_store=store, otlp_endpoint=collector.url + "/") as server,
        server.client() as client,
    ):
        answer = client.post(
            "/predict", json={"inputs": ["good", f"bad {MARKER}"]}, headers={"x-request-id": "mine"}
        )
        assert answer.status_code == 200
    [whole] = collector.named(WHOLE)
    assert whole.span.kind == Span.SPAN_KIND_SERVER
    assert (whole.parent_id, whole.failed) == ("", False)
    assert whole.attributes == {
        "http.request.method": "POST",
        "http.route": "/predict",
        "http.response.status_code": 200,
        "valence.request_id": "mine",
        "valence.texts": 2,
        "valence.tokens": sum(one["tokens"] for one in answer.json()["predictions"]),
        "valence.model.version": "1",
    }
    stages = stages_of(collector, whole)
    assert list(stages) == ["tokenize", "queue", "infer"]
    assert {one.trace_id for one in stages.values()} == {whole.trace_id}
    begin_ns, end_ns = whole.times_ns
    moments = [begin_ns, *(moment for one in stages.values() for moment in one.times_ns), end_ns]
    assert moments == sorted(moments)
    assert stages["tokenize"].times_ns[1] == stages["queue"].times_ns[0]
    assert stages["queue"].times_ns[1] == stages["infer"].times_ns[0]
    assert collector.paths == {"/v1/traces"}
    assert MARKER not in str(collector.spans)
    assert (
        collector.resource.items() >= {"service.name": "valence", "telemetry.sdk.language": "python"}.items()
    )


def test_the_stages_are_those_that_the_answer_tells(store: Path, collector: Collector) -> None:
    with local_server(model_store=store, otlp_endpoint=collector.url) as server, server.client() as client:
        said = predict(client).headers["server-timing"]
    [whole] = collector.named(WHOLE)
    told_ms = {part.partition(";")[0]: float(part.rpartition("=")[2]) for part in said.split(", ")}
    stages = stages_of(collector, whole)
    took_ms = {name: (one.times_ns[1] - one.times_ns[0]) / 1e6 for name, one in stages.items()}
    assert list(took_ms) == list(told_ms)
    assert took_ms["tokenize"] == pytest.approx(told_ms["tokenize"], abs=0.002)
    assert took_ms["infer"] >= told_ms["infer"] - 0.002


def test_the_callers_trace_is_joined(
    store: Path, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with local_server(model_store=store, otlp_endpoint=collector.url) as server, server.client() as client:
        assert client.post("/predict", json={"inputs": "good"}, headers=SAMPLED).status_code == 200
    [whole] = collector.named(WHOLE)
    assert (whole.trace_id, whole.parent_id) == (TRACE, PARENT)
    [line] = [record.__dict__["fields"] for record in caplog.records if record.getMessage() == "request"]
    assert (line["trace_id"], line["span_id"], line["parent_span_id"]) == (TRACE, whole.span_id, PARENT)


def test_of_an_unsampled_trace_nothing_is_sent(
    store: Path, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever has decided: the caller, or the ratio. What the caller keeps is kept whatever the ratio."""
    caplog.set_level(logging.INFO)
    with (
        local_server(model_store=store, otlp_endpoint=collector.url, trace_ratio=0.0) as server,
        server.client() as client,
    ):
        for headers in (UNSAMPLED, {}, SAMPLED):
            assert client.post("/predict", json={"inputs": "good"}, headers=headers).status_code == 200
    assert [one.trace_id for one in collector.named(WHOLE)] == [TRACE]
    assert len(collector.named("batch")) == 1
    lines = [record.__dict__["fields"] for record in caplog.records if record.getMessage() == "request"]
    assert len({line["span_id"] for line in lines}) == 3, "the log tells the ids of each"


def test_probes_and_scrapes_are_not_traced(store: Path, collector: Collector) -> None:
    with local_server(model_store=store, otlp_endpoint=collector.url) as server, server.client() as client:
        for path in ("/health", "/health/live", "/health/ready", "/metrics", "/models", "/" + MARKER):
            client.get(path, headers=SAMPLED)
    assert [one.name for one in collector.spans] == ["GET /models", "GET"]
    assert collector.spans[1].attributes.items() >= {"http.response.status_code": 404}.items()
    assert MARKER not in str(collector.spans)


# --- batches


def test_requests_of_one_batch_link_to_it(
    store: Path, collector: Collector, pool: ThreadPoolExecutor
) -> None:
    opener = Opener()
    with (
        local_server(
            open_engine=opener, model_store=store, otlp_endpoint=collector.url, lanes=1, max_padding_tokens=64
        ) as server,
        server.client() as client,
    ):
        first = hold(opener, client, pool, "good")
        others = [pool.submit(predict, client, text) for text in ("bad film", "a good film", "bad film")]
        eventually(lambda: server.life.unready_reason() is None and waiting(client) == 3, "all wait")
        opener.engine.gate.set()
        for one in (first, *others):
            assert one.result(SAFETY_S).status_code == 200
    assert len(collector.named(WHOLE)) == 4
    alone, shared = collector.named("batch")
    linked = [link for one in collector.named("infer") for link in one.links]
    assert sorted(linked) == sorted(
        [(alone.trace_id, alone.span_id), *[(shared.trace_id, shared.span_id)] * 3]
    )
    assert shared.parent_id == ""
    assert shared.trace_id not in {one.trace_id for one in collector.named(WHOLE)}
    assert shared.attributes == {
        "valence.batch.texts": 3,
        "valence.batch.items": 2,  # two have the same tokens
        "valence.batch.tokens": 4 + 5,
        "valence.batch.padded_tokens": 2 * 5,
        "valence.batch.lane": "lane-0",
    }
    for infer in collector.named("infer"):
        of = alone if infer.links == [(alone.trace_id, alone.span_id)] else shared
        assert infer.times_ns[0] <= of.times_ns[0] < of.times_ns[1] <= infer.times_ns[1]


def waiting(client: httpx.Client) -> float:
    """Texts that wait for a lane."""
    page = client.get("/metrics").text
    [line] = [line for line in page.splitlines() if line.startswith("valence_queue_items ")]
    return float(line.split()[1])


def test_a_request_in_several_batches_links_to_each(store: Path, collector: Collector) -> None:
    with (
        local_server(model_store=store, otlp_endpoint=collector.url, max_batch_items=2, lanes=1) as server,
        server.client() as client,
    ):
        assert predict(client, ["good", "bad", "good film", "bad film", "great"]).status_code == 200
    [infer] = collector.named("infer")
    batches = collector.named("batch")
    assert len(batches) == 3
    assert infer.links == [(one.trace_id, one.span_id) for one in batches]
    assert infer.times_ns[0] <= min(one.times_ns[0] for one in batches)
    assert infer.times_ns[1] >= max(one.times_ns[1] for one in batches)


def test_a_remembered_text_has_no_stages(store: Path, collector: Collector) -> None:
    with (
        local_server(model_store=store, otlp_endpoint=collector.url, cache_items=10) as server,
        server.client() as client,
    ):
        assert predict(client).json() == predict(client).json()
    ran, remembered = collector.named(WHOLE)
    assert list(stages_of(collector, ran)) == ["tokenize", "queue", "infer"]
    assert stages_of(collector, remembered) == {}


# --- errors


def test_a_refusal_is_no_error_of_the_span(store: Path, collector: Collector) -> None:
    with local_server(model_store=store, otlp_endpoint=collector.url) as server, server.client() as client:
        assert predict(client, "").status_code == 422
        assert client.get("/predict").status_code == 405
    refused, wrong = collector.named(WHOLE) + collector.named("GET /predict")
    assert list(stages_of(collector, refused)) == ["tokenize"]
    assert (refused.failed, refused.attributes["valence.code"]) == (False, "text_empty")
    assert (wrong.failed, wrong.attributes["valence.code"]) == (False, "method_not_allowed")


def test_an_engine_that_fails_is_seen(store: Path, collector: Collector) -> None:
    opener = Opener()
    with (
        local_server(open_engine=opener, model_store=store, otlp_endpoint=collector.url) as server,
        server.client() as client,
    ):

        def fail(_: object) -> None:
            raise RuntimeError(MARKER)

        opener.engine.fault = fail
        assert predict(client).status_code == 500
    [whole] = collector.named(WHOLE)
    infer = stages_of(collector, whole)["infer"]
    assert whole.failed
    assert infer.failed
    assert whole.attributes["error.type"] == infer.attributes["error.type"] == "engine_failed"
    assert infer.links == []
    assert MARKER not in str(collector.spans)


def test_a_stranger_has_nothing_kept(store: Path, collector: Collector) -> None:
    """The share of strangers' own requests is kept as ever: it is not they who decide on it."""
    with (
        local_server(model_store=store, otlp_endpoint=collector.url, api_keys=KEY) as server,
        server.client() as client,
    ):
        for headers in (SAMPLED, {}, SAMPLED | {"authorization": f"Bearer {KEY}"}):
            client.post("/predict", json={"inputs": "good"}, headers=headers)
    told = [(one.attributes["http.response.status_code"], one.parent_id) for one in collector.named(WHOLE)]
    assert told == [(401, ""), (200, PARENT)]


def test_a_deadline_in_the_queue_is_seen(store: Path, collector: Collector, pool: ThreadPoolExecutor) -> None:
    opener = Opener()
    with (
        local_server(open_engine=opener, model_store=store, otlp_endpoint=collector.url, lanes=1) as server,
        server.client() as client,
    ):
        held = hold(opener, client, pool, "good")
        late = client.post(
            "/predict", json={"inputs": "bad"}, headers={**SAMPLED, "x-request-timeout": "0.05"}
        )
        assert late.status_code == 504
        opener.engine.gate.set()
        assert held.result(SAFETY_S).status_code == 200
    [whole] = [one for one in collector.named(WHOLE) if one.trace_id == TRACE]
    stages = stages_of(collector, whole)
    assert list(stages) == ["tokenize", "queue"]
    assert stages["queue"].failed
    assert stages["queue"].attributes == {"error.type": "deadline_exceeded"}
    assert (whole.failed, whole.attributes["error.type"]) == (True, "deadline_exceeded")


# --- the sender and its collector


def some(number: int) -> Spans:
    """What is kept of a request."""
    spans = Spans(TraceIds(f"{number:032x}", True, None, f"{number:016x}"), 1.0)
    spans.finish(2.0, name=f"request {number}", attributes={}, error=None, cut="")
    return spans


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "service.otlp"]


def test_spans_come_while_the_server_goes_on(store: Path, collector: Collector) -> None:
    with local_server(model_store=store, otlp_endpoint=collector.url) as server, server.client() as client:
        predict(client)
        collector.wait_for(lambda: len(collector.spans) == 5)
        predict(client)
        collector.wait_for(lambda: len(collector.spans) == 10)


def test_the_standard_variables_hold(monkeypatch: pytest.MonkeyPatch, collector: Collector) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=ours")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "moods")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    sender = open_sender(collector.url, "1.2.3")
    sender.start()
    sender.put(some(1))
    sender.close(SAFETY_S)
    assert [one.name for one in collector.spans] == ["request 1"]
    assert collector.headers[0]["x-tenant"] == "ours"
    assert collector.resource["service.name"] == "moods"
    assert collector.resource["service.version"] == "1.2.3"
    assert collector.resource["deployment.environment.name"] == "test"


def test_a_dead_collector_harms_nobody_and_is_told_once(
    store: Path, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 400  # which is not tried again
    caplog.set_level(logging.INFO)
    with local_server(model_store=store, otlp_endpoint=collector.url) as server, server.client() as client:
        for asked in (1, 2, 3):
            assert predict(client).status_code == 200
            collector.wait_for(lambda asked=asked: collector.asked >= asked)  # type: ignore[misc]
        told = [record.__dict__["fields"] for record in caplog.records if record.name == "service.otlp"]
        assert [one["lost_requests"] for one in told] == [1]
        assert "400" in told[0]["reason"]
    assert said(caplog) == ["traces are not sent", "traces lost"]
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")] == []


def test_a_collector_that_comes_back_is_told(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sender = open_sender(collector.url, "1", quiet_s=0.0)
    sender.start()
    collector.status = 400
    sender.put(some(1))
    eventually(lambda: said(caplog) == ["traces are not sent"], "the trouble is told")
    collector.status = 200
    sender.put(some(2))
    eventually(lambda: len(said(caplog)) == 2, "its end is told")
    sender.close(SAFETY_S)
    assert said(caplog) == ["traces are not sent", "traces are sent again"]
    assert [one.name for one in collector.spans] == ["request 2"]


def test_what_is_too_much_is_lost_and_counted(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sender = open_sender(collector.url, "1", most_waiting=3)
    sender.start()
    collector.gate.clear()
    sender.put(some(1))
    collector.wait_for(lambda: collector.asked == 1)
    for number in range(2, 10):
        sender.put(some(number))
    collector.gate.set()
    collector.wait_for(lambda: len(collector.spans) == 4)
    sender.close(SAFETY_S)
    assert [one.name for one in collector.spans] == [f"request {number}" for number in (1, 2, 3, 4)]
    told = [record.__dict__["fields"] for record in caplog.records if record.name == "service.otlp"]
    assert told == [{"reason": "more than can be sent", "lost_requests": 1}, {"requests": 5}]


def test_too_much_is_told_while_the_collector_does_not_answer(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    sender = open_sender(collector.url, "1", most_waiting=1)
    sender.start()
    collector.gate.clear()
    sender.put(some(1))
    collector.wait_for(lambda: collector.asked == 1)
    for number in range(2, 10):
        sender.put(some(number))
    assert said(caplog) == ["traces are not sent"]
    collector.gate.set()
    sender.close(SAFETY_S)


@pytest.mark.parametrize("status", [301, 302, 304, 307, 308])
def test_a_redirect_is_no_success(
    collector: Collector, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    collector.status = status
    reason = reason_of(collector, caplog)
    assert f"answered {status}" in reason
    assert collector.asked == 1


def test_a_long_reason_is_cut(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    collector.status, collector.reason = 400, "because " * 1000
    reason = reason_of(collector, caplog)
    assert "because" in reason
    assert len(reason) == 200


@pytest.mark.parametrize("header", [f"a: Bearer {MARKER}", f"a={MARKER}%0a{MARKER}"])
def test_a_malformed_header_variable_is_not_quoted(
    monkeypatch: pytest.MonkeyPatch, collector: Collector, caplog: pytest.LogCaptureFixture, header: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", header)
    sender = open_sender(collector.url, "1")
    sender.start()
    sender.put(some(1))
    sender.close(SAFETY_S)
    assert MARKER not in caplog.text + str([record.__dict__ for record in caplog.records])


def reason_of(collector: Collector, caplog: pytest.LogCaptureFixture) -> str:
    """What the log says when one request was not sent."""
    sender = open_sender(collector.url, "1")
    sender.start()
    sender.put(some(1))
    sender.close(SAFETY_S)
    [told] = [record.__dict__["fields"] for record in caplog.records if record.name == "service.otlp"]
    assert told["lost_requests"] == 1
    reason: str = told["reason"]
    return reason


def test_no_wake_up_is_lost(collector: Collector) -> None:
    """The loop is held up in the middle of a `put`, until the thread has sent the rest and sleeps."""
    sender = open_sender(collector.url, "1")
    sender.start()

    def sleeps() -> bool:
        [thread] = [one.ident for one in threading.enumerate() if one.name == "otlp"]
        frame: FrameType | None = sys._current_frames()[thread or 0]  # noqa: SLF001 - documented
        files = []
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        return files[0] == threading.__file__ and set(files) == {threading.__file__, otlp.__file__}

    def hold_up(frame: FrameType, event: str, function: object) -> None:
        if (event, function, frame.f_code) == ("c_return", len, OtlpSender.put.__code__):
            sys.setprofile(None)
            collector.wait_for(lambda: len(collector.spans) == 1)
            eventually(sleeps, "the thread sleeps")

    sender.put(some(1))
    sys.setprofile(hold_up)
    sender.put(some(2))
    collector.wait_for(lambda: len(collector.spans) == 2)
    sender.close(SAFETY_S)


def test_many_are_sent_in_several_requests(collector: Collector) -> None:
    sender = open_sender(collector.url, "1")
    for number in range(1, 201):
        sender.put(some(number))
    sender.start()
    sender.close(SAFETY_S)
    assert [one.name for one in collector.spans] == [f"request {number}" for number in range(1, 201)]
    assert collector.asked > 1


def test_the_end_waits_no_longer_than_it_may(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    sender = open_sender(collector.url, "1")
    sender.start()
    collector.gate.clear()
    sender.put(some(1))
    collector.wait_for(lambda: collector.asked == 1)
    sender.put(some(2))
    sender.close(0.01)
    assert not collector.gate.is_set(), "the collector has not answered yet"
    assert said(caplog) == ["traces lost"]
    sender.put(some(3))
    collector.gate.set()
    sender.close(SAFETY_S)  # else its ear stays at the library, before that of the next test


@pytest.mark.parametrize("level", [logging.NOTSET, logging.ERROR])
def test_a_collector_that_is_tried_again_does_not_hold_the_end(
    collector: Collector, caplog: pytest.LogCaptureFixture, level: int
) -> None:
    """503 is tried again after a second and more; the end cuts that short, whatever the log tells."""
    caplog.set_level(level, logger="opentelemetry")
    caplog.handler.setLevel(logging.NOTSET)  # what is ours is still to be seen
    collector.status = 503
    sender = open_sender(collector.url, "1")
    sender.start()
    sender.put(some(1))
    collector.wait_for(lambda: collector.asked == 1)
    sender.close(SAFETY_S)
    assert "otlp" not in {thread.name for thread in threading.enumerate()}
    assert collector.asked == 1
    assert said(caplog)
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")] == []


def test_a_sender_that_was_never_started_closes() -> None:
    sender: OtlpSender = open_sender("http://127.0.0.1:9", "1")
    sender.close(0.0)
