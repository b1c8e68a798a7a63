"""Counts what happens, by plain methods, and renders it; the names stand in `catalogue`.

Knows nothing of requests, batches or models: callers pass numbers and words. Methods may be called from any
thread. Nothing is global: each `Metrics` has a registry of its own.
"""

import platform
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from service.batcher import Load
from service.catalogue import CATALOGUE, ROUTE_STATUSES, STAGES, TIMED_ROUTES, MetricDescription
from service.errors import ServiceError, TextRefused


class Metrics:
    """All metrics of one service.

    Args:
        registry: where they live; a new one when None.
        deadline_s: the deadline of a request, in seconds.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, deadline_s: float = 10.0) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._metrics = {one.name: _make(one, self.registry, deadline_s) for one in CATALOGUE}
        self._load: Callable[[], Load] | None = None
        self._is_ready: Callable[[], bool] | None = None
        self._bind_http()
        self._bind_work()
        self._gauge("valence_build_info").labels(service_version(), platform.python_version()).set(1)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def _counter(self, name: str) -> Counter:
        metric = self._metrics[name]
        assert isinstance(metric, Counter)  # noqa: S101 - narrows a type; the table decides it
        return metric

    def _gauge(self, name: str) -> Gauge:
        metric = self._metrics[name]
        assert isinstance(metric, Gauge)  # noqa: S101
        return metric

    def _histogram(self, name: str) -> Histogram:
        metric = self._metrics[name]
        assert isinstance(metric, Histogram)  # noqa: S101
        return metric

    # Children are looked up once: a series must stand at 0 from the start, or rate() misses its first
    # event, and a lookup by label costs more than the count itself.

    def _bind_http(self) -> None:
        in_flight = self._gauge("valence_http_requests_in_flight")
        self._in_flight = {route: in_flight.labels(route) for route in ROUTE_STATUSES}
        self._requests: dict[tuple[str, int], Counter] = {}
        self._durations: dict[tuple[str, int], Histogram] = {}
        for route, statuses in ROUTE_STATUSES.items():
            for status in statuses:
                self._bind_answer(route, status)
        refusals = self._counter("valence_refusals_total")
        self._refusals = {code: refusals.labels(code) for code in _error_codes(ServiceError)}

    def _bind_answer(self, route: str, status: int) -> None:
        self._requests[route, status] = self._counter("valence_http_requests_total").labels(
            route, str(status)
        )
        if route in TIMED_ROUTES:
            durations = self._histogram("valence_http_request_duration_seconds")
            self._durations[route, status] = durations.labels(route, f"{status // 100}xx")

    def _bind_work(self) -> None:
        stage = self._histogram("valence_stage_duration_seconds")
        self._stages = {name: stage.labels(name) for name in STAGES}
        errors = self._counter("valence_text_errors_total")
        self._text_errors = {
            code: errors.labels(code) for code in (*_error_codes(TextRefused), "engine_failed")
        }
        self._text_tokens = self._histogram("valence_text_tokens")
        self._truncated = self._counter("valence_texts_truncated_total")
        self._unknown = self._counter("valence_unknown_tokens_total")
        self._predictions: dict[str, Counter] = {}
        self._confidence = self._histogram("valence_prediction_confidence")
        self._batch_items = self._histogram("valence_batch_items")
        self._batch_tokens = self._histogram("valence_batch_tokens")
        tokens = self._counter("valence_tokens_total")
        self._real_tokens, self._padding_tokens = tokens.labels("real"), tokens.labels("padding")
        self._lane_busy = self._counter("valence_lane_busy_seconds_total")
        self._lag = self._histogram("valence_event_loop_lag_seconds")

    # What happened.

    def request_started(self, route: str) -> None:
        """A request is in flight until `request_finished` is called for it."""
        self._in_flight[route].inc()

    def request_finished(self, *, route: str, status: int, duration_s: float) -> None:
        """The request of a `request_started` was answered, or its client is gone (499)."""
        self._in_flight[route].dec()
        if (route, status) not in self._requests:
            self._bind_answer(route, status)
        self._requests[route, status].inc()
        if route in TIMED_ROUTES:
            self._durations[route, status].observe(duration_s)

    def refused(self, code: str) -> None:
        """A request was answered with the error of this code."""
        self._refusals[code].inc()

    def stage(self, name: str, seconds: float) -> None:
        """A request spent this long in a stage, one of `STAGES`."""
        self._stages[name].observe(seconds)

    def text_read(self, *, tokens: int, truncated: bool, unknown: int) -> None:
        """A text was tokenised and goes to the model."""
        self._text_tokens.observe(tokens)
        if truncated:
            self._truncated.inc()
        if unknown:
            self._unknown.inc(unknown)

    def text_failed(self, code: str) -> None:
        """A text was refused (`TextRefused`) or failed (`engine_failed`), alone or in its place in a list."""
        self._text_errors[code].inc()

    def predicted(self, label: str, confidence: float) -> None:
        """A text got its best label, one of those given to `describe`, and that label's probability."""
        self._predictions[label].inc()
        self._confidence.observe(confidence)

    def batch_ran(self, *, items: int, tokens: int, padded_tokens: int, duration_s: float) -> None:
        """A lane ran a batch of `tokens` real tokens; its rectangle has `padded_tokens` (longest × count)."""
        self._batch_items.observe(items)
        self._batch_tokens.observe(tokens)
        self._real_tokens.inc(tokens)
        self._padding_tokens.inc(padded_tokens - tokens)
        self._lane_busy.inc(duration_s)

    def loop_lag(self, seconds: float) -> None:
        """A timer of the event loop fired this late."""
        self._lag.observe(seconds)

    # What stands.

    def describe(
        self, *, model: str, version: str, labels: Sequence[str], engine: str, precision: str, device: str
    ) -> None:
        """What is served. Makes the series of each label at 0, so call it before `predicted`."""
        self._gauge("valence_model_info").labels(model, version, engine, precision, device).set(1)
        predictions = self._counter("valence_predictions_total")
        self._predictions = {label: predictions.labels(label) for label in labels}

    def size(self, *, lanes: int, threads_per_lane: int, cpu_quota_cores: float) -> None:
        """The means that the service really uses."""
        self._gauge("valence_lanes").set(lanes)
        self._gauge("valence_threads_per_lane").set(threads_per_lane)
        self._gauge("valence_cpu_quota_cores").set(cpu_quota_cores)

    def watch(self, load: Callable[[], Load], *, max_queue_items: int, max_queue_tokens: int) -> None:
        """From now on `load` is asked at each scrape for the queue and the lanes."""
        self._load = load
        self._gauge("valence_queue_capacity_items").set(max_queue_items)
        self._gauge("valence_queue_capacity_tokens").set(max_queue_tokens)

    def watch_ready(self, is_ready: Callable[[], bool]) -> None:
        """From now on `is_ready` is asked at each scrape."""
        self._is_ready = is_ready

    # The way out.

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """The exposition and its content type; OpenMetrics when the Accept header asks for it."""
        self._look()
        shown = _WithoutCreated(self.registry)
        if accept is not None and "application/openmetrics-text" in accept.lower():
            body: bytes = openmetrics.generate_latest(shown)  # type: ignore[no-untyped-call]
            return body, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(shown), CONTENT_TYPE_PLAIN_0_0_4

    def _look(self) -> None:
        if self._is_ready is not None:
            self._gauge("valence_ready").set(self._is_ready())
        if self._load is not None:
            load = self._load()
            self._gauge("valence_queue_items").set(load.queued_items)
            self._gauge("valence_queue_tokens").set(load.queued_tokens)
            self._gauge("valence_queue_oldest_age_seconds").set(load.oldest_age_s)
            self._gauge("valence_lanes_busy").set(load.busy_lanes)
            self._gauge("valence_batch_longest_run_seconds").set(load.longest_run_s)


def _make(
    one: MetricDescription, registry: CollectorRegistry, deadline_s: float
) -> Counter | Gauge | Histogram:
    if one.type == "counter":
        return Counter(one.name.removesuffix("_total"), one.help, one.labels, registry=registry)
    if one.type == "gauge":
        return Gauge(one.name, one.help, one.labels, registry=registry)
    buckets = one.buckets
    if one.up_to_deadline:
        buckets = (*(bound for bound in buckets if bound < deadline_s), deadline_s)
    return Histogram(one.name, one.help, one.labels, registry=registry, buckets=buckets)


def _error_codes(base: type[ServiceError]) -> Iterator[str]:
    yield base.code
    for child in base.__subclasses__():
        yield from _error_codes(child)


class _WithoutCreated(Collector):
    """A registry without its `_created` series, which nobody reads and which make the page a third longer.

    The library can only switch them off for the whole process.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


def service_version() -> str:
    """Version of the installed distribution, or "0" when it runs from a bare checkout."""
    try:
        return version("valence")
    except PackageNotFoundError:
        return "0"
