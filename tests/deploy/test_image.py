"""The image: its recipe, and the programs that the recipe runs. `scripts/image_check` builds and runs it."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import yaml

from deploy.image.dependencies import main as print_dependencies
from deploy.image.dependencies import requirements
from deploy.image.pack_store import main as pack_from_command_line
from deploy.image.pack_store import pack
from scripts.image_build import EXIT_CANNOT, TOOLS
from service.engines import Engine, EngineOptions, open_engine
from service.errors import StartupError
from service.settings import Settings
from service.store import Version, open_version, versions
from tests.server import SAFETY_S, local_server, serving

ROOT = Path(__file__).parent.parent.parent
STORE = ROOT / "model_store"
PROJECT = ROOT / "pyproject.toml"


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the Dockerfile: its name, and the rest in one line."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    joined = re.sub(r"\\\n\s*", "", text)
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def last_stage() -> list[tuple[str, str]]:
    """The instructions of what is shipped."""
    every = instructions()
    start = max(number for number, (name, _) in enumerate(every) if name == "FROM")
    return every[start:]


def only(name: str, among: list[tuple[str, str]]) -> str:
    """The rest of the one instruction of this name."""
    [found] = [rest for instruction, rest in among if instruction == name]
    return found


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint is not installed")
    ran = subprocess.run(
        [hadolint, "--failure-threshold", "style", ROOT / "Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout == ""


def test_every_stage_is_made_on_one_pinned_base() -> None:
    stages: set[str] = set()
    for name, rest in instructions():
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            assert base == "${PYTHON_IMAGE}" or base in stages
            stages.add(stage)
    base = next(rest for name, rest in instructions() if name == "ARG" and rest.startswith("PYTHON_IMAGE="))
    assert re.search(r":\d+\.\d+\.\d+-slim-\w+$", base), base


def test_the_shipped_stage_runs_nothing_and_starts_without_a_shell() -> None:
    shipped = last_stage()
    assert "RUN" not in dict(shipped)
    assert only("USER", shipped) == "65532:65532"
    assert only("STOPSIGNAL", shipped) == "SIGTERM"
    assert json.loads(only("ENTRYPOINT", shipped)) == ["valence"]
    assert json.loads(only("CMD", shipped)) == ["serve"]
    assert json.loads(only("HEALTHCHECK", shipped).partition("CMD ")[2])[0].endswith("/python")
    assert only("EXPOSE", shipped) == str(Settings.model_fields["port"].default)
    # Dependencies first: what changes most comes last.
    copied = [rest.split()[-1] for name, rest in shipped if name == "COPY"]
    assert copied[0] == "/app/.venv"
    assert copied[-1] == "/app/lib"


def test_the_image_is_labelled_with_this_release() -> None:
    release = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["version"]
    assert ("ARG", f"RELEASE={release}") in instructions()
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in only("LABEL", last_stage())


def test_the_recipe_holds_no_secret_and_names_real_settings() -> None:
    known = {f"VALENCE_{name.upper()}" for name in Settings.model_fields}
    for name, rest in instructions():
        assert name != "ADD"
        if name in {"ARG", "ENV"}:
            assert not re.search(r"key|secret|token|password|credential", rest, re.IGNORECASE), rest
            assert set(re.findall(r"VALENCE_\w+", rest)) <= known


def test_what_the_recipe_copies_is_there_and_reaches_the_build() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    assert lines[1] == "*", "all is kept out but what is named"
    let_through = {line.removeprefix("!") for line in lines if line.startswith("!")}
    for name, rest in instructions():
        if name == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source in let_through or any(source.startswith(f"{path}/") for path in let_through)


def test_dependencies_are_those_of_the_project_and_the_extras() -> None:
    table = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    extras = table["optional-dependencies"]
    assert requirements(PROJECT, ["cpu"]) == [*table["dependencies"], *extras["cpu"]]
    # Every extra that the page and the recipe offer.
    for extra in ("gpu", "torch", "openvino", "tracing"):
        assert requirements(PROJECT, [extra])[-len(extras[extra]) :] == extras[extra]


def test_dependencies_as_the_recipe_asks_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--project", str(PROJECT), "--extras", "gpu", "--also", "onnxruntime-gpu[cuda,cudnn]"]
    assert print_dependencies(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["onnxruntime-gpu", "onnxruntime-gpu[cuda,cudnn]"]
    assert print_dependencies(["--project", str(PROJECT), "--extras", "cpu,none"]) == 2
    assert "no extra is called none; there are cpu," in capsys.readouterr().err


@pytest.fixture(scope="module")
def packed_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store as the image has it."""
    store = tmp_path_factory.mktemp("packed")
    pack(STORE, store, model="sentiment", version=None, precisions=["int8"])
    return store


def test_a_packed_version_holds_what_was_asked_for(packed_store: Path) -> None:
    whole, packed = open_version(STORE, "sentiment"), open_version(packed_store, "sentiment")
    assert [model.precision for model in packed.manifest.models] == ["int8"]
    named = {packed.manifest.tokenizer.path, *(model.path for model in packed.manifest.models)}
    assert {path.name for path in packed.path.iterdir()} == {"manifest.json", "README.md", *named}
    assert replace(packed.manifest, models=whole.manifest.models) == whole.manifest


@pytest.mark.parametrize("number", versions(STORE, "sentiment"))
def test_another_version_can_be_asked_for(tmp_path: Path, number: int) -> None:
    """As the recipe asks, with its build argument VERSION; it is alone in the store of the image."""
    assert pack_from_command_line([str(STORE), str(tmp_path), "--version", str(number)]) == 0
    assert versions(tmp_path, "sentiment") == [number]


def test_the_structure_test_holds_for_the_version_that_is_packed(packed_store: Path, tmp_path: Path) -> None:
    """Its look at the model store, which names no version, put to a packed one."""
    every = yaml.safe_load((ROOT / "deploy/image/structure.yaml").read_text(encoding="utf-8"))["commandTests"]
    [looking] = [one for one in every if "manifest" in one["name"]]
    code = looking["args"][1]
    assert "/app/model_store" in code
    [expected] = looking["expectedOutput"]

    def told_of(store: Path) -> str:
        command = [sys.executable, "-c", code.replace("/app/model_store", str(store))]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert re.search(expected, told_of(packed_store))
    pack(STORE, tmp_path, model="sentiment", version=None, precisions=["all"])
    assert not re.search(expected, told_of(tmp_path)), "float32 would be in the image, too"


def test_a_version_that_cannot_be_packed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StartupError, match="no file in float16; there are float32, int8"):
        pack(STORE, tmp_path, model="sentiment", version=None, precisions=["int8", "float16"])
    newest = open_version(STORE, "sentiment").path
    damaged = shutil.copytree(newest, tmp_path / "damaged/sentiment" / newest.name)
    with (damaged / "model.onnx").open("ab") as file:
        file.write(b"!")
    # Also when the damaged file is not one that is wanted: the version is not what was made.
    assert pack_from_command_line([str(tmp_path / "damaged"), str(tmp_path / "packed")]) == 1
    assert "model.onnx" in capsys.readouterr().err
    assert not (tmp_path / "packed").exists()


def health_check(url: str) -> int:
    """Its exit code for the service there."""
    ran = subprocess.run(
        [sys.executable, "-S", ROOT / "deploy/image/healthcheck.py"],
        # A proxy that is not there: the check must go past it.
        env={"VALENCE_PORT": url.rpartition(":")[2], "http_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stderr == ""
    return ran.returncode


def test_a_packed_version_serves_and_is_healthy(packed_store: Path) -> None:
    with serving(model_store=packed_store) as server:
        assert health_check(server.url) == 0
        answer = httpx.post(f"{server.url}/predict", json={"inputs": "A joy."}, trust_env=False)
        assert answer.json()["predictions"][0]["label"] == "positive"
    assert health_check(server.url) == 1, "nothing serves there any more"


def test_a_service_that_is_not_ready_is_not_healthy() -> None:
    gate = threading.Event()

    def open_late(version: Version, options: EngineOptions) -> Engine:
        assert gate.wait(SAFETY_S)
        return open_engine(version, options)

    with local_server(open_engine=open_late, ready=False) as server:
        assert health_check(server.url) == 1
        gate.set()


@pytest.mark.skipif(shutil.which("sh") is None, reason="no shell")
def test_the_check_of_the_image_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "sh").symlink_to("/bin/sh")
    (tmp_path / "dirname").symlink_to(shutil.which("dirname") or "/usr/bin/dirname")
    ran = subprocess.run(
        [ROOT / "scripts/image_check"],
        env={"PATH": str(tmp_path), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == EXIT_CANNOT, ran.stderr
    if os.geteuid() == 0:
        assert "apt-get install" in ran.stderr
        assert all(package in ran.stderr for package in TOOLS.values())
    else:
        assert "root" in ran.stderr
