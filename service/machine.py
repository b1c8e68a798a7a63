"""What decides here how fast a model runs: processor, instruction sets, quota, versions of the engines.

Knows nothing of settings, models or measurements.
"""

import contextlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict

from service.manifest import STRICT

PACKAGES = ("onnxruntime", "onnxruntime-gpu", "torch", "openvino")
"""The distributions whose speed is measured."""
INSTRUCTIONS = {
    *("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2"),
}
"""The instruction sets that decide how fast a matrix product is, as Linux names them (x86 and Arm)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What makes figures of another machine worthless here. `packages`: the versions of the engines."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    processor: str
    instructions: list[str]
    cpu_quota_cores: float
    packages: dict[str, str]


def this_machine(cores: float, *, cpuinfo: Path = Path("/proc/cpuinfo")) -> Machine:
    """What this machine is.

    Args:
        cores: the CPU quota.
        cpuinfo: where Linux describes its processors; another file in tests.
    """
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", "")).split()
    # Arm's processors have numbers in the place of a name.
    part = [fields[name] for name in ("CPU implementer", "CPU part") if name in fields]
    return Machine(
        processor=fields.get("model name") or " ".join([platform.machine(), *part]),
        instructions=sorted(INSTRUCTIONS & set(flags)),
        cpu_quota_cores=cores,
        packages=dict(_installed()),
    )


def _installed() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            yield package, version(package)
