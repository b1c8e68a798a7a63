"""A real Prometheus scrapes the service and gives back the trace of a request."""

import time
from pathlib import Path

import httpx

from scripts.prometheus_process import prometheus
from tests.deploy.rules_files import tool
from tests.models import make_version
from tests.server import eventually, local_server

TRACE = "0af7651916cd43dd8448eb211c80319c"
QUERY = 'valence_http_request_duration_seconds_bucket{route="/predict"}'


def test_prometheus_takes_the_trace_of_a_request(tmp_path: Path) -> None:
    tool("prometheus")
    make_version(tmp_path)
    with local_server(model_store=tmp_path) as server, server.client() as client:
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        assert client.post("/predict", json={"inputs": "good"}, headers=headers).status_code == 200
        target = {"targets": [server.url.removeprefix("http://")]}
        scrape = {"job_name": "valence", "scrape_interval": "1s", "static_configs": [target]}
        with (
            prometheus(tmp_path, {"scrape_configs": [scrape]}) as url,
            httpx.Client(base_url=url, timeout=30, trust_env=False) as asking,
        ):
            found: list[str] = []

            def given_back() -> bool:
                asked: dict[str, str | float] = {"query": QUERY, "start": time.time() - 600}
                asked["end"] = time.time() + 600
                series = asking.get("/api/v1/query_exemplars", params=asked).raise_for_status().json()["data"]
                found[:] = [one["labels"]["trace_id"] for of in series for one in of["exemplars"]]
                return bool(found)

            eventually(given_back, "an exemplar")
            assert found == [TRACE]
