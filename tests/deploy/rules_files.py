"""The files of deploy/prometheus as data: rules, their tests, and the metrics that an expression names.

Knows nothing of the service or of a server.
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/prometheus"
RULE_FILES = sorted((FOLDER / "rules").glob("*.yml"))
TEST_FILES = sorted((FOLDER / "tests").glob("*.yml"))
WORDS = {"and", "or", "unless", "by", "on", "bool", "group_left", "without", "ignoring", "offset"}


def read(path: Path) -> Any:
    """What a YAML file holds."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def rules() -> list[dict[str, Any]]:
    """Every rule of every file."""
    return [rule for path in RULE_FILES for group in read(path)["groups"] for rule in group["rules"]]


def records() -> list[dict[str, Any]]:
    """The recording rules."""
    return [rule for rule in rules() if "record" in rule]


def alerts() -> list[dict[str, Any]]:
    """The alerting rules."""
    return [rule for rule in rules() if "alert" in rule]


def metrics_in(expr: str) -> set[str]:
    """The names of the metrics that an expression reads."""
    bare = re.sub(r"\{[^{}]*\}|\[[^\]]*\]", " ", expr)  # matchers and ranges
    bare = re.sub(r"\b(by|on|group_left|without|ignoring)\s*\([^()]*\)", " ", bare)  # labels
    bare = re.sub(r"\b[a-z_]+\s*\(", " (", bare)  # functions
    return set(re.findall(r"(?<![\w.:])[a-zA-Z_:][\w:]*", bare)) - WORDS


def outside_metrics() -> set[str]:
    """The metrics that others make, from the one list of them."""
    return {name for names in read(FOLDER / "external_metrics.yml").values() for name in names}


def tool(name: str) -> str:
    """Where a command is; the test is skipped where it is not."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(name: str, *arguments: str | Path, stdin: bytes | None = None) -> str:
    """What a tool prints; it must succeed."""
    ran = subprocess.run([tool(name), *map(str, arguments)], input=stdin, capture_output=True, check=False)
    said = ran.stdout.decode()
    assert ran.returncode == 0, said + ran.stderr.decode()
    return said


def alerts_in_tests(*, firing: bool) -> set[str]:
    """The alerts that a test expects to fire, or not to fire."""
    return {
        one["alertname"]
        for path in TEST_FILES
        for case in read(path)["tests"]
        for one in case.get("alert_rule_test", ())
        if bool(one["exp_alerts"]) == firing
    }
