"""What must be true of a server after any number of odd requests.

Knows a server by its address alone.
"""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.server import JSON, SAFETY_S, eventually

MARKER = "xyzzy"
"""A word that stands in what is sent, and nowhere else."""

_AT_REST = ("valence_queue_items", "valence_queue_tokens", "valence_lanes_busy")


def assert_unharmed(url: str, headers: dict[str, str]) -> None:
    """Nothing is in flight or waits, nothing was a 500, and a good request is answered rightly.

    Args:
        headers: open the service, if it is not open to all.
    """
    with httpx.Client(base_url=url, headers=headers, timeout=SAFETY_S, trust_env=False) as client:
        answer = client.post("/predict", content=b'{"inputs": ["a good film", "awful"]}', headers=JSON)
        assert answer.status_code == 200
        assert [one["label"] for one in answer.json()["predictions"]] == ["positive", "negative"]
        assert client.get("/health/ready").status_code == 200
        eventually(lambda: left_over(client) == {}, "nothing is left over")
        for name, labels, value in samples(client):
            if name == "valence_http_requests_total" and labels["status"] == "500":
                assert value == 0, labels


def left_over(client: httpx.Client) -> dict[str, float]:
    """The gauges that are not at rest; the scrape that tells is in flight itself."""
    found = {name: value for name, _, value in samples(client) if name in _AT_REST and value}
    for name, labels, value in samples(client):
        if name == "valence_http_requests_in_flight" and value != (labels["route"] == "/metrics"):
            found[labels["route"]] = value
    return found


def samples(client: httpx.Client) -> list[tuple[str, dict[str, str], float]]:
    """Every series of the service now."""
    text = client.get("/metrics").text
    return [
        (one.name, one.labels, one.value)
        for family in text_string_to_metric_families(text)
        for one in family.samples
    ]
