"""A virtual environment for each of the other servers, made from PyPI when it is missing.

Knows nothing of what runs in them.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

ONNX = ("onnxruntime==1.32.0", "tokenizers==0.23.3", "numpy")
PINS: dict[str, tuple[str, ...]] = {
    "mosec": ("mosec==0.9.8", *ONNX),
    "litserve": ("litserve==0.2.19", *ONNX),
    "infinity": ("infinity-emb[torch,server]==0.0.78", "torch==2.13.0", "transformers==4.57.6"),
    "pipeline": ("fastapi==0.165.0", "uvicorn[standard]==0.54.0", "torch==2.13.0", "transformers==5.24.0"),
}
"""What is installed for each server; the rest is what pip chooses."""
SHOWN = ("mosec", "litserve", "infinity-emb", "onnxruntime", "tokenizers", "torch", "transformers", "fastapi")
MARK = "installed.json"


class InstallError(Exception):
    """pip failed; holds what it said."""


def python_of(name: str, cache: Path) -> Path:
    """The interpreter of an environment; of this one for a name that has no pins."""
    return cache / name / "bin" / "python" if name in PINS else Path(sys.executable)


def install(name: str, cache: Path) -> bool:
    """Make the environment unless it is there with these pins; whether it was made. Raises InstallError."""
    if name not in PINS:
        return False
    folder, wanted = cache / name, list(PINS[name])
    mark = folder / MARK
    if mark.is_file() and json.loads(mark.read_text(encoding="utf-8")) == wanted:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    # Without a pip of its own: Debian's python3 cannot give one, and the pip that is here can fill it.
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    _run(
        [sys.executable, "-m", "pip", "--python", str(python_of(name, cache)), "install", "--quiet", *wanted]
    )
    mark.write_text(json.dumps(wanted), encoding="utf-8")
    return True


def versions(name: str, cache: Path) -> dict[str, str]:
    """Of the libraries that matter, as they are installed."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "have = {d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}\n"
        "print(json.dumps({n: have[n] for n in sys.argv[1:] if n in have}))"
    )
    found: dict[str, str] = json.loads(_run([str(python_of(name, cache)), "-c", code, *SHOWN]))
    return found


def _run(command: list[str]) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise InstallError(f"{' '.join(command)}\n{ran.stdout[-1500:]}\n{ran.stderr[-1500:]}")
    return ran.stdout
