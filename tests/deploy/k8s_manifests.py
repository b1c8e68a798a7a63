"""What the overlays of deploy/k8s build to, and short ways to their parts. Knows nothing of what is right."""

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy/k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())

Manifest = dict[str, Any]

_UNITS = {"": 1, "m": 0.001, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 10**3, "M": 10**6, "G": 10**9}


def build(folder: Path) -> str:
    """What kustomize makes of a folder, as YAML. Skips where there is no kubectl."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    ran = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@cache
def built(overlay: str) -> str:
    """The overlay as it would be applied."""
    return build(K8S / "overlays" / overlay)


@cache
def documents(overlay: str) -> tuple[Manifest, ...]:
    """Every object of the overlay. They are shared: nobody changes them."""
    return tuple(yaml.safe_load_all(built(overlay)))


def found(overlay: str, kind: str) -> list[Manifest]:
    """The objects of this kind."""
    return [one for one in documents(overlay) if one["kind"] == kind]


def only(overlay: str, kind: str) -> Manifest:
    """The one object of this kind."""
    (one,) = found(overlay, kind)
    return one


def pod_of(overlay: str) -> Manifest:
    """The specification of the Deployment's pod."""
    spec: Manifest = only(overlay, "Deployment")["spec"]["template"]["spec"]
    return spec


def container_of(overlay: str) -> Manifest:
    """The pod's only container."""
    (one,) = pod_of(overlay)["containers"]
    return dict(one)


def quantity(text: str) -> float:
    """A quantity of Kubernetes as a number: bytes, or cores."""
    number = text.rstrip("mKMGki")
    return float(number) * _UNITS[text[len(number) :]]


def environment_of(container: Manifest) -> dict[str, str]:
    """What the container finds in its environment, with the downward API answered as a cluster does."""
    values = {}
    for one in container["env"]:
        if "value" in one:
            values[one["name"]] = one["value"]
        else:
            asked = one["valueFrom"]["resourceFieldRef"]
            section, _, resource = asked["resource"].partition(".")
            assert asked["containerName"] == container["name"]
            cores = quantity(container["resources"][section][resource]) / quantity(asked["divisor"])
            assert cores == int(cores), "the downward API would round up"
            values[one["name"]] = str(int(cores))
    return values


def custom_resource_faults(objects: list[Manifest]) -> list[str]:
    """What the schemas of KEDA and of the Prometheus Operator say. Skips where they cannot be had."""
    folder, node, npm = K8S / "schemas", shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node or npm is not installed")
    if not (folder / "node_modules").is_dir():
        ran = subprocess.run(
            [npm, "ci", "--no-audit", "--no-fund"], cwd=folder, capture_output=True, text=True, check=False
        )
        if ran.returncode:
            pytest.skip("npm ci could not fetch the schemas: " + ran.stderr[-200:])
    checked = subprocess.run(
        [node, "check.mjs"],
        cwd=folder,
        input=json.dumps(objects),
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode in {0, 1}, checked.stderr
    assert bool(checked.stdout) == bool(checked.returncode), checked.stderr
    return checked.stdout.splitlines()
