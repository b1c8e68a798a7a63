"""What the autoscaler asks Prometheus rises and falls with the requests that the real service holds."""

import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from service.catalogue import CATALOGUE
from tests.deploy.k8s_manifests import found, only
from tests.deploy.k8s_prometheus import now_s, prometheus, scrape_config
from tests.models import make_version
from tests.reliability.gates import hold, in_flight, predict
from tests.server import SAFETY_S, eventually, local_server
from tests.service.stand_ins import Opener

OVERLAY = "production-keda"


def asked() -> dict[str, str]:
    """The metadata of the trigger that reads Prometheus."""
    (trigger,) = [
        one for one in only(OVERLAY, "ScaledObject")["spec"]["triggers"] if one["type"] == "prometheus"
    ]
    return {name: str(value) for name, value in trigger["metadata"].items()}


def test_requests_in_flight_ask_for_pods_and_let_them_go(tmp_path: Path) -> None:
    query, threshold = asked()["query"], int(asked()["threshold"])
    window = re.search(r"\[(\d+)m\]", query)
    assert window is not None
    window_s = 60.0 * int(window[1])
    held_requests = 2 * threshold + 1
    store, opener, started_s = tmp_path / "store", Opener(), now_s()
    make_version(store)
    with (
        local_server(
            open_engine=opener, model_store=store, lanes=1, request_timeout_s=600.0, max_batch_items=4
        ) as server,
        server.client() as client,
        ThreadPoolExecutor(held_requests) as pool,
        prometheus(tmp_path, scrape_config(OVERLAY, server.url.removeprefix("http://"))) as scraped,
    ):
        idle_s = now_s()
        assert scraped.mean_since(query, since_s=idle_s, window_s=window_s) == 0
        assert scraped.query(query, at_s=started_s - 1) == [], "nothing known is nothing, and not 0"

        answers = [hold(opener, client, pool)]
        answers += [pool.submit(predict, client) for _ in range(held_requests - 1)]
        eventually(lambda: in_flight(server) == held_requests, "all are in flight")
        busy = scraped.mean_since(query, since_s=now_s(), window_s=window_s)
        assert busy == held_requests
        assert math.ceil(busy / threshold) == 3
        (since_idle,) = scraped.query(query, at_s=idle_s + window_s)
        assert 0 < since_idle < held_requests, "a moment of load is not yet a load"

        opener.engine.gate.set()
        assert {one.result(SAFETY_S).status_code for one in answers} == {200}
        eventually(lambda: in_flight(server) == 0, "none is in flight")
        assert scraped.mean_since(query, since_s=now_s(), window_s=window_s) == 0


def test_every_metric_that_an_autoscaler_reads_is_a_gauge_of_ours() -> None:
    gauges = {one.name for one in CATALOGUE if one.type == "gauge"}
    for overlay in ("production", "production-keda"):
        for owner in found(overlay, "ScaledObject"):
            for trigger in owner["spec"]["triggers"]:
                named = set(re.findall(r"\bvalence_\w+", trigger["metadata"].get("query", "")))
                assert named <= gauges
                assert bool(named) == (trigger["type"] == "prometheus")
                namespace = re.findall(r'namespace="(\w+)"', trigger["metadata"].get("query", ""))
                assert set(namespace) <= {owner["metadata"]["namespace"]}
        for owner in found(overlay, "HorizontalPodAutoscaler"):
            assert [one["resource"]["name"] for one in owner["spec"]["metrics"]] == ["cpu"]
