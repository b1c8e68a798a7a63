"""What metrics there are: every name, type, help, label and bucket, and the values that labels can have.

A table and nothing else: knows neither the client library nor who counts.
"""

from dataclasses import dataclass

OTHER_ROUTE = "other"
_GET = (200, 405, 413, 500)
_CLOSABLE = (*_GET, 401)
ROUTE_STATUSES: dict[str, tuple[int, ...]] = {
    "/predict": (200, 400, 401, 405, 413, 415, 422, 499, 500, 503, 504),
    "/health": (*_CLOSABLE, 503),
    "/health/live": _GET,
    "/health/ready": (*_GET, 503),
    "/metrics": _CLOSABLE,
    "/models": (*_CLOSABLE, 504),
    "/docs": _CLOSABLE,
    "/openapi.json": _CLOSABLE,
    OTHER_ROUTE: (401, 404, 413, 500),
}
"""The routes as metrics know them, and the statuses that each can answer. Any other path is `other`."""

TIMED_ROUTES = ("/predict", "/health/live", "/health/ready")
"""The routes whose duration is kept: nobody asks for the p99 of the others, and each adds 60 lines."""

STAGES = ("tokenize", "queue", "infer")


@dataclass(frozen=True, slots=True)
class MetricDescription:
    """One line of the metrics page: `type` is counter, gauge or histogram.

    Of a histogram of durations of requests, the buckets under the deadline are kept, and the deadline is
    the last finite one (`up_to_deadline`).
    """

    name: str
    type: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    up_to_deadline: bool = False


_REQUEST_S = (
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.1,
    0.2,
    0.25,
    0.5,
    1.0,
    2.0,
    5.0,
)
_STAGE_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_BATCH_ITEMS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_BATCH_TOKENS = (16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)
_TEXT_TOKENS = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
_CONFIDENCE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)

_D = MetricDescription
CATALOGUE: tuple[MetricDescription, ...] = (
    _D(
        "valence_http_requests_total",
        "counter",
        "Requests answered; status 499: the client went away before the answer.",
        ("route", "status"),
    ),
    _D(
        "valence_http_request_duration_seconds",
        "histogram",
        "Time from the headers of a request to the end of its answer.",
        ("route", "status_class"),
        _REQUEST_S,
        up_to_deadline=True,
    ),
    _D("valence_http_requests_in_flight", "gauge", "Requests that are being answered now.", ("route",)),
    _D("valence_refusals_total", "counter", "Requests answered with an error, by its code.", ("reason",)),
    _D(
        "valence_stage_duration_seconds",
        "histogram",
        "Time of a request in a stage: tokenize, queue (waiting for a lane), infer (the batch it was in).",
        ("stage",),
        _STAGE_S,
        up_to_deadline=True,
    ),
    _D("valence_texts_truncated_total", "counter", "Texts that were cut to fit."),
    _D("valence_unknown_tokens_total", "counter", "Tokens that the vocabulary does not know."),
    _D(
        "valence_text_tokens",
        "histogram",
        "Tokens of a text as the model reads it, special tokens included.",
        buckets=_TEXT_TOKENS,
    ),
    _D(
        "valence_text_errors_total",
        "counter",
        "Texts that were refused or failed, by error code.",
        ("reason",),
    ),
    _D("valence_predictions_total", "counter", "Texts predicted, by the best label.", ("label",)),
    _D(
        "valence_prediction_confidence",
        "histogram",
        "Score of the best label of a text.",
        buckets=_CONFIDENCE,
    ),
    _D(
        "valence_batch_items",
        "histogram",
        "Texts run in a batch; those with the same tokens count as one.",
        buckets=_BATCH_ITEMS,
    ),
    _D(
        "valence_batch_twins_total",
        "counter",
        "Texts that were not run because another one in their batch has the same tokens.",
    ),
    _D("valence_batch_tokens", "histogram", "Tokens run in a batch, without padding.", buckets=_BATCH_TOKENS),
    _D(
        "valence_tokens_total",
        "counter",
        "Tokens run through the engine: real ones, and the padding that makes a batch a rectangle.",
        ("kind",),
    ),
    _D(
        "valence_cache_hits_total",
        "counter",
        "Texts of which the prediction was remembered, those of refused requests too.",
    ),
    _D("valence_cache_misses_total", "counter", "Texts that were run, or refused, with the cache on."),
    _D(
        "valence_cache_shared_total",
        "counter",
        "Texts answered with the prediction of the same text, in flight or in the same request.",
    ),
    _D("valence_cache_items", "gauge", "Predictions that are remembered; 0 when the cache is off."),
    _D("valence_queue_items", "gauge", "Texts that wait for a lane."),
    _D("valence_queue_tokens", "gauge", "Tokens that wait for a lane."),
    _D("valence_queue_oldest_age_seconds", "gauge", "How long the oldest waiting text has been waiting."),
    _D("valence_queue_capacity_items", "gauge", "Most texts that may wait."),
    _D("valence_queue_capacity_tokens", "gauge", "Most tokens that may wait."),
    _D("valence_lanes", "gauge", "Batches that may run at the same time."),
    _D("valence_lanes_busy", "gauge", "Lanes that run a batch now."),
    _D(
        "valence_lane_busy_seconds_total",
        "counter",
        "Seconds spent running batches, added up over the lanes.",
    ),
    _D(
        "valence_batch_longest_run_seconds", "gauge", "How long the batch that runs longest has been running."
    ),
    _D("valence_threads_per_lane", "gauge", "Threads that the engine uses inside one batch."),
    _D("valence_cpu_quota_cores", "gauge", "Cores that the service may use, from quota and affinity."),
    _D("valence_cpu_periods_total", "counter", "Periods of the CPU limit of the cgroup; 0 without a limit."),
    _D(
        "valence_cpu_throttled_periods_total",
        "counter",
        "Periods in which the CPU limit was used up, so that threads had to wait.",
    ),
    _D(
        "valence_cpu_throttled_seconds_total",
        "counter",
        "Seconds that the CPU limit made threads wait, added up over the cores.",
    ),
    _D(
        "valence_memory_limit_bytes",
        "gauge",
        "Memory that the service may use: the least of the limits of its cgroups and the machine's memory.",
    ),
    _D(
        "valence_event_loop_lag_seconds",
        "histogram",
        "How late a timer of the event loop fires.",
        buckets=_LAG_S,
    ),
    _D("valence_ready", "gauge", "1 when readiness answers 200, else 0."),
    _D(
        "valence_model_info",
        "gauge",
        "1, for the version that is served.",
        ("model", "version", "engine", "precision", "device"),
    ),
    _D("valence_build_info", "gauge", "1, for the build that runs.", ("version", "python")),
)
"""Our own metrics; those of the process (`process_*`, `python_*`) have the standard names."""
