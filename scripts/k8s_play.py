"""Runs the pod of the Kubernetes Deployment by podman, and checks that it is what the manifest says.

Its user, its limits, its threads by the downward API, its probes, an answer of the real model, its memory
when every connection brings a body, its end with exit code 0 within the grace period. Exit status: 0 all of
that holds, 1 something does not, 77 this machine cannot do it (with the reason).
"""

import argparse
import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from typing import Any

from scripts.image_build import (
    EXIT_CANNOT,
    IMAGE,
    TOOLS,
    CannotError,
    enter_namespace,
    run,
    use_own_storage,
)
from scripts.k8s_pod import Pod, ask, playing, use_podman_here

TEXT = "I loved every minute of it."
_TOOLS = TOOLS | {"catatonit": "catatonit"}  # the first process of what podman holds a pod together with
_UNITS = {"Mi": 2**20, "Gi": 2**30}
_FILTERED = "2"  # of "Seccomp" in /proc: by a profile


class WrongError(Exception):
    """The pod is not what the manifest says; the message says how."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, and print what was found. Returns the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="scripts/k8s_play", description=__doc__)
    parser.add_argument(
        "--overlay", default="production", help="of deploy/k8s/overlays (default: %(default)s)"
    )
    parser.add_argument(
        "--image", default=IMAGE, help="in the store of scripts/image_check (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=8000, help="of this machine (default: %(default)s)")
    asked = parser.parse_args(given)
    try:
        enter_namespace("scripts.k8s_play", given, tools=_TOOLS)
        if "CONTAINERS_STORAGE_CONF" not in os.environ:
            use_own_storage()
        use_podman_here()
        _check_can(asked.image, asked.port)
        with playing(asked.overlay, image=asked.image, port=asked.port) as pod:
            try:
                _check(pod)
            except (WrongError, OSError) as error:
                raise WrongError(f"{error}\n{pod.log()}") from error
    except CannotError as error:
        print(f"k8s_play: cannot be done here: {error}", file=sys.stderr)
        return EXIT_CANNOT
    except (WrongError, RuntimeError) as error:
        print(f"k8s_play: {error}", file=sys.stderr)
        return 1
    return 0


def _check_can(image: str, port: int) -> None:
    if not run("podman", "images", "--quiet", "--filter", f"reference={image}"):
        raise CannotError(f"there is no {image}: scripts/image_check --build-only makes it")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise CannotError(f"port {port} is taken: choose another with --port") from error


def _check(pod: Pod) -> None:
    started_s = pod.started_after_s()
    _require(started_s is not None, "the startup probe never succeeds")
    _say("startup probe", f"200 after {started_s:.1f} s")
    for kind in ("readiness", "liveness"):
        _require(pod.probe(kind) == HTTPStatus.OK, f"the {kind} probe gets {pod.probe(kind)}")
    _check_process(pod)
    _check_limits(pod)
    answer = json.loads(_predict(pod.port))
    best = answer["predictions"][0]
    _require(best["label"] == "positive", f"it says {best}")
    _say("predict", f"200, {best['label']} {best['score']:.3f}, version {answer['version']}")
    _check_memory(pod)
    _check_end(pod)


def _check_process(pod: Pod) -> None:
    status, context = pod.proc(), pod.spec["securityContext"]
    _require(set(status["Uid"].split()) == {str(context["runAsUser"])}, f"it runs as {status['Uid']}")
    _require(set(status["Gid"].split()) == {str(context["runAsGroup"])}, f"its group is {status['Gid']}")
    for kind in ("CapEff", "CapPrm", "CapBnd"):
        _require(int(status[kind], 16) == 0, f"it has capabilities: {kind} {status[kind]}")
    _require(status["NoNewPrivs"] == "1", "it may gain privileges")
    _require(status["Seccomp"] == _FILTERED, "no seccomp profile filters its calls")
    _require("ro" in pod.mount_options("/"), "its root can be written")
    _require("rw" in pod.mount_options("/tmp"), "/tmp cannot be written")  # noqa: S108 - of the pod
    _say("process", f"uid {context['runAsUser']}, no capabilities, seccomp, read-only root, /tmp to write")


def _check_limits(pod: Pod) -> None:
    """podman enforces what the manifest limits, and the service runs a lane for each of these cores."""
    limits = pod.manifest["resources"]["limits"]
    cores, memory = int(limits["cpu"]), _bytes(limits["memory"])
    _require(int(pod.inspect("HostConfig.Memory")) == memory, "another memory limit")
    quota = int(pod.inspect("HostConfig.CpuQuota")) / int(pod.inspect("HostConfig.CpuPeriod"))
    _require(quota == cores, f"a quota of {quota} cores")
    seen = _metrics(pod.port, "valence_lanes", "valence_threads_per_lane", "valence_cpu_quota_cores")
    possible = min(cores, len(os.sched_getaffinity(0)))
    wanted = {"valence_lanes": cores, "valence_threads_per_lane": 1, "valence_cpu_quota_cores": possible}
    _require(seen == wanted, f"the service sees {seen}, not {wanted}")
    _say("limits", f"{cores} cores and {memory // 2**20} MiB; {cores} lanes of one thread")


def _check_memory(pod: Pod) -> None:
    """Every connection that may be open brings a whole body, and the pod stays within its limit."""
    environment = {one["name"]: one.get("value", "") for one in pod.manifest["env"]}
    # One is left for the probes.
    connections, size = (
        int(environment["VALENCE_MAX_CONNECTIONS"]) - 1,
        int(environment["VALENCE_MAX_BODY_BYTES"]),
    )
    about = f"Host: a\r\nContent-Type: application/json\r\nContent-Length: {size}"
    head = f"POST /predict HTTP/1.1\r\n{about}\r\n\r\n"
    with ExitStack() as opened:
        asking = []
        for _ in range(connections):
            one = opened.enter_context(socket.create_connection(("127.0.0.1", pod.port), timeout=30))
            one.sendall(head.encode() + b" " * (size - 1))
            asking.append(one)
        for kind in ("liveness", "readiness"):
            _require(pod.probe(kind) == HTTPStatus.OK, f"{kind} gets {pod.probe(kind)} while bodies arrive")
        for one in asking:
            one.sendall(b" ")
        answers = Counter(one.recv(12)[9:] for one in asking)
    peak, limit = (
        int(pod.proc()["VmHWM"].split()[0]) * 1024,
        _bytes(pod.manifest["resources"]["limits"]["memory"]),
    )
    _require(set(answers) <= {b"400", b"408"}, f"bodies of spaces get {answers}")
    _require(peak < limit, f"{peak} bytes")
    said = f"{connections} bodies of {size / 1e3:.0f} kB at one time: peak {peak / 1e6:.0f} MB"
    _say("memory", f"{said}, {peak / limit:.0%} of the limit")


def _check_end(pod: Pod) -> None:
    """After SIGTERM it is unready, still answers, and ends with 0 before the kubelet would kill it."""
    sleep_s = pod.manifest["lifecycle"]["preStop"]["sleep"]["seconds"]
    bound_s, told_s = pod.spec["terminationGracePeriodSeconds"] - sleep_s, time.monotonic()
    run("podman", "kill", "--signal", "TERM", pod.container)
    while pod.probe("readiness") != HTTPStatus.SERVICE_UNAVAILABLE:
        _require(time.monotonic() - told_s < bound_s, "never unready after SIGTERM")
    _predict(pod.port)
    while pod.inspect("State.Running") == "true":
        _require(time.monotonic() - told_s < bound_s, f"it still runs {bound_s} s after SIGTERM")
        time.sleep(0.1)
    took_s, code = time.monotonic() - told_s, pod.inspect("State.ExitCode")
    _require(code == "0", f"exit code {code}")
    _say("SIGTERM", f"unready, still answering, exit code 0 after {took_s:.1f} s of the {bound_s} s it has")


def _predict(port: int) -> str:
    status, answer = ask(port, "/predict", {"inputs": TEXT})
    _require(status == HTTPStatus.OK, f"POST /predict answered {status}")
    return answer


def _metrics(port: int, *names: str) -> Mapping[str, float]:
    lines = [line.split() for line in ask(port, "/metrics")[1].splitlines()]
    return {fields[0]: float(fields[1]) for fields in lines if fields[0] in names}


def _bytes(quantity: str) -> int:
    return int(quantity[:-2]) * _UNITS[quantity[-2:]]


def _say(what: str, found: str) -> None:
    print(f"{what}: {found}", flush=True)


def _require(holds: Any, otherwise: str) -> None:
    if not holds:
        raise WrongError(otherwise)


if __name__ == "__main__":
    sys.exit(main())
