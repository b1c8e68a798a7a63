"""Writes what follows from the measured knee: the autoscaler's threshold and the table of sizes.

python scripts/k8s_sizing.py [--check]

The numbers come from deploy/k8s/measured.json alone; after a new measurement change them there, and run this.
Knows nothing of how they are measured.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
MEASURED = ROOT / "deploy/k8s/measured.json"
SCALED_OBJECT = ROOT / "deploy/k8s/components/keda/scaledobject.yaml"
PAGE = ROOT / "docs/kubernetes.md"

ROOM = 0.7  # of the knee: what is left is for the time that a new pod takes
RATES_PER_S = (100, 250, 500, 1_000, 2_500, 5_000)
LEAST_REPLICAS = 2
_MARKED = re.compile(r"(<!-- sizing: .*? -->\n).*?(<!-- end of sizing -->)", re.DOTALL)
_THRESHOLD = re.compile(r'(\n +threshold: )"[^"]*"')


@dataclass(frozen=True, slots=True)
class Measured:
    """What one pod did: `knee_*` at the last rate that held the latency objective with nobody refused."""

    what: str
    pod_cores: int
    knee_requests_per_s: float
    knee_p50_ms: float
    resident_plateau_mb: float

    @property
    def knee_in_flight(self) -> float:
        """Requests in flight at the knee, by Little's law: rate × time in the service."""
        return self.knee_requests_per_s * self.knee_p50_ms / 1000

    @property
    def threshold(self) -> int:
        """Requests in flight of one pod beyond which another pod is wanted."""
        return max(1, int(ROOM * self.knee_in_flight))

    @property
    def pod_requests_per_s(self) -> float:
        """What one pod is planned for."""
        return ROOM * self.knee_requests_per_s

    def replicas(self, rate_per_s: float) -> int:
        """Pods for this rate, one of which may be away."""
        return max(LEAST_REPLICAS, math.ceil(rate_per_s / self.pod_requests_per_s) + 1)


def read_measured() -> Measured:
    """The numbers of the last measurement."""
    return Measured(**json.loads(MEASURED.read_text(encoding="utf-8")))


def section(measured: Measured) -> str:
    """What the page says of sizes."""
    rows = "".join(
        f"| {rate:,} | {measured.replicas(rate)} | {measured.replicas(rate) * measured.pod_cores} |\n"
        for rate in RATES_PER_S
    )
    knee, p50 = f"{measured.knee_requests_per_s:g}", f"{measured.knee_p50_ms:g}"
    pod_rate = f"{measured.pod_requests_per_s:.0f}"
    return (
        f"One pod of {measured.pod_cores} cores was measured: its knee is at {knee} requests/s, with a p50 "
        f"of {p50} ms. By Little's law, with the p50 for the mean, which\n"
        f"is rather too little than too much, {measured.knee_in_flight:.1f} requests are in flight there. "
        f"Plan with {ROOM:.0%} of it: **{pod_rate} requests/s a pod**, and let the\n"
        f"autoscaler add a pod at **{measured.threshold} requests in flight**.\n\n"
        f"| requests/s at the peak | replicas (÷ {pod_rate}, rounded up, and one that may be away) | cores |"
        f"\n|---|---|---|\n{rows}"
    )


def written(measured: Measured) -> dict[Path, str]:
    """Each file as it should be.

    Raises:
        ValueError: a file has no place for its number.
    """
    scaled, told = _THRESHOLD.subn(rf'\g<1>"{measured.threshold}"', SCALED_OBJECT.read_text(encoding="utf-8"))
    page, marked = _MARKED.subn(rf"\g<1>{section(measured)}\g<2>", PAGE.read_text(encoding="utf-8"))
    if told != 1 or marked != 1:
        raise ValueError(f"{told} thresholds in {SCALED_OBJECT.name}, {marked} tables in {PAGE.name}")
    return {SCALED_OBJECT: scaled, PAGE: page}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 1 when `--check` finds a file out of date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, tell whether it is fresh")
    options = parser.parse_args(arguments)
    stale = {
        path: text
        for path, text in written(read_measured()).items()
        if path.read_text(encoding="utf-8") != text
    }
    for path, text in stale.items():
        if options.check:
            print(f"{path.relative_to(ROOT)} is out of date: python scripts/k8s_sizing.py", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
