"""The numbers of the manifests agree with the settings, with what was measured, and with each other."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.catalogue import ROUTE_STATUSES
from service.quota import plan_lanes
from service.settings import PREFIX, Settings
from tests.deploy.k8s_manifests import (
    K8S,
    OVERLAYS,
    ROOT,
    build,
    container_of,
    documents,
    environment_of,
    found,
    only,
    pod_of,
    quantity,
)

PRODUCTION = ("production", "production-keda")
MARGIN_S = 5
MEASURED = json.loads((K8S / "measured.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def settings_of(overlay: str) -> Settings:
    """The settings as the container would read them; a variable that is none fails."""
    values = environment_of(container_of(overlay))
    fields = {name.removeprefix(PREFIX).lower(): value for name, value in values.items()}
    assert set(fields) <= set(Settings.model_fields)
    made: dict[str, Any] = fields
    return Settings(**made)


@each_overlay
def test_a_pod_has_a_lane_for_each_core_or_a_gpu(overlay: str) -> None:
    resources, settings = container_of(overlay)["resources"], settings_of(overlay)
    assert resources["requests"]["cpu"] == resources["limits"]["cpu"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    cores = quantity(resources["limits"]["cpu"])
    assert cores == int(cores)
    plan = plan_lanes(cores, settings.lanes, settings.threads_per_lane)
    assert plan.warning is None
    if overlay == "gpu":
        assert settings.device == "cuda"
        assert resources["limits"]["nvidia.com/gpu"] == "1"
    else:
        assert plan.lanes * plan.threads_per_lane == cores


@each_overlay
def test_memory_has_room_for_what_was_measured_and_for_bodies(overlay: str) -> None:
    settings = settings_of(overlay)
    limit = quantity(container_of(overlay)["resources"]["limits"]["memory"])
    # Each body may be held twice while it is put together; a quarter of the limit stays free.
    bodies = 2 * settings.max_connections * settings.max_body_bytes
    assert MEASURED["resident_plateau_mb"] * 1e6 + bodies <= 0.75 * limit


@each_overlay
def test_a_pod_that_goes_has_the_time_it_takes(overlay: str) -> None:
    pod, settings = pod_of(overlay), settings_of(overlay)
    sleep_s = container_of(overlay)["lifecycle"]["preStop"]["sleep"]["seconds"]
    takes_s = sleep_s + settings.drain_delay_s + settings.stop_timeout_s
    assert pod["terminationGracePeriodSeconds"] >= takes_s + MARGIN_S
    readiness = container_of(overlay)["readinessProbe"]
    assert settings.drain_delay_s >= readiness["periodSeconds"], "nobody would see that it drains"
    assert settings.keep_alive_s > 60, "nginx keeps an idle connection for 60 s"


@each_overlay
def test_the_probes_ask_what_they_mean(overlay: str) -> None:
    container, settings = container_of(overlay), settings_of(overlay)
    paths = {
        kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")
    }
    assert paths == {"startup": "/health/ready", "readiness": "/health/ready", "liveness": "/health/live"}
    assert set(paths.values()) <= set(ROUTE_STATUSES)
    (port,) = container["ports"]
    assert (port["name"], port["containerPort"]) == ("http", settings.port)
    assert {container[f"{kind}Probe"]["httpGet"]["port"] for kind in paths} == {"http"}
    assert settings.host == "0.0.0.0"  # noqa: S104 - a pod is asked from outside
    startup, liveness = container["startupProbe"], container["livenessProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 120
    assert liveness["timeoutSeconds"] == 5


@each_overlay
def test_a_pod_can_do_no_more_than_it_must(overlay: str) -> None:
    pod, container = pod_of(overlay), container_of(overlay)
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    user = re.search(r"^USER (\d+)", dockerfile, re.MULTILINE)
    assert user is not None
    assert pod["securityContext"]["runAsUser"] == int(user[1]) == 65532
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    labels = only(overlay, "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@each_overlay
def test_everything_is_in_the_namespace_of_its_overlay(overlay: str) -> None:
    name = only(overlay, "Namespace")["metadata"]["name"]
    others = [one for one in documents(overlay) if one["kind"] != "Namespace"]
    assert {one["metadata"].get("namespace") for one in others} == {name}


@each_overlay
def test_whoever_selects_pods_finds_them(overlay: str) -> None:
    deployment = only(overlay, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    budget = only(overlay, "PodDisruptionBudget")["spec"]
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        budget["selector"]["matchLabels"],
        only(overlay, "Service")["spec"]["selector"],
        *(one["labelSelector"]["matchLabels"] for one in pod_of(overlay)["topologySpreadConstraints"]),
        *(
            one["spec"]["podSelector"]["matchLabels"]
            for one in found(overlay, "NetworkPolicy")
            if one["spec"]["podSelector"]
        ),
    ]
    for selector in selectors:
        assert selector.items() <= labels
        # A selector cannot be changed later: it holds the one label that never will be.
        assert set(selector) == {"app.kubernetes.io/name"}
    assert budget["maxUnavailable"] == 1
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    for one in pod_of(overlay)["topologySpreadConstraints"]:
        assert one["matchLabelKeys"] == ["pod-template-hash"]


@each_overlay
def test_a_rollout_leaves_enough_pods(overlay: str) -> None:
    spec = only(overlay, "Deployment")["spec"]
    rolling = spec["strategy"]["rollingUpdate"]
    if overlay == "gpu":
        assert rolling == {"maxUnavailable": 1, "maxSurge": 0}
        assert spec["replicas"] >= 2, "with one GPU less somebody must answer"
    else:
        assert rolling == {"maxUnavailable": 0, "maxSurge": 1}
    assert spec["minReadySeconds"] == 5


@each_overlay
def test_one_owner_of_the_number_of_pods(overlay: str) -> None:
    owners = found(overlay, "HorizontalPodAutoscaler") + found(overlay, "ScaledObject")
    replicas = only(overlay, "Deployment")["spec"].get("replicas")
    assert (len(owners), replicas is None) == ((1, True) if overlay in PRODUCTION else (0, False))
    for owner in owners:
        assert owner["spec"]["scaleTargetRef"]["name"] == only(overlay, "Deployment")["metadata"]["name"]


def test_the_rules_are_those_of_prometheus() -> None:
    files = sorted((ROOT / "deploy/prometheus/rules").glob("*.yml"))
    assert files
    own = [group for path in files for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]]
    assert only("production", "PrometheusRule")["spec"]["groups"] == own
    check = subprocess.run(
        [sys.executable, "scripts/k8s_rules.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stderr


def test_the_scrape_finds_the_service() -> None:
    monitor, service = only("production", "ServiceMonitor"), only("production", "Service")
    labels = service["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["path"] in ROUTE_STATUSES
    # What the series are called does not depend on who scrapes them.
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    assert labels[monitor["spec"]["jobLabel"]] in {job["job_name"] for job in config["scrape_configs"]}
    assert endpoint["interval"] == config["global"]["scrape_interval"]


def test_only_the_proxy_and_prometheus_come_in() -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in found("production", "NetworkPolicy")}
    assert policies["default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    (rule,) = policies["valence"]["ingress"]
    (port,) = rule["ports"]
    assert port["port"] in {one["name"] for one in container_of("production")["ports"]}
    names = {one["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for one in rule["from"]}
    assert names == {"ingress-nginx", "monitoring"}
    assert "egress" not in policies["valence"]


def test_keys_come_from_a_secret_that_can_be_renewed(tmp_path: Path) -> None:
    """The component on top of the production overlay, as the page says to use it."""
    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "resources": [os.path.relpath(K8S / "overlays/production", tmp_path)],
                "components": [os.path.relpath(K8S / "components/keys", tmp_path)],
            }
        ),
        encoding="utf-8",
    )
    (deployment,) = [one for one in yaml.safe_load_all(build(tmp_path)) if one["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert set(environment_of(container)) == {
        *environment_of(container_of("production")),
        "VALENCE_API_KEYS_FILE",
    }
    file = Path(environment_of(container)["VALENCE_API_KEYS_FILE"])
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "keys"]
    assert file.parent == Path(mount["mountPath"])
    assert "subPath" not in mount
    assert {one["name"] for one in pod["volumes"]} == {"tmp", "keys"}
    secret = next(one["secret"] for one in pod["volumes"] if one["name"] == "keys")
    assert secret["defaultMode"] == 0o440
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"], "the group can read it"
    assert f"create secret generic {secret['secretName']} --from-file={file.name} " in PAGE
