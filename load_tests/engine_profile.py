"""Where the engine's time goes, by onnxruntime's own profile: microseconds of each kind of node.

    python -m load_tests.engine_profile [--version model_store/<name>/<version>] [--precision int8]

One thread, and the graph optimised as the service does. The profile itself costs about a microsecond a node.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime

from load_tests.chosen import chosen_version
from load_tests.verdict import machine, note
from service.core import TokenBatch
from service.engines import choose_model, feed
from service.engines.onnx import INTEGERS, SLOW_FUSIONS

SHAPES = ((1, 25), (8, 25), (1, 512))
"""A sentence, a batch of them, and a long text: (texts, tokens of each)."""
RUNS = 20
WARM_UP = 5


def profile(model: bytes, texts: int, tokens: int, *, folder: Path) -> tuple[Counter[str], float]:
    """Microseconds a run of each kind of node, and of the whole run; the median run of `RUNS`.

    Args:
        folder: where onnxruntime writes its profile.
    """
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    settings.enable_mem_pattern = False
    settings.enable_profiling = True
    settings.profile_file_prefix = str(folder / f"{texts}x{tokens}")
    session = onnxruntime.InferenceSession(
        model, settings, providers=["CPUExecutionProvider"], disabled_optimizers=SLOW_FUSIONS
    )
    ids = np.arange(texts * tokens, dtype=np.int64) % 1000 + 1000
    batch = TokenBatch(ids, np.full(texts, tokens, dtype=np.int64))
    inputs = feed(batch, 0, inputs={node.name: INTEGERS[node.type] for node in session.get_inputs()})
    for _ in range(WARM_UP + RUNS):
        session.run(None, inputs)
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return _median_run(events)


def _median_run(events: Sequence[dict[str, object]]) -> tuple[Counter[str], float]:
    runs: list[tuple[float, Counter[str]]] = []
    nodes: Counter[str] = Counter()
    for event in events:
        arguments, spent_us = event.get("args"), float(str(event.get("dur", 0)))
        if event.get("cat") == "Node" and isinstance(arguments, dict) and "op_name" in arguments:
            nodes[str(arguments["op_name"])] += int(spent_us)
        elif event.get("name") == "model_run":
            runs.append((spent_us, nodes))
            nodes = Counter()
    measured = sorted(runs[WARM_UP:], key=lambda run: run[0])
    whole_us, by_kind = measured[len(measured) // 2]
    return by_kind, whole_us


def main() -> None:
    """Print a table with a column for each shape."""
    parser = argparse.ArgumentParser(description="Profiles the nodes of a model.")
    parser.add_argument("--version", type=Path, help="its folder; the one that is served")
    parser.add_argument("--precision", default="int8")
    options = parser.parse_args()
    version = chosen_version(options.version)
    file = choose_model(version.manifest, "onnx", precision=options.precision, device="cpu")
    note(machine())
    with tempfile.TemporaryDirectory() as work:
        profiles = [profile(version.read(file), *shape, folder=Path(work)) for shape in SHAPES]
    kinds = sum((by_kind for by_kind, _ in profiles), Counter()).most_common()
    print(f"{'µs a run':32}" + "".join(f"{f'{texts} × {tokens}':>18}" for texts, tokens in SHAPES))
    for kind, _ in kinds:
        cells = [f"{by_kind[kind]:>10} {by_kind[kind] / whole_us:6.1%}" for by_kind, whole_us in profiles]
        print(f"{kind:32}" + "".join(f"{cell:>18}" for cell in cells))
    between = [whole_us - by_kind.total() for by_kind, whole_us in profiles]
    print(f"{'between the nodes':32}" + "".join(f"{us:>10.0f}{'':8}" for us in between))
    print(f"{'whole run':32}" + "".join(f"{whole_us:>10.0f}{'':8}" for _, whole_us in profiles))


if __name__ == "__main__":
    main()
