"""Rows of the service dashboard on what the service runs in: process, fleet and Kubernetes.

Tables of panels; they know nothing of how one is drawn.
"""

from deploy.grafana.boards import Row
from deploy.grafana.panels import BLUE, GREEN, GREY, ORANGE, RED, Lines, Query
from deploy.grafana.queries import RATE, REQUESTS, SELECTED

PROCESS = Row(
    "Process",
    (
        Lines(
            title="Event-loop lag, p99",
            says="How late timers of the event loop fire: what every request waits for on top.",
            advice="Above 50 ms: something blocks the loop, or the CPU is throttled.",
            unit="s",
            queries=[
                Query(
                    "histogram_quantile(0.99, sum by (le, instance)"
                    f" (rate(valence_event_loop_lag_seconds_bucket{RATE})))",
                    "{{instance}}",
                )
            ],
        ),
        Lines(
            title="CPU",
            says="Cores in use, and what an instance may use.",
            advice="At the quota with a full queue: add replicas. Below it with a full queue: see "
            "VALENCE_LANES.",
            unit="suffix: cores",
            decimals=1,
            queries=[
                Query(f"rate(process_cpu_seconds_total{RATE})", "{{instance}}"),
                Query(f"max(valence_cpu_quota_cores{{{SELECTED}}})", "quota", GREY, dashed=True),
            ],
        ),
        Lines(
            title="Throttling",
            says="The share of the periods of 5 minutes in which the kernel took the CPU away.",
            advice="Above 5 %: make the limit a whole number of cores and equal to the request, with as "
            "many threads.",
            unit="percentunit",
            least=0,
            queries=[Query(f"valence:cpu_throttled:ratio_rate5m{{{SELECTED}}}", "{{instance}}")],
        ),
        Lines(
            title="Resident memory",
            says="What the process holds.",
            advice="It is flat after the first minutes. Growth for hours is a leak: keep the numbers, "
            "then restart.",
            unit="bytes",
            least=0,
            queries=[Query(f"process_resident_memory_bytes{{{SELECTED}}}", "{{instance}}")],
        ),
        Lines(
            title="Memory of the limit",
            says="The share of the memory limit that the process holds; without a limit, of the "
            "machine's memory.",
            advice="Above 90 % the kernel kills it next: raise the limit, or lower VALENCE_CACHE_ITEMS.",
            unit="percentunit",
            least=0,
            queries=[Query(f"valence:memory:ratio{{{SELECTED}}}", "{{instance}}")],
        ),
        Lines(
            title="File descriptors",
            says="Open files, most of them connections.",
            advice="Grows without requests: clients that connect and say nothing; look at the proxy.",
            unit="none",
            least=0,
            queries=[Query(f"process_open_fds{{{SELECTED}}}", "{{instance}}")],
        ),
    ),
)

FLEET = Row(
    "Fleet",
    (
        Lines(
            title="Ready against desired",
            says="Instances that are ready, and those that Prometheus was told of.",
            advice="A gap that stays: look at the log of the instance that is missing.",
            unit="none",
            width=6,
            queries=[
                Query(f"sum(valence_ready{{{SELECTED}}})", "ready", GREEN),
                Query(f"count(up{{{SELECTED}}})", "desired", GREY, dashed=True),
            ],
        ),
        Lines(
            title="Versions",
            says="Instances that serve each version of a model.",
            advice="Two for longer than a rollout: it has stopped half way; go on or go back.",
            unit="none",
            width=6,
            stacked=True,
            queries=[
                Query(
                    f"count by (model, version, precision) (valence_model_info{{{SELECTED}}})",
                    "{{model}} {{version}}, {{precision}}",
                )
            ],
        ),
        Lines(
            title="Restarts",
            says="How often a process was started anew in the last 5 minutes.",
            advice="Outside a rollout: look at the last lines of the log before it, and at the memory.",
            unit="none",
            width=6,
            queries=[
                Query(
                    f"sum by (instance) (changes(process_start_time_seconds{{{SELECTED}}}[5m]))",
                    "{{instance}}",
                )
            ],
        ),
        Lines(
            title="Imbalance",
            says="The requests of the busiest instance over the mean; 1 is even.",
            advice="Above 1.5: the proxy keeps connections for long or hashes callers; let it take the "
            "least loaded.",
            unit="suffix:×",
            decimals=1,
            width=6,
            least=0,
            queries=[
                Query(
                    f"max(sum by (instance) ({REQUESTS})) / (avg(sum by (instance) ({REQUESTS})) > 0)",
                    "busiest over mean",
                    ORANGE,
                )
            ],
        ),
    ),
)

_DEPLOYMENT = 'deployment="valence"'
_AUTOSCALER = 'horizontalpodautoscaler=~"(keda-hpa-)?valence"'
KUBERNETES = Row(
    "Kubernetes (needs kube-state-metrics)",
    (
        Lines(
            title="Replicas",
            says="What the Deployment wants, what is ready, what the autoscaler asks for and the most it "
            "may ask for.",
            advice="Asked for stands at the most: raise it in the overlay, or the load is refused.",
            unit="none",
            width=12,
            queries=[
                Query(f"sum(kube_deployment_spec_replicas{{{_DEPLOYMENT}}})", "wanted", BLUE),
                Query(f"sum(kube_deployment_status_replicas_ready{{{_DEPLOYMENT}}})", "ready", GREEN),
                Query(
                    f"sum(kube_horizontalpodautoscaler_status_desired_replicas{{{_AUTOSCALER}}})",
                    "asked for",
                    ORANGE,
                ),
                Query(
                    f"sum(kube_horizontalpodautoscaler_spec_max_replicas{{{_AUTOSCALER}}})",
                    "most",
                    RED,
                    dashed=True,
                ),
            ],
        ),
        Lines(
            title="Container restarts",
            says="How often the kubelet started a container anew in the last hour.",
            advice="`kubectl describe pod` tells the reason: OOMKilled wants memory, a failed liveness "
            "wants the log.",
            unit="none",
            width=12,
            queries=[
                Query(
                    "sum by (pod) (increase("
                    'kube_pod_container_status_restarts_total{container="valence"}[1h]))',
                    "{{pod}}",
                )
            ],
        ),
    ),
    closed=True,
)
