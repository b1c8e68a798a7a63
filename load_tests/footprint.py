"""Measures what the service costs before it has answered anything: import, start to ready, resident memory.

    .venv-serve/bin/python load_tests/footprint.py

Starts `valence serve` as it is installed beside the Python that runs this, on a free port, several times, and
prints the median of each figure. Needs nothing but the serving install. Linux only (/proc).
"""

import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path

ROUNDS = 5
# All different: texts with the same tokens share a row.
TEXTS = [f"Great product number {one}, highly recommend!" for one in range(32)]


def import_s() -> float:
    """Wall seconds of `import service.app` in a fresh interpreter, without the interpreter's own start."""
    code = "import time; t = time.perf_counter(); import service.app; print(time.perf_counter() - t)"
    return float(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    )


def resident_mb(pid: int) -> tuple[float, float]:
    """Resident memory now and its peak, in MB (10^6 bytes)."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = {m[1]: int(m[2]) for m in re.finditer(r"^(VmRSS|VmHWM):\s+(\d+) kB", status, re.MULTILINE)}
    return kib["VmRSS"] * 1.024e-3, kib["VmHWM"] * 1.024e-3


def get(url: str, body: bytes | None = None) -> int:
    """Status of a GET, or of a POST of JSON; 0 when nobody listens yet."""
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def one_start(precision: str) -> dict[str, float]:
    """Start the service once; seconds from the start of the process, megabytes at the end of each phase."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {
        **os.environ,
        "VALENCE_PORT": str(port),
        "VALENCE_PRECISION": precision,
        "VALENCE_DRAIN_DELAY_S": "0",
    }
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "service", "serve"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            figures: dict[str, float] = {}
            for phase in ("live", "ready"):
                while get(f"{url}/health/{phase}") != 200:
                    if process.poll() is not None:
                        raise SystemExit(f"the service ended with code {process.returncode}")
                    time.sleep(0.01)
                figures[f"start to {phase}, s"] = time.perf_counter() - began
            figures["resident when ready, MB"] = resident_mb(process.pid)[0]
            body = json.dumps({"inputs": TEXTS}).encode()
            for _ in range(50):
                get(f"{url}/predict", body)
            figures["resident after 50 lists of 32, MB"], figures["resident, peak, MB"] = resident_mb(
                process.pid
            )
            return figures
        finally:
            process.terminate()


def main() -> None:
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    print(
        f"{cpu[1] if cpu else platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        f"Python {platform.python_version()}, onnxruntime {version('onnxruntime')}, median of {ROUNDS}"
    )
    print(f"import service.app, s: {statistics.median(import_s() for _ in range(ROUNDS)):.2f}")
    for precision in ("int8", "float32"):
        starts = [one_start(precision) for _ in range(ROUNDS)]
        for name in starts[0]:
            print(f"{precision}: {name}: {statistics.median(start[name] for start in starts):.2f}")


if __name__ == "__main__":
    main()
