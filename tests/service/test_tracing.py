"""Where a request stands in a trace: what its caller says, what is decided here, where the ids are told."""

import asyncio
import logging
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import httpx
import pytest
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Exemplar
from starlette.types import Message

from service import tracing
from service.app import create_app, life_of
from service.environment import SettingsError, read_settings
from service.errors import StartupError
from service.settings import Settings
from service.tracing import Spans, Stage, TraceIds, Tracer, caller_of, open_tracer
from tests.models import make_version
from tests.server import ROOT, SAFETY_S, LocalServer, environment, eventually, local_server, serving

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
UNSAMPLED = f"00-{TRACE}-{PARENT}-00"
DURATION = "valence_http_request_duration_seconds"
OPENMETRICS = {"accept": "application/openmetrics-text"}

MALFORMED = [
    "",
    "xyzzy",
    TRACE,
    f"00-{TRACE}-{PARENT}",
    f"00-{TRACE}-{PARENT}-",
    f"00-{TRACE}-{PARENT}-1",
    f"00-{TRACE}-{PARENT}-01-",
    f"00-{TRACE}-{PARENT}-01-what-the-future-will-be-like",
    f"ff-{TRACE}-{PARENT}-01",
    f"0-{TRACE}-{PARENT}-01",
    f"00-{TRACE.upper()}-{PARENT}-01",
    f"00-{TRACE[:-1]}-{PARENT}-01",
    f"00-{TRACE}0-{PARENT}-01",
    f"00-{'0' * 32}-{PARENT}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"00-{TRACE[:-1]}g-{PARENT}-01",
    f"00_{TRACE}_{PARENT}_01",
    f"01-{TRACE}-{PARENT}-01x",
    f"{SAMPLED},{SAMPLED}",
    f"{SAMPLED}\n",
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    make_version(folder)
    return folder


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[LocalServer]:
    with local_server(model_store=store) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LocalServer) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


class Kept:
    """Keeps what a tracer hands on."""

    def __init__(self) -> None:
        self.spans: list[Spans] = []

    def start(self) -> None:
        pass

    def put(self, spans: Spans) -> None:
        self.spans.append(spans)

    def close(self, timeout_s: float) -> None:
        pass


# --- traceparent


@pytest.mark.parametrize("flags", ["01", "03", "ff"])
def test_a_trace_that_the_caller_keeps(flags: str) -> None:
    assert caller_of([f"00-{TRACE}-{PARENT}-{flags}".encode()]) == TraceIds(TRACE, True, PARENT)


@pytest.mark.parametrize("flags", ["00", "02", "fe"])
def test_a_trace_that_the_caller_does_not_keep(flags: str) -> None:
    assert caller_of([f"00-{TRACE}-{PARENT}-{flags}".encode()]) == TraceIds(TRACE, False, PARENT)


@pytest.mark.parametrize("rest", ["", "-", "-what-the-future-will-be-like"])
def test_a_later_version_is_read_as_far_as_it_is_known(rest: str) -> None:
    assert caller_of([f" cc-{TRACE}-{PARENT}-01{rest}\t".encode()]) == TraceIds(TRACE, True, PARENT)


@pytest.mark.parametrize("value", MALFORMED)
def test_a_malformed_header_says_nothing(value: str) -> None:
    assert caller_of([value.encode()]) is None


def test_two_headers_say_nothing() -> None:
    assert caller_of([SAMPLED.encode()] * 2) is None


# --- the decision


def test_the_caller_decides_whatever_the_ratio() -> None:
    for ratio in (0.0, 1.0):
        tracer = Tracer(Kept(), ratio=ratio)
        for sampled in (False, True):
            caller = TraceIds(TRACE, sampled, PARENT)
            joined = tracer.begin(caller)
            assert joined == caller._replace(span_id=joined.span_id)
            assert re.fullmatch("[0-9a-f]{16}", joined.span_id or "")


@pytest.mark.parametrize("ratio", [0.0, 1e-6, 0.01, 0.5, 0.999, 1.0])
def test_the_ratio_decides_by_the_trace_id_as_the_library_does(ratio: float) -> None:
    """So that all services of one ratio keep the same traces."""
    random.seed(7)
    tracer, library = Tracer(Kept(), ratio=ratio), TraceIdRatioBased(ratio)
    begun = [tracer.begin(None) for _ in range(2000)]
    assert len({one.trace_id for one in begun}) == len({one.span_id for one in begun}) == 2000
    for one in begun:
        assert re.fullmatch("[0-9a-f]{32}", one.trace_id)
        theirs = library.should_sample(None, int(one.trace_id, 16), "").decision
        assert one.sampled == (theirs is Decision.RECORD_AND_SAMPLE)
    assert sum(one.sampled for one in begun) == pytest.approx(2000 * ratio, abs=120)


# --- what is kept


def test_a_stage_that_was_under_way_is_cut_by_the_end() -> None:
    spans = Spans(TraceIds(TRACE, True), 1.0)
    spans.begin("tokenize", 1.5)
    spans.end(2.0, then="queue")
    spans.finish(3.0, name="POST /predict", attributes={}, error="stopping", cut="stopping")
    assert spans.stages == [Stage("tokenize", 1.5, 2.0), Stage("queue", 2.0, 3.0, "stopping")]
    assert (spans.ended_s, spans.error) == (3.0, "stopping")


def test_an_end_without_a_stage_adds_none() -> None:
    spans = Spans(TraceIds(TRACE, True), 1.0)
    spans.end(2.0)
    spans.ran([], [])
    spans.finish(3.0, name="GET", attributes={}, error=None, cut="text_empty")
    assert spans.stages == []


# --- in the log


def fields(caplog: pytest.LogCaptureFixture) -> dict[str, object]:
    """The ids in the one line of the log, which is written when the answer is already there."""

    def lines() -> list[dict[str, object]]:
        return [one.__dict__["fields"] for one in caplog.records if one.getMessage() == "request"]

    eventually(lambda: bool(lines()), "the request is logged")
    [told] = lines()
    return {name: told.get(name) for name in ("trace_id", "span_id", "parent_span_id")}


@pytest.mark.parametrize("given", [SAMPLED, UNSAMPLED])
def test_the_log_names_the_callers_trace_with_tracing_off(
    client: httpx.Client, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    caplog.set_level(logging.INFO)
    answer = client.post("/predict", json={"inputs": "good"}, headers={"traceparent": given})
    assert answer.status_code == 200
    assert fields(caplog) == {"trace_id": TRACE, "span_id": None, "parent_span_id": PARENT}
    assert TRACE not in str(answer.headers)


@pytest.mark.parametrize("given", [[], [SAMPLED, SAMPLED], *([one] for one in MALFORMED if "\n" not in one)])
def test_a_malformed_header_is_nowhere_to_be_seen(
    client: httpx.Client, caplog: pytest.LogCaptureFixture, given: list[str]
) -> None:
    caplog.set_level(logging.INFO)
    headers = [("traceparent", one) for one in given]
    answer = client.post("/predict", json={"inputs": "good"}, headers=headers)
    assert answer.status_code == 200
    assert set(fields(caplog).values()) == {None}
    said = str([record.__dict__ for record in caplog.records]) + str(answer.headers) + answer.text
    assert not any(one in said for one in given if one)


# --- in the metrics


def exemplars(server: LocalServer) -> list[tuple[Exemplar, float]]:
    """The exemplars of the durations, each with the bound of its bucket."""
    with server.client() as client:
        page = client.get("/metrics", headers=OPENMETRICS).text
    families = text_string_to_metric_families(page)  # type: ignore[no-untyped-call]
    [family] = [one for one in families if one.name == DURATION]
    return [(one.exemplar, float(one.labels["le"])) for one in family.samples if one.exemplar is not None]


def test_a_kept_trace_is_the_exemplar_of_its_bucket(store: Path) -> None:
    with local_server(model_store=store) as server, server.client() as client:
        for given in (None, UNSAMPLED, MALFORMED[-3]):
            headers = {} if given is None else {"traceparent": given}
            assert client.post("/predict", json={"inputs": "good"}, headers=headers).status_code == 200
        assert exemplars(server) == [], "a trace that nobody keeps leads nowhere"
        client.post("/predict", json={"inputs": "good"}, headers={"traceparent": SAMPLED})
        [(one, bound)] = exemplars(server)
        assert one.labels == {"trace_id": TRACE}
        assert 0 < one.value <= bound
        assert TRACE not in client.get("/metrics").text, "the old format has none"


def test_the_last_trace_of_a_bucket_is_its_exemplar(store: Path) -> None:
    with local_server(model_store=store) as server, server.client() as client:
        for number in range(1, 30):
            given = f"00-{number:032x}-{PARENT}-01"
            client.post("/predict", json={"inputs": "good"}, headers={"traceparent": given})
        found = exemplars(server)
        assert len({bound for _, bound in found}) == len(found)
        assert f"{29:032x}" in {one.labels["trace_id"] for one, _ in found}


# --- off, and asked for in vain


def test_without_an_endpoint_there_is_no_tracer_and_no_library() -> None:
    assert open_tracer(Settings(), version="1") is None
    code = (
        "import sys, service.server; from service.app import create_app; "
        "from service.settings import Settings; create_app(Settings()); print(*sys.modules)"
    )
    loaded = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=environment(), text=True)
    assert "service.tracing" in loaded.split()
    assert {
        name for name in loaded.split() if name.startswith(("opentelemetry.sdk", "service.otlp"))
    } == set()


def test_off_a_request_calls_no_function_of_tracing(store: Path) -> None:
    """Which is what makes it free: all that is left are comparisons with None."""

    async def calls(settings: Settings, *headers: tuple[bytes, bytes]) -> set[str]:
        app = create_app(settings)
        names: set[str] = set()

        async def receive() -> Message:
            return {"type": "http.request", "body": b'{"inputs": "good"}', "more_body": False}

        async def send(message: Message) -> None:
            assert message.get("status", 200) == 200

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename == tracing.__file__:
                names.add(frame.f_code.co_name)

        scope = {"type": "http", "method": "POST", "path": "/predict", "state": {}}
        threading.setprofile(note)  # for the lanes
        async with life_of(app).run():
            assert await life_of(app).started is None
            sys.setprofile(note)
            await app(scope | {"headers": [(b"content-type", b"application/json"), *headers]}, receive, send)
            sys.setprofile(None)
        threading.setprofile(None)
        return names

    off = Settings(model_store=store, device="cpu")
    assert asyncio.run(calls(off)) == set()
    assert asyncio.run(calls(off, (b"traceparent", SAMPLED.encode()))) == {"caller_of"}


def test_an_endpoint_without_the_extra_is_told_at_the_start(store: Path) -> None:
    code = (
        "import sys; sys.modules['opentelemetry.exporter'] = None; "
        "from service.cli import main; sys.exit(main(['serve']))"
    )
    settings = environment(model_store=store, port=0, otlp_endpoint="http://127.0.0.1:9")
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=SAFETY_S,
    )
    assert ran.returncode == 1
    *_, last = ran.stderr.splitlines()
    assert re.fullmatch(
        r"valence: VALENCE_OTLP_ENDPOINT needs opentelemetry[.\w]*: install the extra tracing", last
    )


def test_an_endpoint_with_a_password_is_refused_and_not_quoted() -> None:
    for endpoint in ("http://user:xyzzy@collector:4318", "http://user:xy/zzy@collector:4318"):
        with pytest.raises(StartupError, match="no user, no password") as caught:
            open_tracer(Settings(otlp_endpoint=endpoint), version="1")
        assert "zzy" not in str(caught.value)


def test_what_the_library_refuses_is_told_by_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("xyzzy")

    monkeypatch.setattr("requests.Session.__init__", fail)
    with pytest.raises(StartupError, match=r"\(ValueError\)") as caught:
        open_tracer(Settings(otlp_endpoint="http://collector:4318"), version="1")
    assert "xyzzy" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector:4317", "http://", "http:///v1"])
def test_an_endpoint_that_is_no_url_is_refused(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("VALENCE_OTLP_ENDPOINT", endpoint)
    with pytest.raises(SettingsError, match="VALENCE_OTLP_ENDPOINT"):
        read_settings()


def test_the_command_line_predicts_with_an_endpoint_set(store: Path) -> None:
    """Only the server traces."""
    settings = environment(model_store=store, otlp_endpoint="http://127.0.0.1:9")
    ran = subprocess.run(
        [sys.executable, "-m", "service", "predict", "good"],
        cwd=ROOT,
        env=settings,
        capture_output=True,
        text=True,
        check=True,
        timeout=SAFETY_S,
    )
    assert '"label":"positive"' in ran.stdout


def test_the_server_process_ends_at_once_with_a_dead_collector(store: Path) -> None:
    with serving(model_store=store, otlp_endpoint="http://127.0.0.1:9") as server:
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            assert client.post("/predict", json={"inputs": "good"}).status_code == 200
        server.process.terminate()
        assert server.wait() == 0
        assert [line["lost_requests"] for line in server.events("traces are not sent")] == [1]
