"""Counts what happens, by plain methods, and renders it; the names stand in `catalogue`.

Knows nothing of requests, batches or models: callers pass numbers and words. `batch_ran` may be called from
several threads at once; every other method counts without a lock and belongs to one thread, that of the event
loop. Nothing is global: each `Metrics` has a registry of its own.
"""

import platform
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from service.catalogue import CATALOGUE, ROUTE_STATUSES, STAGES, TIMED_ROUTES, MetricDescription
from service.errors import ServiceError, TextRefused, with_code
from service.load import Load
from service.quota import Throttling
from service.tallies import Histogram, Histograms, Number, Numbers


class Metrics:
    """All metrics of one service.

    Args:
        registry: where they live; a new one when None.
        deadline_s: the deadline of a request, in seconds.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, deadline_s: float = 10.0) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._lock = threading.Lock()
        self._families = {one.name: self._make(one, deadline_s) for one in CATALOGUE}
        self._load: Callable[[], Load] | None = None
        self._is_ready: Callable[[], bool] | None = None
        self._cache_items: Callable[[], int] | None = None
        self._throttling: Callable[[], Throttling] | None = None
        self._bind_http()
        self._bind_work()
        self._numbers("valence_build_info").series(service_version(), platform.python_version()).value = 1
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def _make(self, one: MetricDescription, deadline_s: float) -> Numbers | Histograms:
        made: Numbers | Histograms
        if one.type == "histogram":
            bounds = one.buckets
            if one.up_to_deadline:
                bounds = (*(bound for bound in bounds if bound < deadline_s), deadline_s)
            made = Histograms(one, bounds, self._lock)
        else:
            made = Numbers(one, self._lock)
        self.registry.register(made)
        return made

    def _numbers(self, name: str) -> Numbers:
        family = self._families[name]
        assert isinstance(family, Numbers)  # noqa: S101 - narrows a type; the table decides it
        return family

    def _histograms(self, name: str) -> Histograms:
        family = self._families[name]
        assert isinstance(family, Histograms)  # noqa: S101
        return family

    # Series are looked up once: each must stand at 0 from the start, or rate() misses its first event.

    def _bind_http(self) -> None:
        in_flight = self._numbers("valence_http_requests_in_flight")
        self._in_flight = {route: in_flight.series(route) for route in ROUTE_STATUSES}
        self._answers: dict[tuple[str, int], tuple[Number, Histogram | None]] = {}
        for route, statuses in ROUTE_STATUSES.items():
            for status in statuses:
                self._bind_answer(route, status)
        refusals = self._numbers("valence_refusals_total")
        self._refusals = {one.code: refusals.series(one.code) for one in with_code(ServiceError)}

    def _bind_answer(self, route: str, status: int) -> tuple[Number, Histogram | None]:
        requests = self._numbers("valence_http_requests_total").series(route, str(status))
        durations = None
        if route in TIMED_ROUTES:
            family = self._histograms("valence_http_request_duration_seconds")
            durations = family.series(route, f"{status // 100}xx")
        self._answers[route, status] = requests, durations
        return requests, durations

    def _bind_work(self) -> None:
        stage = self._histograms("valence_stage_duration_seconds")
        self._stages = {name: stage.series(name) for name in STAGES}
        errors = self._numbers("valence_text_errors_total")
        self._text_errors = {
            code: errors.series(code)
            for code in (*(one.code for one in with_code(TextRefused)), "engine_failed")
        }
        self._text_tokens = self._histograms("valence_text_tokens").series()
        self._truncated = self._numbers("valence_texts_truncated_total").series()
        self._unknown = self._numbers("valence_unknown_tokens_total").series()
        self._predictions: dict[str, Number] = {}
        self._confidence = self._histograms("valence_prediction_confidence").series()
        self._batch_items = self._histograms("valence_batch_items").series()
        self._batch_tokens = self._histograms("valence_batch_tokens").series()
        self._twins = self._numbers("valence_batch_twins_total").series()
        self._cache_hits = self._numbers("valence_cache_hits_total").series()
        self._cache_misses = self._numbers("valence_cache_misses_total").series()
        self._cache_shared = self._numbers("valence_cache_shared_total").series()
        tokens = self._numbers("valence_tokens_total")
        self._real_tokens, self._padding_tokens = tokens.series("real"), tokens.series("padding")
        self._lane_busy = self._numbers("valence_lane_busy_seconds_total").series()
        self._lag = self._histograms("valence_event_loop_lag_seconds").series()

    # What happened.

    def request_started(self, route: str) -> None:
        """A request is in flight until `request_finished` is called for it."""
        self._in_flight[route].value += 1

    def request_finished(
        self, *, route: str, status: int, duration_s: float, trace_id: str | None = None
    ) -> None:
        """The request of a `request_started` was answered, or its client is gone (499).

        With the id of its trace, if that is kept, it may be the exemplar of its bucket.
        """
        self._in_flight[route].value -= 1
        requests, durations = self._answers.get((route, status)) or self._bind_answer(route, status)
        requests.value += 1
        if durations is not None:
            if trace_id is None:
                durations.observe(duration_s)
            else:
                durations.observe_traced(duration_s, trace_id)

    def refused(self, code: str) -> None:
        """A request was answered with the error of this code."""
        self._refusals[code].value += 1

    def stage(self, name: str, seconds: float) -> None:
        """A request spent this long in a stage, one of `STAGES`."""
        self._stages[name].observe(seconds)

    def text_read(self, *, tokens: int, truncated: bool, unknown: int) -> None:
        """A text was tokenised and goes to the model."""
        self._text_tokens.observe(tokens)
        if truncated:
            self._truncated.value += 1
        self._unknown.value += unknown

    def text_failed(self, code: str) -> None:
        """A text was refused (`TextRefused`) or failed (`engine_failed`), alone or in its place in a list."""
        self._text_errors[code].value += 1

    def predicted(self, label: str, confidence: float) -> None:
        """A text got its best label, one of those given to `describe`, and that label's probability."""
        self._predictions[label].value += 1
        self._confidence.observe(confidence)

    def cache_used(self, *, hits: int = 0, misses: int = 0, shared: int = 0) -> None:
        """So many texts were remembered, had to be run, or shared the prediction of the same text."""
        self._cache_hits.value += hits
        self._cache_misses.value += misses
        self._cache_shared.value += shared

    def batch_ran(
        self, *, items: int, tokens: int, padded_tokens: int, duration_s: float, twins: int = 0
    ) -> None:
        """A lane ran a batch of `tokens` real tokens; its rectangle has `padded_tokens` (longest × count).

        `twins` are the texts beside these items that were not run: another one had the same tokens.
        """
        with self._lock:
            self._twins.value += twins
            self._batch_items.observe(items)
            self._batch_tokens.observe(tokens)
            self._real_tokens.value += tokens
            self._padding_tokens.value += padded_tokens - tokens
            self._lane_busy.value += duration_s

    def loop_lag(self, seconds: float) -> None:
        """A timer of the event loop fired this late."""
        self._lag.observe(seconds)

    # What stands.

    def describe(
        self, *, model: str, version: str, labels: Sequence[str], engine: str, precision: str, device: str
    ) -> None:
        """What is served. Makes the series of each label at 0, so call it before `predicted`."""
        self._numbers("valence_model_info").series(model, version, engine, precision, device).value = 1
        predictions = self._numbers("valence_predictions_total")
        self._predictions = {label: predictions.series(label) for label in labels}

    def size(self, *, lanes: int, threads_per_lane: int, cpu_quota_cores: float) -> None:
        """The means that the service really uses."""
        self._set("valence_lanes", lanes)
        self._set("valence_threads_per_lane", threads_per_lane)
        self._set("valence_cpu_quota_cores", cpu_quota_cores)

    def watch(self, load: Callable[[], Load], *, max_queue_items: int, max_queue_tokens: int) -> None:
        """From now on `load` is asked at each scrape for the queue and the lanes."""
        self._load = load
        self._set("valence_queue_capacity_items", max_queue_items)
        self._set("valence_queue_capacity_tokens", max_queue_tokens)

    def watch_cache(self, items: Callable[[], int]) -> None:
        """From now on `items` is asked at each scrape for the predictions that are remembered."""
        self._cache_items = items

    def watch_ready(self, is_ready: Callable[[], bool]) -> None:
        """From now on `is_ready` is asked at each scrape."""
        self._is_ready = is_ready

    def watch_limits(self, throttling: Callable[[], Throttling], *, memory_limit_bytes: int) -> None:
        """From now on `throttling` is asked at each scrape for what the CPU limit has done."""
        self._throttling = throttling
        self._set("valence_memory_limit_bytes", memory_limit_bytes)

    # The way out.

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """The exposition and its content type; OpenMetrics when the Accept header asks for it."""
        self._look()
        if accept is not None and "application/openmetrics-text" in accept.lower():
            body: bytes = openmetrics.generate_latest(self.registry)  # type: ignore[no-untyped-call]
            return body, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def _look(self) -> None:
        if self._is_ready is not None:
            self._set("valence_ready", self._is_ready())
        if self._cache_items is not None:
            self._set("valence_cache_items", self._cache_items())
        if self._throttling is not None:
            held_back = self._throttling()
            self._set("valence_cpu_periods_total", held_back.periods)
            self._set("valence_cpu_throttled_periods_total", held_back.throttled_periods)
            self._set("valence_cpu_throttled_seconds_total", held_back.throttled_s)
        if self._load is not None:
            load = self._load()
            self._set("valence_queue_items", load.queued_items)
            self._set("valence_queue_tokens", load.queued_tokens)
            self._set("valence_queue_oldest_age_seconds", load.oldest_age_s)
            self._set("valence_lanes_busy", load.busy_lanes)
            self._set("valence_batch_longest_run_seconds", load.longest_run_s)

    def _set(self, name: str, value: float) -> None:
        self._numbers(name).series().value = value


def service_version() -> str:
    """Version of the installed distribution, or "0" when it runs from a bare checkout."""
    try:
        return version("valence")
    except PackageNotFoundError:
        return "0"
