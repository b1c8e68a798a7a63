"""A server of Prometheus' family in a process of its own, from ready to killed.

Knows nothing of the service, of rules and of what is asked. Needs its command (Debian: apt-get install
prometheus prometheus-alertmanager).
"""

import http.client
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import yaml

from load_tests.service_process import free_port

READY_S = 60.0


@contextmanager
def running(command: Sequence[str | Path], log: Path, *, port: int) -> Iterator[str]:
    """The URL of what the command serves on this port of 127.0.0.1, once it is ready; killed at the end.

    Raises:
        FileNotFoundError: there is no such command.
        RuntimeError: it ends or is not ready in time; the text has the end of its log.
    """
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        give_up_s = time.monotonic() + READY_S
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() > give_up_s:
                raise RuntimeError(f"{log.stem} does not start: {log.read_text(encoding='utf-8')[-500:]}")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@contextmanager
def prometheus(folder: Path, config: Mapping[str, Any], *options: str) -> Iterator[str]:
    """The URL of a Prometheus with this configuration, which keeps exemplars. Raises as `running`.

    Args:
        folder: for its files; relative paths of the configuration start there.
    """
    file, port = folder / "prometheus.yml", free_port()
    file.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
    command = [
        "prometheus",
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
        *options,
    ]
    with running(command, folder / "prometheus.log", port=port) as url:
        yield url


def _is_ready(port: int) -> bool:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        try:
            connection.request("GET", "/-/ready")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
