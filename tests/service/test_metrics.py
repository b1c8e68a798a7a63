"""What is counted, how it is named, and that every series stands at 0 before anything happens."""

import threading
from collections.abc import Callable

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from service.catalogue import CATALOGUE, ROUTE_STATUSES, STAGES, TIMED_ROUTES
from service.errors import ServiceError, TextRefused, with_code
from service.load import Load
from service.metrics import Metrics
from service.quota import Throttling

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def shown(metrics: Metrics) -> Series:
    """Every series of our own on the page."""
    text = metrics.render()[0].decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse_text(text)
        for sample in family.samples
        if sample.name.startswith("valence_")
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return shown(metrics)[name, frozenset(labels.items())]


@pytest.fixture
def metrics() -> Metrics:
    made = Metrics()
    made.describe(
        model="sentiment",
        version="1",
        labels=["negative", "positive"],
        engine="onnx",
        precision="int8",
        device="cpu",
    )
    return made


def test_every_series_stands_at_0_from_the_start(metrics: Metrics) -> None:
    before = shown(metrics)
    moving = {
        series: number for series, number in before.items() if not series[0].endswith("_info") and number != 0
    }
    assert moving == {}
    for route, statuses in ROUTE_STATUSES.items():
        for status in statuses:
            metrics.request_started(route)
            metrics.request_finished(route=route, status=status, duration_s=0.01)
    for error in with_code(ServiceError):
        metrics.refused(error.code)
    for error in with_code(TextRefused):
        metrics.text_failed(error.code)
    metrics.text_failed("engine_failed")
    for stage in STAGES:
        metrics.stage(stage, 0.001)
    for label in ("negative", "positive"):
        metrics.predicted(label, 0.9)
    metrics.text_read(tokens=7, truncated=True, unknown=1)
    metrics.batch_ran(items=2, tokens=14, padded_tokens=16, duration_s=0.01, twins=1)
    metrics.cache_used(hits=1, misses=1, shared=1)
    metrics.loop_lag(0.001)
    metrics.watch_limits(lambda: Throttling(9, 4, 0.5), memory_limit_bytes=1)
    after = shown(metrics)
    assert set(after) == set(before), "a series that appears late loses its first event to rate()"
    assert all(after[series] > 0 for series in after if series[0].endswith("_total")), (
        "each of them can really be counted"
    )


def test_catalogue_and_page_name_the_same(metrics: Metrics) -> None:
    families = {family.name: family for family in parse_text(metrics.render()[0].decode())}
    for one in CATALOGUE:
        family = families.pop(one.name.removesuffix("_total"))
        assert family.type == one.type
        assert family.documentation == one.help
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels == set(one.labels), one.name
    assert [name for name in families if name.startswith("valence_")] == []
    assert {"process_cpu_seconds", "process_resident_memory_bytes", "python_gc_collections"} <= set(families)


def test_no_series_of_creation_times(metrics: Metrics) -> None:
    for accept in (None, "application/openmetrics-text"):
        assert b"_created" not in metrics.render(accept)[0]


@pytest.mark.parametrize("deadline_s", [0.3, 10.0])
def test_last_finite_bucket_is_the_deadline(deadline_s: float) -> None:
    series = shown(Metrics(deadline_s=deadline_s))
    for name in ("valence_http_request_duration_seconds", "valence_stage_duration_seconds"):
        bounds = {float(dict(labels)["le"]) for metric, labels in series if metric == f"{name}_bucket"} - {
            float("inf")
        }
        assert max(bounds) == deadline_s
        assert min(bounds) <= 0.001


def test_a_request_is_in_flight_until_it_is_finished(metrics: Metrics) -> None:
    metrics.request_started("/predict")
    metrics.request_started("/predict")
    assert value(metrics, "valence_http_requests_in_flight", route="/predict") == 2
    metrics.request_finished(route="/predict", status=200, duration_s=0.02)
    metrics.request_finished(route="/predict", status=499, duration_s=0.02)
    assert value(metrics, "valence_http_requests_in_flight", route="/predict") == 0
    assert value(metrics, "valence_http_requests_total", route="/predict", status="499") == 1
    name = "valence_http_request_duration_seconds_count"
    assert value(metrics, name, route="/predict", status_class="2xx") == 1
    assert value(metrics, name, route="/predict", status_class="4xx") == 1


def test_a_status_that_was_not_foreseen_is_counted_all_the_same(metrics: Metrics) -> None:
    for route in ("/predict", "other"):
        metrics.request_started(route)
        metrics.request_finished(route=route, status=418, duration_s=0.02)
        assert value(metrics, "valence_http_requests_total", route=route, status="418") == 1


def test_durations_are_kept_of_the_timed_routes_alone(metrics: Metrics) -> None:
    series = shown(metrics)
    name = "valence_http_request_duration_seconds_count"
    assert {dict(labels)["route"] for metric, labels in series if metric == name} == set(TIMED_ROUTES)


def test_a_batch_counts_real_tokens_and_padding_apart(metrics: Metrics) -> None:
    metrics.batch_ran(items=3, tokens=20, padded_tokens=27, duration_s=0.5)
    metrics.batch_ran(items=1, tokens=9, padded_tokens=9, duration_s=0.25)
    assert value(metrics, "valence_tokens_total", kind="real") == 29
    assert value(metrics, "valence_tokens_total", kind="padding") == 7
    assert value(metrics, "valence_lane_busy_seconds_total") == 0.75
    assert value(metrics, "valence_batch_items_sum") == 4
    assert value(metrics, "valence_batch_tokens_count") == 2


class Interrupted(int):
    """A number that lets a thread run in the middle of an addition, which is never one step."""

    meanwhile: Callable[[], None]
    threads: list[threading.Thread]

    def __radd__(self, other: int) -> int:
        thread = threading.Thread(target=self.meanwhile)
        thread.start()
        # One that has to wait for our lock is still there afterwards: the time runs out when all is well.
        thread.join(0.05)
        self.threads.append(thread)
        return int(self) + other


def test_lanes_count_at_once_and_a_scrape_sees_no_half_of_a_batch(metrics: Metrics) -> None:
    pages: list[Series] = []

    def meanwhile() -> None:
        pages.append(shown(metrics))
        metrics.batch_ran(items=2, tokens=20, padded_tokens=26, duration_s=0.5)

    tokens = Interrupted(20)
    tokens.meanwhile, tokens.threads = meanwhile, []
    metrics.batch_ran(items=2, tokens=tokens, padded_tokens=26, duration_s=0.5)
    for thread in tokens.threads:
        thread.join()
    pages.append(shown(metrics))
    assert len(pages) == 3, "one in the sum of the histogram, one in the counter, one at the end"
    assert value(metrics, "valence_batch_tokens_count") == 3
    assert value(metrics, "valence_tokens_total", kind="real") == 60
    assert value(metrics, "valence_tokens_total", kind="padding") == 18
    assert value(metrics, "valence_lane_busy_seconds_total") == 1.5
    for page in pages:
        count = page["valence_batch_tokens_count", frozenset()]
        assert page["valence_batch_tokens_bucket", frozenset({("le", "+Inf")})] == count
        assert page["valence_batch_tokens_sum", frozenset()] == 20 * count


def test_queue_and_lanes_are_looked_at_when_asked(metrics: Metrics) -> None:
    load = Load(
        queued_items=3,
        queued_tokens=40,
        oldest_age_s=1.5,
        busy_lanes=2,
        longest_run_s=0.5,
        running_items=5,
        dead=False,
    )
    ready = True
    metrics.watch(lambda: load, max_queue_items=1024, max_queue_tokens=4096)
    metrics.watch_ready(lambda: ready)
    metrics.size(lanes=2, threads_per_lane=1, cpu_quota_cores=1.5)
    expected = {
        "valence_queue_items": 3,
        "valence_queue_tokens": 40,
        "valence_queue_oldest_age_seconds": 1.5,
        "valence_queue_capacity_items": 1024,
        "valence_queue_capacity_tokens": 4096,
        "valence_lanes": 2,
        "valence_lanes_busy": 2,
        "valence_threads_per_lane": 1,
        "valence_cpu_quota_cores": 1.5,
        "valence_batch_longest_run_seconds": 0.5,
        "valence_ready": 1,
    }
    assert {name: value(metrics, name) for name in expected} == expected
    ready = False
    assert value(metrics, "valence_ready") == 0


def test_the_limits_are_looked_at_when_asked(metrics: Metrics) -> None:
    now = Throttling(periods=100, throttled_periods=25, throttled_s=1.5)
    metrics.watch_limits(lambda: now, memory_limit_bytes=2**30)
    assert value(metrics, "valence_memory_limit_bytes") == 2**30
    assert value(metrics, "valence_cpu_periods_total") == 100
    assert value(metrics, "valence_cpu_throttled_periods_total") == 25
    assert value(metrics, "valence_cpu_throttled_seconds_total") == 1.5
    now = Throttling(periods=101, throttled_periods=26, throttled_s=2)
    assert value(metrics, "valence_cpu_periods_total") == 101


def test_the_bound_of_the_latency_slo_is_a_bucket(metrics: Metrics) -> None:
    metrics.request_started("/predict")
    metrics.request_finished(route="/predict", status=200, duration_s=0.25)
    name = "valence_http_request_duration_seconds_bucket"
    assert value(metrics, name, route="/predict", status_class="2xx", le="0.25") == 1
    assert value(metrics, name, route="/predict", status_class="2xx", le="0.2") == 0


def test_one_model_is_served_at_a_time(metrics: Metrics) -> None:
    told = {"model": "sentiment", "version": "1", "engine": "onnx", "precision": "int8", "device": "cpu"}
    assert value(metrics, "valence_model_info", **told) == 1


def test_two_metrics_share_nothing() -> None:
    first, second = Metrics(), Metrics()
    first.refused("queue_full")
    assert value(second, "valence_refusals_total", reason="queue_full") == 0
    assert value(first, "valence_refusals_total", reason="queue_full") == 1


def test_openmetrics_when_asked_for(metrics: Metrics) -> None:
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
    body, content_type = metrics.render(accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")
    names = {family.name for family in parse_openmetrics(body.decode())}  # type: ignore[no-untyped-call]
    assert {"valence_http_requests", "valence_stage_duration_seconds"} <= names


@pytest.mark.parametrize("accept", [None, "", "*/*", "text/plain;version=abc", "text/html,;;q=,\x00", "😀"])
def test_plain_text_for_everybody_else(metrics: Metrics, accept: str | None) -> None:
    body, content_type = metrics.render(accept)
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert body.startswith(b"# HELP valence_")


@pytest.mark.parametrize("version", ["abc", "", "99.0.0", ";;;"])
def test_a_strange_version_does_no_harm(metrics: Metrics, version: str) -> None:
    body, _ = metrics.render(f"application/openmetrics-text; version={version}")
    assert body.endswith(b"# EOF\n")
