"""`scripts/k8s_play` runs the pod of the manifest and no other, and says so where it cannot."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.image_build import EXIT_CANNOT, TOOLS
from scripts.k8s_pod import playable
from tests.deploy.k8s_manifests import OVERLAYS, ROOT, only
from tests.server import SAFETY_S


def differences(one: Any, other: Any, path: str = "") -> set[str]:
    """The paths at which two documents are not the same."""
    if isinstance(one, dict) and isinstance(other, dict):
        inner = {key: differences(one.get(key), other.get(key), f"{path}/{key}") for key in one | other}
        return set().union(*inner.values())
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return set().union(*(differences(a, b, path) for a, b in zip(one, other, strict=True)))
    return set() if one == other else {path}


def test_what_is_played_is_the_pod_of_the_manifest() -> None:
    pod = "/spec/template/spec"
    container = f"{pod}/containers"
    left_out = {f"{container}/{name}Probe" for name in ("startup", "readiness", "liveness")}
    left_out |= {f"{container}/ports", f"{container}/lifecycle"}
    changed = {f"{pod}/restartPolicy", f"{container}/image", f"{container}/env/value"}
    for overlay in OVERLAYS:
        manifest = only(overlay, "Deployment")
        played = playable(manifest, image="localhost/valence:check", port=8001)
        assert differences(manifest, played) == left_out | changed


def test_a_machine_that_cannot_says_why() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "scripts.k8s_play", "--image", "localhost/valence:none"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=SAFETY_S,
    )
    assert ran.returncode == EXIT_CANNOT, ran.stdout + ran.stderr
    assert ran.stderr.startswith("k8s_play: cannot be done here: ")


def test_a_machine_without_catatonit_is_told_to_install_it(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("tools are looked for as root only")
    for tool in TOOLS:
        (tmp_path / tool).symlink_to(shutil.which("true") or "true")
    ran = subprocess.run(
        [sys.executable, "-m", "scripts.k8s_play"],
        cwd=ROOT,
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=SAFETY_S,
    )
    assert ran.returncode == EXIT_CANNOT, ran.stdout + ran.stderr
    assert ran.stderr.endswith(" catatonit\n")
