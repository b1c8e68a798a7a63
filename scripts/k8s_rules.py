"""Writes the PrometheusRule of the Kubernetes manifests from the rules that Prometheus itself reads.

python scripts/k8s_rules.py [--check]     (needs PyYAML, of the extra `deploy`)

Knows nothing of what the rules say.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
RULES = ROOT / "deploy/prometheus/rules"
TARGET = ROOT / "deploy/k8s/components/monitoring/prometheusrule.yaml"
HEAD = "# Made by scripts/k8s_rules.py from deploy/prometheus/rules; do not edit.\n"


class _Readable(yaml.SafeDumper):
    """Writes text of several lines as a block, so that an expression can be read."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Readable.add_representer(str, _text)


def groups(folder: Path = RULES) -> list[dict[str, Any]]:
    """The groups of every file of rules, in the order of the files' names."""
    return [
        group
        for path in sorted(folder.glob("*.yml"))
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    ]


def manifest() -> str:
    """The PrometheusRule as YAML."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {
            "name": "valence",
            # kube-prometheus-stack takes only what carries the name of its release.
            "labels": {"app.kubernetes.io/name": "valence", "release": "kube-prometheus-stack"},
        },
        "spec": {"groups": groups()},
    }
    return HEAD + yaml.dump(rule, Dumper=_Readable, sort_keys=False, width=200)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 1 when `--check` finds the file out of date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, tell whether it is fresh")
    options = parser.parse_args(arguments)
    made = manifest()
    if options.check:
        fresh = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == made
        if not fresh:
            print(f"{TARGET.relative_to(ROOT)} is out of date: python scripts/k8s_rules.py", file=sys.stderr)
        return 0 if fresh else 1
    TARGET.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
