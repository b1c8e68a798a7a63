"""The dashboard of the service: are the SLOs kept, how fast is it, what do lanes, queue and process do.

The order of its rows, and nothing else.
"""

from deploy.grafana.boards import Board
from deploy.grafana.fleet_rows import FLEET, KUBERNETES, PROCESS
from deploy.grafana.glance import GLANCE
from deploy.grafana.slo_rows import LATENCY, SLO
from deploy.grafana.work_row import WORK

SERVICE = Board(
    uid="valence-service",
    title="Valence: service and SLO",
    description="Whether callers get their answers in time, and what stands in the way.",
    glance=GLANCE,
    rows=(SLO, LATENCY, WORK, PROCESS, FLEET, KUBERNETES),
)
