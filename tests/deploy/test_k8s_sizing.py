"""What scales the pods, and the table of sizes, follow from one measurement, which is on record."""

import json
import math
import re
import subprocess
import sys

from tests.deploy.k8s_manifests import K8S, ROOT, container_of, only, quantity

MEASURED = json.loads((K8S / "measured.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "load_tests/RESULTS.md").read_text(encoding="utf-8")


def test_both_autoscalers_scale_alike() -> None:
    cpu, flight = (
        only("production", "HorizontalPodAutoscaler")["spec"],
        only("production-keda", "ScaledObject")["spec"],
    )
    advanced = flight["advanced"]["horizontalPodAutoscalerConfig"]
    assert (cpu["minReplicas"], cpu["maxReplicas"]) == (flight["minReplicaCount"], flight["maxReplicaCount"])
    assert cpu["behavior"] == advanced["behavior"]
    assert cpu["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300
    (target,) = [one["resource"]["target"] for one in cpu["metrics"]]
    (trigger,) = [one for one in flight["triggers"] if one["type"] == "cpu"]
    assert (target["type"], str(target["averageUtilization"])) == (
        trigger["metricType"],
        trigger["metadata"]["value"],
    )
    assert flight["fallback"]["behavior"] == "currentReplicasIfHigher"
    assert cpu["minReplicas"] <= flight["fallback"]["replicas"] <= cpu["maxReplicas"]
    assert advanced["name"] == only("production", "HorizontalPodAutoscaler")["metadata"]["name"]


def test_the_threshold_follows_from_the_measured_knee() -> None:
    (trigger,) = [
        one
        for one in only("production-keda", "ScaledObject")["spec"]["triggers"]
        if one["type"] == "prometheus"
    ]
    assert trigger["metricType"] == "AverageValue"
    in_flight = MEASURED["knee_requests_per_s"] * MEASURED["knee_p50_ms"] / 1000
    assert trigger["metadata"]["threshold"] == str(math.floor(0.7 * in_flight))
    assert quantity(container_of("production-keda")["resources"]["limits"]["cpu"]) == MEASURED["pod_cores"]
    check = subprocess.run(
        [sys.executable, "scripts/k8s_sizing.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stderr


def test_the_record_has_the_numbers_that_are_sized_with() -> None:
    """A row of the knee has the rate and then the p50 behind its first cell."""
    rows = re.findall(r"^\|[^|\n]*the knee[^|\n]*\| *([^|]+?) *\| *([^|]+?) *\|", RESULTS, re.MULTILINE)
    assert (f"{MEASURED['knee_requests_per_s']:g}", f"{MEASURED['knee_p50_ms']:g}") in rows
    assert f"plateau {MEASURED['resident_plateau_mb']} MB" in RESULTS


def test_the_page_has_a_pod_more_than_the_rate_needs() -> None:
    rows = re.findall(r"^\| ([\d,]+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert rows
    for rate, replicas, cores in rows:
        needed = math.ceil(int(rate.replace(",", "")) / (0.7 * MEASURED["knee_requests_per_s"]))
        assert int(replicas) == needed + 1
        assert int(cores) == int(replicas) * MEASURED["pod_cores"]
