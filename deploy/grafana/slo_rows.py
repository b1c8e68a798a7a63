"""Rows of the service dashboard on what callers get: the SLOs, and the time an answer takes.

Tables of panels; they know nothing of how one is drawn.
"""

from deploy.grafana.boards import Row
from deploy.grafana.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE_BLUE,
    PURPLE,
    RED,
    YELLOW,
    Heat,
    Lines,
    Query,
)
from deploy.grafana.queries import (
    ANSWERED,
    DURATION,
    ERROR_RATIO,
    JOB,
    RATE,
    REQUESTS,
    budget_left,
    quantile,
    some_or_none,
)

_STATUS_COLORS = {
    "^4": PURPLE,
    "^5": RED,
    "^200$": GREEN,
    "^413$": PALE_BLUE,
    "^422$": BLUE,
    "^499$": GREY,
    "^503$": ORANGE,
    "^504$": YELLOW,
    "^none$": GREY,
}
"""The later pattern wins."""
REASON_COLORS = {
    "^none$": GREY,
    "^queue_full$": ORANGE,
    "^deadline_exceeded$": YELLOW,
    "^(engine_failed|not_ready)$": RED,
    "^text_empty$": BLUE,
    "^unprocessable$": PALE_BLUE,
    "^too_many_texts$": PURPLE,
    "^body_too_large$": GREEN,
}


SLO = Row(
    "SLO",
    (
        Lines(
            title="Budget left",
            says="What is left of the failures and of the slow answers that 30 days may have; drawn down "
            "to -100 %.",
            advice="A step down is an incident: its time is the time to look at in every other panel.",
            unit="percentunit",
            most=1,
            queries=[
                Query(budget_left("availability"), "availability", BLUE),
                Query(budget_left("latency"), "latency", PURPLE),
            ],
        ),
        Lines(
            title="Burn rate",
            says="1 uses up the budget in exactly 30 days. The dashed lines are those that page: 14.4 "
            "over 1 h, 6 over 6 h.",
            advice="A page needs the short window, too: once that is below the line, it is over. "
            "docs/runbook.md goes on.",
            unit="suffix:×",
            logarithmic=True,
            queries=[
                Query(f'max(valence:slo_burn:1h{{slo="availability", {JOB}}})', "availability, 1 h", BLUE),
                Query(
                    f'max(valence:slo_burn:6h{{slo="availability", {JOB}}})', "availability, 6 h", PALE_BLUE
                ),
                Query(f'max(valence:slo_burn:1h{{slo="latency", {JOB}}})', "latency, 1 h", PURPLE),
                Query(f'max(valence:slo_burn:6h{{slo="latency", {JOB}}})', "latency, 6 h", GREY),
                Query("vector(14.4)", "page, 1 h", RED, dashed=True),
                Query("vector(6)", "page, 6 h", ORANGE, dashed=True),
            ],
        ),
        Lines(
            title="Requests by status",
            says="Answers of POST /predict a second; 499: the client went away first.",
            advice="4xx are faults of callers: talk to them. 503: too much to do, or not ready. "
            "504: too slow. 500: the engine, see the log.",
            unit="reqps",
            stacked=True,
            colors=_STATUS_COLORS,
            queries=[Query(some_or_none(f"sum by (status) ({REQUESTS})", "status"), "{{status}}")],
        ),
        Lines(
            title="Error ratio",
            says="The share of 5xx among the answers that are not a fault of the caller; dashed: what "
            "the SLO allows.",
            advice="Above the dashed line the budget shrinks. docs/slo.md says which windows page.",
            unit="percentunit",
            width=12,
            least=0,
            queries=[
                Query(ERROR_RATIO, "now", RED),
                Query(f'max(valence:slo_bad:ratio5m{{slo="availability", {JOB}}})', "5 minutes", ORANGE),
                Query('valence:slo_budget:ratio{slo="availability"}', "allowed", GREY, dashed=True),
            ],
        ),
        Lines(
            title="Refusals by reason",
            says="Requests answered with an error, by its code; docs/errors.md says what each means.",
            advice="queue_full: add replicas or send less. deadline_exceeded: the queue is longer than "
            "callers wait.",
            unit="reqps",
            width=12,
            colors=REASON_COLORS,
            queries=[
                Query(
                    some_or_none(f"sum by (reason) (rate(valence_refusals_total{RATE}))", "reason"),
                    "{{reason}}",
                )
            ],
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        Lines(
            title="Latency",
            says="From the headers of a request to the end of its answer, of the predictions that were "
            "made. "
            "Each diamond is one request; its trace id is in the box that opens over it.",
            advice="p50 up: all are slower. Only p99 up: long texts, large lists or a full queue.",
            unit="s",
            width=12,
            queries=[
                Query(quantile(0.5), "p50", PALE_BLUE),
                Query(quantile(0.95), "p95", BLUE),
                Query(quantile(0.99), "p99", PURPLE, exemplars=True),
                Query("vector($slo_latency_s)", "bound", RED, dashed=True),
            ],
        ),
        Heat(
            title="Latency of all",
            says="How many predictions fell into each bucket of time.",
            advice="Two bands are two kinds of requests, often sentences and lists: judge them apart.",
            unit="s",
            width=12,
            queries=[
                Query(f"sum by (le) (increase({DURATION}_bucket{{{ANSWERED}}}[$__rate_interval]))", "{{le}}")
            ],
        ),
        Lines(
            title="Share over the bound",
            says="The share of the predictions that took longer than the bound chosen above; dashed: "
            "what the SLO allows.",
            advice="Above the dashed line, with the SLO's bound of 0.25 s, the latency budget shrinks.",
            unit="percentunit",
            width=12,
            least=0,
            queries=[
                Query(
                    f"clamp_min(1 - sum(rate({DURATION}_bucket"
                    f'{{le="$slo_latency_s", {ANSWERED}}}[$__rate_interval]))'
                    f" / (sum(rate({DURATION}_count{{{ANSWERED}}}[$__rate_interval])) > 0), 0)",
                    "over $slo_latency_s s",
                    PURPLE,
                ),
                Query('valence:slo_budget:ratio{slo="latency"}', "allowed", GREY, dashed=True),
            ],
        ),
        Lines(
            title="Time by stage",
            says="The mean time of a request in each stage: made into tokens, waiting for a lane, in its "
            "batch.",
            advice="queue grows: too much to do, add replicas. infer grows: longer texts or a throttled CPU.",
            unit="s",
            width=12,
            stacked=True,
            colors={"tokenize": GREEN, "queue": ORANGE, "infer": BLUE},
            queries=[
                Query(
                    f"sum by (stage) (rate(valence_stage_duration_seconds_sum{RATE}))"
                    f" / (sum by (stage) (rate(valence_stage_duration_seconds_count{RATE})) > 0)",
                    "{{stage}}",
                )
            ],
        ),
    ),
)
