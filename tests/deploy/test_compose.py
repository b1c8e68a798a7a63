"""The compose files: what they start is hardened, pinned, and wired to what is in the repository."""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from service.settings import Settings

ROOT = Path(__file__).parent.parent.parent
COMPOSE = ROOT / "docker-compose.yml"
GPU = ROOT / "deploy/compose/gpu.yml"
HOST_NETWORK = ROOT / "deploy/compose/host-network.yml"
TOOLS = Path(sys.executable).parent
AS_JSON = ("config", "--format", "json", "--no-env-resolution")
SERVICES = {"valence", "prometheus", "alertmanager", "grafana", "locust"}


def tool(name: str) -> Path:
    """The path of a command of the extra deploy."""
    if not (TOOLS / name).exists():
        pytest.skip(f"{name} is not installed")
    return TOOLS / name


def resolved(*files: Path) -> dict[str, Any]:
    """What compose makes of the files, whatever .env this machine has."""
    chosen = [part for file in files for part in ("--file", str(file))]
    ran = subprocess.run(
        [tool("docker-compose"), *chosen, "--env-file", "/dev/null", "--profile", "*", *AS_JSON],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "warn" not in ran.stderr.lower(), ran.stderr
    made: dict[str, Any] = json.loads(ran.stdout)
    return made


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    """Each service, resolved."""
    made: dict[str, dict[str, Any]] = resolved(COMPOSE)["services"]
    return made


def seconds(text: str) -> float:
    """A duration such as 1m30s."""
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([hms])", text))


def test_the_schema_of_compose_holds() -> None:
    ran = subprocess.run(
        [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", COMPOSE, GPU],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_load_is_sent_only_when_it_is_asked_for(services: dict[str, dict[str, Any]]) -> None:
    assert set(services) == SERVICES
    assert {name for name, one in services.items() if one.get("profiles")} == {"locust"}
    assert services["locust"]["profiles"] == ["load"]


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_service_is_hardened(services: dict[str, dict[str, Any]], name: str) -> None:
    one = services[name]
    assert one["read_only"] is True
    assert one["cap_drop"] == ["ALL"]
    assert one["security_opt"] == ["no-new-privileges:true"]
    assert not set(one) & {"privileged", "cap_add", "pid", "ipc", "network_mode", "user", "devices"}
    assert any(entry.partition(":")[0] == "/tmp" for entry in one["tmpfs"])  # noqa: S108
    assert all(port["host_ip"] == "127.0.0.1" for port in one.get("ports", []))
    assert float(one["cpus"]) > 0
    assert int(one["mem_limit"]) > 0
    assert int(one["pids_limit"]) > 0
    for mount in one.get("volumes", []):
        if mount["type"] == "bind":
            assert mount["read_only"] is True
            assert Path(mount["source"]).is_relative_to(ROOT)
            assert Path(mount["source"]).exists()


def test_images_of_others_are_pinned(services: dict[str, dict[str, Any]]) -> None:
    for name, one in services.items():
        if "build" not in one:
            assert re.search(r":v?\d+\.\d+\.\d+$", one["image"]), name
    # The load is written for the locust that the tests run.
    assert services["locust"]["image"].endswith(f":{version('locust')}")


def test_one_waits_for_another_only_until_it_is_healthy(services: dict[str, dict[str, Any]]) -> None:
    for one in services.values():
        for other, how in one.get("depends_on", {}).items():
            assert how["condition"] == "service_healthy"
            assert services[other]["healthcheck"]["test"][0] == "CMD", "no shell is needed for it"


def test_the_settings_of_the_service_are_real_and_fit(services: dict[str, dict[str, Any]]) -> None:
    one, fields = services["valence"], Settings.model_fields
    given = {name.removeprefix("VALENCE_").lower() for name in one["environment"]}
    assert given <= set(fields)
    assert [port["target"] for port in one["ports"]] == [int(one["environment"]["VALENCE_PORT"])]
    # The service takes one lane of one thread for each core of its quota; part of a core would lie idle.
    assert float(one["cpus"]).is_integer()
    assert not given & {"lanes", "threads_per_lane"}
    stops_s = fields["drain_delay_s"].default + fields["stop_timeout_s"].default
    assert seconds(one["stop_grace_period"]) >= stops_s + 5


def test_the_example_of_settings_can_be_used_as_it_is() -> None:
    ran = subprocess.run(
        [tool("docker-compose"), "--file", COMPOSE, "--env-file", ".env.example", "config", "--quiet"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    named = re.findall(r"^#?(\w+)=", (ROOT / ".env.example").read_text(encoding="utf-8"), re.MULTILINE)
    assert named
    assert set(named) <= {f"VALENCE_{name.upper()}" for name in Settings.model_fields}
    # It becomes .env, which a newcomer does not have.
    written = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]["valence"]
    assert written["env_file"] == [{"path": ".env", "required": False}]


def test_prometheus_scrapes_and_tells_what_is_there(services: dict[str, dict[str, Any]]) -> None:
    chosen = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    jobs = [*chosen["scrape_configs"], *chosen["alerting"]["alertmanagers"]]
    targets = {target for job in jobs for one in job["static_configs"] for target in one["targets"]}
    ports = {name: {port["target"] for port in one.get("ports", [])} for name, one in services.items()}
    for target in targets:
        host, _, port = target.partition(":")
        assert int(port) in ports["prometheus" if host == "localhost" else host], target
    assert "valence:8000" in targets
    folder = f"{Path(target_of(services['prometheus'], 'deploy/prometheus/prometheus.yml')).parent}"
    assert target_of(services["prometheus"], "deploy/prometheus/rules") == f"{folder}/rules"
    assert all(pattern.startswith("rules/") for pattern in chosen["rule_files"])


def test_grafana_is_provisioned(services: dict[str, dict[str, Any]]) -> None:
    one = services["grafana"]
    assert target_of(one, "deploy/grafana/provisioning") == "/etc/grafana/provisioning"
    folder = target_of(one, "deploy/grafana/dashboards")
    provisioning = ROOT / "deploy/grafana/provisioning"
    [providers] = (yaml.safe_load(path.read_text()) for path in sorted(provisioning.glob("dashboards/*.yml")))
    assert [provider["options"]["path"] for provider in providers["providers"]] == [folder]
    [sources] = (yaml.safe_load(path.read_text()) for path in sorted(provisioning.glob("datasources/*.yml")))
    for source in sources["datasources"]:
        url = urlsplit(source["url"])
        assert url.port in {port["target"] for port in services[str(url.hostname)]["ports"]}
    home = one["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (ROOT / "deploy/grafana/dashboards" / Path(home).relative_to(folder)).is_file()


def target_of(service: dict[str, Any], source: str) -> str:
    """Where a file or folder of the repository is in the container."""
    [target] = [mount["target"] for mount in service["volumes"] if mount.get("source") == str(ROOT / source)]
    return str(target)


def test_on_a_gpu_the_same_service_is_built_for_it() -> None:
    one = resolved(COMPOSE, GPU)["services"]["valence"]
    assert one["build"]["args"] == {
        "EXTRAS": "gpu",
        "ALSO": "onnxruntime-gpu[cuda,cudnn]",
        "PRECISIONS": "float32",
        "VERSION": "",
    }
    assert one["environment"]["VALENCE_DEVICE"] == "cuda"
    assert one["read_only"] is True
    [device] = one["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_what_is_started_to_be_checked_is_as_hardened(services: dict[str, dict[str, Any]]) -> None:
    one = resolved(COMPOSE, HOST_NETWORK)["services"]["valence"]
    changed = {key for key in one | services["valence"] if one.get(key) != services["valence"].get(key)}
    assert changed == {
        *("image", "pull_policy", "build", "network_mode", "networks", "ports"),
        *("environment", "healthcheck", "logging", "ulimits"),
    }


def test_what_the_recipe_is_given_it_knows() -> None:
    recipe = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for files in ((COMPOSE,), (COMPOSE, GPU)):
        for name in resolved(*files)["services"]["valence"]["build"]["args"]:
            assert re.search(rf"^ARG {name}=", recipe, re.MULTILINE), name
