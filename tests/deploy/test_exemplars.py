"""A real Prometheus scrapes the service and gives back the trace of a request."""

import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml

from load_tests.service_process import free_port
from tests.models import make_version
from tests.server import eventually, local_server

TRACE = "0af7651916cd43dd8448eb211c80319c"
QUERY = 'valence_http_request_duration_seconds_bucket{route="/predict"}'


def test_prometheus_takes_the_trace_of_a_request(tmp_path: Path) -> None:
    command = shutil.which("prometheus")
    if command is None:
        pytest.skip("prometheus is not installed")
    make_version(tmp_path)
    config, port = tmp_path / "prometheus.yml", free_port()
    with local_server(model_store=tmp_path) as server, server.client() as client:
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        assert client.post("/predict", json={"inputs": "good"}, headers=headers).status_code == 200
        target = {"targets": [server.url.removeprefix("http://")]}
        scrape = {"job_name": "valence", "scrape_interval": "1s", "static_configs": [target]}
        config.write_text(yaml.safe_dump({"scrape_configs": [scrape]}), encoding="utf-8")
        process = subprocess.Popen(
            [
                command,
                f"--config.file={config}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
            ],
            stderr=subprocess.DEVNULL,
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as asking:
                found: list[str] = []

                def given_back() -> bool:
                    asked: dict[str, str | float] = {"query": QUERY, "start": time.time() - 600}
                    asked["end"] = time.time() + 600
                    try:
                        answer = asking.get("/api/v1/query_exemplars", params=asked)
                    except httpx.TransportError:
                        return False
                    if answer.status_code == httpx.codes.OK:
                        series = answer.json()["data"]
                        found[:] = [one["labels"]["trace_id"] for of in series for one in of["exemplars"]]
                    return bool(found)

                eventually(given_back, "an exemplar")
                assert found == [TRACE]
        finally:
            process.kill()
            process.wait()
