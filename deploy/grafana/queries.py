"""The expressions that several panels share. Knows the names of metrics and recording rules, and no panel."""

SELECTED = 'job=~"$job", instance=~"$instance"'
"""The label matchers that every query of a series of the service carries."""

RATE = f"{{{SELECTED}}}[$__rate_interval]"
PREDICT = f'route="/predict", {SELECTED}'
ANSWERED = f'status_class="2xx", {PREDICT}'
JOB = 'job=~"$job"'
DURATION = "valence_http_request_duration_seconds"
REQUESTS = f"rate(valence_http_requests_total{{{PREDICT}}}[$__rate_interval])"


def some_or_none(expr: str, label: str) -> str:
    """The series above 0; where there is none, one that is called "none" and stands at 0."""
    return f'({expr} > 0) or on() label_replace(vector(0), "{label}", "none", "", "")'


def quantile(share: float) -> str:
    buckets = f"rate({DURATION}_bucket{{{ANSWERED}}}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by (le) ({buckets}))"


def budget_left(slo: str) -> str:
    return f'clamp_min(min(valence:slo_budget_left:ratio30d{{slo="{slo}", {JOB}}}), -1)'


ERROR_RATIO = (
    f'(sum(rate(valence_http_requests_total{{status=~"5..", {PREDICT}}}[$__rate_interval]))'
    f' / (sum(rate(valence_http_requests_total{{status!~"4..", {PREDICT}}}[$__rate_interval])) > 0))'
    f" or 0 * sum({REQUESTS})"
)
