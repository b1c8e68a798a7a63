"""The row of the service dashboard on the work itself: lanes, queue and batches.

A table of panels; knows nothing of how one is drawn.
"""

from deploy.grafana.boards import Row
from deploy.grafana.panels import BLUE, GREEN, ORANGE, Heat, Lines, Query
from deploy.grafana.queries import DURATION, PREDICT, RATE, SELECTED

WORK = Row(
    "Lanes, queue and batches",
    (
        Lines(
            title="Lane utilisation",
            says="The share of the time that the lanes of an instance run a batch.",
            advice="Near 100 % is the knee: more load only makes the queue longer. Add replicas above 80 %.",
            unit="percentunit",
            width=6,
            most=1,
            queries=[
                Query(
                    f"rate(valence_lane_busy_seconds_total{RATE}) / (valence_lanes{{{SELECTED}}} > 0)",
                    "{{instance}}",
                )
            ],
        ),
        Lines(
            title="Queue fill",
            says="How full the queue of an instance is, in texts or in tokens, whichever is nearer to "
            "its bound.",
            advice="Peaks are bursts and harmless. A plateau is overload: what is beyond 100 % is refused.",
            unit="percentunit",
            width=6,
            most=1,
            queries=[Query(f"valence:queue_fill:ratio{{{SELECTED}}}", "{{instance}}")],
        ),
        Lines(
            title="In flight",
            says="Requests under way, and what Little's law makes of rate and mean time. Both agree in a "
            "steady state.",
            advice="Counted stays far above expected: requests that do not end. /health/ready tells whether "
            "a batch is overdue.",
            unit="none",
            width=6,
            queries=[
                Query(
                    f'sum(valence_http_requests_in_flight{{route="/predict", {SELECTED}}})', "counted", BLUE
                ),
                Query(
                    f"sum(rate({DURATION}_sum{{{PREDICT}}}[$__rate_interval]))",
                    "expected",
                    ORANGE,
                    dashed=True,
                ),
            ],
        ),
        Heat(
            title="Batch size",
            says="How many batches had so many texts.",
            advice="All at 1 under load: the texts differ too much in length for the padding that is "
            "allowed.",
            unit="none",
            width=6,
            queries=[Query(f"sum by (le) (increase(valence_batch_items_bucket{RATE}))", "{{le}}")],
        ),
        Lines(
            title="Mean batch",
            says="Texts in a batch; it grows with the load, which is where the speed under load comes from.",
            advice="Nothing by itself. Small while the queue is full: see VALENCE_MAX_BATCH_TOKENS in "
            "docs/settings.md.",
            unit="suffix: texts",
            decimals=1,
            width=6,
            least=0,
            queries=[
                Query(
                    f"rate(valence_batch_items_sum{RATE}) / (rate(valence_batch_items_count{RATE}) > 0)",
                    "{{instance}}",
                )
            ],
        ),
        Lines(
            title="Padding waste",
            says="The share of what the engine ran that was padding.",
            advice="Above 20 %: lower VALENCE_MAX_PADDING_TOKENS.",
            unit="percentunit",
            width=6,
            least=0,
            queries=[
                Query(
                    f'sum(rate(valence_tokens_total{{kind="padding", {SELECTED}}}[$__rate_interval]))'
                    f" / (sum(rate(valence_tokens_total{RATE})) > 0)",
                    "padding",
                    ORANGE,
                )
            ],
        ),
        Lines(
            title="Tokens",
            says="Tokens run through the engine a second: the work itself, whatever the length of the texts.",
            advice="Flat while requests grow: the engine is at its end.",
            unit="suffix: tokens/s",
            width=6,
            stacked=True,
            colors={"real": GREEN, "padding": ORANGE},
            queries=[Query(f"sum by (kind) (rate(valence_tokens_total{RATE}))", "{{kind}}")],
        ),
        Lines(
            title="Answered without a run",
            says="The share of the texts that were remembered, or shared with the same text in flight; "
            "nothing: no cache.",
            advice="Below a few per cent the cache earns nothing; see VALENCE_CACHE_ITEMS in "
            "docs/settings.md.",
            unit="percentunit",
            width=6,
            least=0,
            queries=[
                Query(
                    f"{part} / (sum(rate(valence_cache_hits_total{RATE})) + "
                    f"sum(rate(valence_cache_shared_total{RATE}))"
                    f" + sum(rate(valence_cache_misses_total{RATE})) > 0)",
                    name,
                    color,
                )
                for part, name, color in (
                    (f"sum(rate(valence_cache_hits_total{RATE}))", "remembered", GREEN),
                    (f"sum(rate(valence_cache_shared_total{RATE}))", "shared", BLUE),
                )
            ],
        ),
    ),
)
