"""Builds the unmodified Dockerfile on a Debian machine without a Docker engine, by buildah.

The base image that the Dockerfile names is made from Debian's own packages (mmdebstrap), since no image
registry is asked. pip inside the build goes where pip on this machine goes. All that is made lies in
`.cache/image`, in a store of containers of its own. Needs root: change of root, mounts. Knows nothing of what
is in the image.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache/image"
IMAGE = "localhost/valence:check"
MEGABYTE = 1_000_000

EXIT_CANNOT = 77
"""What a script ends with when this machine cannot do what it asks for."""

TOOLS = {
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
    "podman": "podman",
    "crun": "crun",
    "unshare": "util-linux",
    "umount": "mount",
}
"""The Debian package of each command."""

_INSIDE = "VALENCE_IMAGE_NAMESPACE"
# The base has what python:slim has: Python with venv and pip, certificates, and Python in /usr/local/bin.
_PACKAGES = "python3,python3-venv,ca-certificates"
_LINKS = 'ln -s /usr/bin/python3 "$1/usr/local/bin/python3"; ln -s python3 "$1/usr/local/bin/python"'


class CannotError(Exception):
    """This machine lacks what the check needs; the message says what, and how to get it."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Uncompressed, in megabytes: the base, all above it, and each layer by the folder that it fills."""

    base_mb: float
    above_mb: float
    layers_mb: dict[str, float]


def enter_namespace(module: str, arguments: Sequence[str], *, tools: Mapping[str, str] = TOOLS) -> None:
    """Start this command again in a mount namespace of its own, where mounts of ours cannot stay.

    There a version-2 cgroup mount beside version 1 is taken away, which confuses the container tools.

    Raises:
        CannotError: not Linux with root, or a tool is missing.
    """
    if os.environ.pop(_INSIDE, None):
        subprocess.run(["umount", "/sys/fs/cgroup/unified"], check=False, capture_output=True)  # noqa: S607
        return
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise CannotError("it needs Linux and root: a change of root and mounts")
    if missing := {package for tool, package in tools.items() if shutil.which(tool) is None}:
        packages = " ".join(sorted(missing))
        raise CannotError(f"tools are missing: apt-get install --yes --no-install-recommends {packages}")
    tried = subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True, text=True)  # noqa: S607
    if tried.returncode:
        raise CannotError(f"it may not make a mount namespace (CAP_SYS_ADMIN): {tried.stderr.strip()}")
    sys.stdout.flush()
    command = ["unshare", "--mount", sys.executable, "-m", module, *arguments]
    os.execvpe("unshare", command, os.environ | {_INSIDE: "1"})  # noqa: S606, S607 - ourselves, from PATH


def use_own_storage() -> None:
    """Let buildah and podman keep everything in `.cache/image`, apart from what this machine has."""
    CACHE.mkdir(parents=True, exist_ok=True)
    configuration = CACHE / "storage.conf"
    configuration.write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{CACHE / "graph"}"\nrunroot = "{CACHE / "run"}"\n',
        encoding="utf-8",
    )
    os.environ["CONTAINERS_STORAGE_CONF"] = str(configuration)


def run(*command: str, env: Mapping[str, str] | None = None) -> str:
    """The standard output of a command.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | (env or {})
    )
    if ran.returncode:
        said = "\n".join((ran.stdout + ran.stderr).splitlines()[-80:])
        raise RuntimeError(f"{' '.join(command[:3])} … ended with {ran.returncode}:\n{said}")
    return ran.stdout


def base_name() -> str:
    """The base image that the Dockerfile names."""
    found = re.search(
        r"^ARG PYTHON_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE
    )
    if found is None:
        raise RuntimeError("the Dockerfile names no PYTHON_IMAGE")
    return found[1]


def make_base() -> None:
    """A root file system from Debian's packages, under the name of the base; one that is there is kept.

    Raises:
        CannotError: this machine is not a Debian with a Python that serves.
    """
    name = base_name()
    if name in run("podman", "images", "--format", "{{.Repository}}:{{.Tag}}").split():
        return
    suite, sources = _debian()
    archive = CACHE / "base.tar"
    run(
        "mmdebstrap",
        "--quiet",
        "--mode=root",
        "--variant=minbase",
        f"--include={_PACKAGES}",
        f"--customize-hook={_LINKS}",
        suite,
        str(archive),
        *map(str, sources),
    )
    run("podman", "import", "--quiet", str(archive), name)
    archive.unlink()


def build(arguments: Mapping[str, str], *, tag: str = IMAGE) -> None:
    """Build the Dockerfile with these build arguments. Nothing is pulled."""
    given = [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
    volumes = [part for path, inside in _pip_mounts() for part in ("--volume", f"{path}:{inside}:ro")]
    run(
        *("buildah", "build", "--format", "docker", "--pull-never", "--layers", "--force-rm"),
        *(*given, *volumes, "--tag", tag, "."),
        env={"BUILDAH_ISOLATION": "chroot"},
    )


def sizes(tag: str = IMAGE) -> Sizes:
    """What the image and its base weigh."""
    whole, base = (
        json.loads(run("podman", "image", "inspect", name))[0]["Size"] / MEGABYTE
        for name in (tag, base_name())
    )
    history = json.loads(run("podman", "history", "--human=false", "--no-trunc", "--format", "json", tag))
    copied = [layer for layer in history if " COPY " in layer["CreatedBy"]]
    layers = {str(layer["CreatedBy"]).split()[-1]: layer["size"] / MEGABYTE for layer in reversed(copied)}
    return Sizes(base, whole - base, layers)


def _debian() -> tuple[str, list[Path]]:
    """The suite of this machine, and its own lists of sources that name it."""
    release = Path("/etc/os-release").read_text(encoding="utf-8")
    fields = dict(line.split("=", 1) for line in release.splitlines() if "=" in line)
    suite = fields.get("VERSION_CODENAME", "").strip('"')
    folder = Path("/etc/apt")
    lists = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*.[ls]*"))]
    sources = [
        path
        for path in lists
        if path.is_file()
        and path.suffix in {".list", ".sources"}
        and suite in path.read_text(encoding="utf-8").split()
    ]
    if fields.get("ID") != "debian" or not suite or not sources:
        raise CannotError("the base is made from this machine's own Debian packages, and this is no Debian")
    return suite, sources


def _pip_mounts() -> list[tuple[Path, str]]:
    """What sends pip inside the build where pip goes here: one file of settings, and what these name."""
    listed = run(sys.executable, "-m", "pip", "config", "list")
    settings = dict(re.findall(r"^(?:global|install|:env:)\.([\w.-]+)='(.*)'$", listed, re.MULTILINE))
    settings = {name.lstrip("."): value for name, value in settings.items()}
    # A cap that was set for this machine's Python is not one for the image, which has constraints of its own.
    settings.pop("constraint", None)
    lines = [f"{name} = {value}" for name, value in settings.items()]
    path = CACHE / "pip.conf"
    path.write_text("\n".join(["[global]", *lines, ""]), encoding="utf-8")
    words = [word for value in settings.values() for word in value.split()]
    named = [Path(word) for word in words if word.startswith("/")]
    # An index in a folder leads to files beside it.
    named += [Path(word.removeprefix("file://")).parent for word in words if word.startswith("file:///")]
    there = {path for path in named if path.exists() and path != Path("/")}
    return [(path, "/etc/pip.conf"), *((folder, str(folder)) for folder in sorted(there))]
