"""The pod of an overlay of deploy/k8s, run by `podman kube play` without a cluster, and what its probes see.

podman gives it the image, the user, the limits, the downward API and the volumes of the manifest. It has no
kubelet: the probes are asked from here, as the manifest says, and `preStop` and `fsGroup` are left out. Knows
nothing of what is right.
"""

import http.client
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import yaml

from scripts.image_build import CACHE, ROOT, CannotError, run

FILES = 1024
# Neither systemd nor a journal runs in a plain container or a small virtual machine; limits there are low.
_PODMAN = f"""[containers]
default_ulimits = ["nofile={FILES}:{FILES}", "nproc={FILES}:{FILES}"]
[engine]
runtime = "crun"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that runs.

    Attributes:
        spec: as in the manifest.
        container: the name of its only container.
        process: its first process, as this machine numbers it.
    """

    spec: Mapping[str, Any]
    container: str
    process: int
    port: int

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The container as the manifest has it."""
        return self.spec["containers"][0]  # type: ignore[no-any-return]

    def probe(self, kind: str) -> int | None:
        """The status that the kubelet would get for this probe; None where there is no answer in its time."""
        probe = self.manifest[f"{kind}Probe"]
        return status(self.port, probe["httpGet"]["path"], timeout_s=probe["timeoutSeconds"])

    def started_after_s(self) -> float | None:
        """Ask the startup probe until it succeeds, as often as it says. None: the kubelet would give up."""
        probe, started_s = self.manifest["startupProbe"], time.monotonic()
        for _ in range(probe["failureThreshold"]):
            if self.probe("startup") == HTTPStatus.OK:
                return time.monotonic() - started_s
            time.sleep(probe["periodSeconds"])
        return None

    def proc(self) -> dict[str, str]:
        """/proc/<pid>/status of its first process."""
        lines = Path(f"/proc/{self.process}/status").read_text(encoding="utf-8").splitlines()
        return dict(line.split(":\t", 1) for line in lines if ":\t" in line)

    def mount_options(self, path: str) -> set[str]:
        """How it sees what is mounted there."""
        lines = Path(f"/proc/{self.process}/mountinfo").read_text(encoding="utf-8").splitlines()
        mounts = [line.split() for line in lines]
        return set(next(fields for fields in mounts if fields[4] == path)[5].split(","))

    def inspect(self, field: str) -> str:
        """One field of `podman inspect`."""
        return run("podman", "inspect", "--format", f"{{{{.{field}}}}}", self.container).strip()

    def log(self) -> str:
        """The last lines that it wrote."""
        ran = subprocess.run(
            [shutil.which("podman") or "podman", "logs", "--tail", "20", self.container],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return ran.stdout


def use_podman_here() -> None:
    """Let podman run where neither systemd nor a journal is. Call it after `use_own_storage`."""
    path = CACHE / "containers.conf"
    path.write_text(_PODMAN, encoding="utf-8")
    os.environ["CONTAINERS_CONF"] = str(path)


def deployment(overlay: str) -> dict[str, Any]:
    """The Deployment of an overlay, as kubectl would apply it.

    Raises:
        CannotError: there is no kubectl.
    """
    if shutil.which("kubectl") is None:
        raise CannotError("kubectl is missing")
    text = run("kubectl", "kustomize", str(ROOT / "deploy/k8s/overlays" / overlay))
    made: dict[str, Any] = next(one for one in yaml.safe_load_all(text) if one["kind"] == "Deployment")
    return made


def playable(manifest: Mapping[str, Any], *, image: str, port: int) -> dict[str, Any]:
    """The same Deployment for podman: another image, on this port of the host, without probes.

    It is not started again when it ends: how it ended is looked at.
    """
    made: dict[str, Any] = json.loads(json.dumps(manifest))
    made["spec"]["template"]["spec"]["restartPolicy"] = "Never"
    (container,) = made["spec"]["template"]["spec"]["containers"]
    container["image"] = image
    for name in ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"):
        del container[name]  # ports: those of the host are used; the others: without systemd podman cannot
    for one in container["env"]:
        if one["name"] == "VALENCE_PORT":
            one["value"] = str(port)
    return made


@contextmanager
def playing(overlay: str, *, image: str, port: int) -> Iterator[Pod]:
    """The pod of the overlay, just started. It is removed at the end."""
    manifest = deployment(overlay)
    path = CACHE / "pod.yaml"
    path.write_text(yaml.safe_dump(playable(manifest, image=image, port=port)), encoding="utf-8")
    name = manifest["metadata"]["name"]
    container = f"{name}-pod-0-{manifest['spec']['template']['spec']['containers'][0]['name']}"
    run("podman", "pod", "rm", "--force", "--ignore", "--time", "0", f"{name}-pod-0")
    try:
        run("podman", "kube", "play", "--network", "host", str(path))
        process = int(run("podman", "inspect", "--format", "{{.State.Pid}}", container))
        yield Pod(manifest["spec"]["template"]["spec"], container, process, port)
    finally:
        run("podman", "pod", "rm", "--force", "--ignore", "--time", "0", f"{name}-pod-0")
        path.unlink()


def status(port: int, path: str, *, timeout_s: float) -> int | None:
    """The status of a GET, or None without an answer in time."""
    try:
        return ask(port, path, timeout_s=timeout_s)[0]
    except OSError:
        return None


def ask(port: int, path: str, body: Any = None, *, timeout_s: float = 30.0) -> tuple[int, str]:
    """Status and text of one request; POST when there is a body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()
