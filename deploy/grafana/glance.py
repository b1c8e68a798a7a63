"""The numbers on top of the service dashboard: what a glance must catch.

A table of panels; knows nothing of how one is drawn.
"""

from deploy.grafana.panels import BLUE, GREEN, ORANGE, RED, YELLOW, Query, Stat
from deploy.grafana.queries import ERROR_RATIO, JOB, REQUESTS, SELECTED, budget_left, quantile

GLANCE = (
    Stat(
        title="Ready",
        says="The share of the instances that answer readiness with 200.",
        advice="Below 100 %: see the row Fleet, then the reason at /health/ready of the instance that is "
        "not.",
        unit="percentunit",
        queries=[Query(f"sum(valence_ready{{{SELECTED}}}) / count(up{{{SELECTED}}})", "ready")],
        base=RED,
        steps=[(0.5, ORANGE), (1, GREEN)],
    ),
    Stat(
        title="Availability budget",
        says="What is left of the failures that 30 days may have; -100 % stands for anything below it.",
        advice="Below 25 %: no risky change. Below 0: the SLO is broken; see Error ratio and Refusals by "
        "reason.",
        unit="percentunit",
        queries=[Query(budget_left("availability"), "left")],
        base=RED,
        steps=[(0, ORANGE), (0.25, YELLOW), (0.5, GREEN)],
    ),
    Stat(
        title="Latency budget",
        says="What is left of the slow answers that 30 days may have; -100 % stands for anything below it.",
        advice="Below 25 %: add replicas before anything else. Below 0: the SLO is broken; see the row "
        "Latency.",
        unit="percentunit",
        queries=[Query(budget_left("latency"), "left")],
        base=RED,
        steps=[(0, ORANGE), (0.25, YELLOW), (0.5, GREEN)],
    ),
    Stat(
        title="Burn rate, 1 h",
        says="How many times faster than allowed the budget went in the last hour, for the worse of the "
        "two SLOs.",
        advice="Above 14.4 somebody is paged: two days of this use up the month.",
        unit="suffix:×",
        decimals=1,
        queries=[Query(f"max(valence:slo_burn:1h{{{JOB}}})", "burn rate")],
        steps=[(1, YELLOW), (6, ORANGE), (14.4, RED)],
    ),
    Stat(
        title="Requests",
        says="POST /predict, answered or refused, a second.",
        advice="Compare with the size in docs/kubernetes.md before you look for faults.",
        unit="reqps",
        base=BLUE,
        queries=[Query(f"sum({REQUESTS})", "requests")],
    ),
    Stat(
        title="Errors",
        says="The share of 5xx among the answers that are not a fault of the caller.",
        advice="See Error ratio for how long, and Refusals by reason for why.",
        unit="percentunit",
        decimals=2,
        queries=[Query(ERROR_RATIO, "errors")],
        steps=[(0.001, ORANGE), (0.01, RED)],
    ),
    Stat(
        title="p99",
        says="99 of 100 predictions were answered sooner.",
        advice="Above the bound: see Time by stage. A long queue wants replicas, a long inference wants "
        "a look at the texts.",
        unit="s",
        decimals=0,
        queries=[Query(quantile(0.99), "p99")],
        steps=[(0.25, ORANGE), (1, RED)],
    ),
    Stat(
        title="Fullest queue",
        says="How full the fullest queue is, in texts or in tokens, whichever is nearer to its bound.",
        advice="At 100 % the next request is refused with 503. Above 80 % for minutes: add replicas.",
        unit="percentunit",
        decimals=0,
        queries=[Query(f"max(valence:queue_fill:ratio{{{SELECTED}}})", "fill")],
        steps=[(0.5, YELLOW), (0.8, RED)],
    ),
)
