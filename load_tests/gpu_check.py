"""Checks and times everything that runs on a GPU; without one, what a CPU can settle, and says what is open.

    scripts/gpu_check [--out FOLDER] [--short]

Exit status: 0 all was checked and is right, 1 something is wrong, 2 nothing is wrong but not all was checked.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from load_tests import gpu_bench, texts
from load_tests.chosen import chosen_version
from load_tests.gpu_report import OK, OPEN, WRONG, Report, gpus, nvidia, processor, versions
from load_tests.gpu_subjects import FLOAT16_BOUND, FORMS, LANES, Buffered, options, with_gpu_forms
from service.core import Encoding, FloatArray, TokenBatch
from service.engines import Engine, open_engine
from service.errors import StartupError
from service.store import Version
from service.tokenizer import Tokenizer
from service.warmup import check_golden_texts, shapes, warm_up

ROOT = Path(__file__).parent.parent
BOUNDS = {"float32": 1e-3, "float16": FLOAT16_BOUND}
BATCH_ITEMS, BATCH_TOKENS = 256, 16_384
ON_CPU = (1, 512)
PARITY_ITEMS = 16


@dataclass(frozen=True, slots=True)
class Means:
    """What every check needs: texts as tokens, the CPU's float32 logits of them, seconds for a timing."""

    version: Version
    tokenizer: Tokenizer
    encodings: list[Encoding]
    expected: FloatArray
    seconds: float


def check_engine(report: Report, name: str, engine: Engine, means: Means, *, shape: tuple[int, int]) -> None:
    """Golden texts with their company, parity with the CPU in float32, neighbours, and every shape.

    Args:
        shape: lanes that run at the same time, and the most tokens of a batch.
    """
    manifest, (lanes, tokens) = means.version.manifest, shape
    report.check(f"{name}: golden texts", lambda: _golden(engine, means, tokens))
    report.check(f"{name}: parity with float32 on a CPU, and neighbours", lambda: _parity(engine, means))
    grid = shapes(max_tokens=manifest.max_tokens, max_batch_items=BATCH_ITEMS, max_batch_tokens=tokens)
    report.check(f"{name}: all shapes", lambda: _shapes(engine, grid, means, lanes))


def _golden(engine: Engine, means: Means, tokens: int) -> str:
    check_golden_texts(engine, means.tokenizer, means.version.manifest, max_batch_tokens=tokens)
    return f"{len(means.version.manifest.golden_texts)} alone and in company"


def _parity(engine: Engine, means: Means) -> str:
    dice = np.random.default_rng(0).permutation(len(means.encodings))
    logits = np.empty_like(means.expected)
    for at in range(0, len(dice), PARITY_ITEMS):
        chosen = dice[at : at + PARITY_ITEMS]
        logits[chosen] = engine.run(TokenBatch.of([means.encodings[place] for place in chosen]))
    off, bound = float(np.abs(logits - means.expected).max()), BOUNDS[engine.precision]
    turned = int((logits.argmax(1) != means.expected.argmax(1)).sum())
    said = f"|Δlogit| ≤ {off:.2g} (bound {bound:g}), {turned} of {len(dice)} labels turned"
    if not off <= bound:
        raise ValueError(said)
    return said


def _shapes(engine: Engine, grid: Sequence[tuple[int, int]], means: Means, lanes: int) -> str:
    before = nvidia("memory.used")
    warm_up(engine, grid, lanes=lanes, sample=means.encodings[0], go_on=lambda: True)
    memory = f", memory {', '.join(before)} → {', '.join(nvidia('memory.used'))}" if before else ""
    return f"{len(grid)} shapes in {lanes} lanes at the same time{memory}"


def check_cpu_half(report: Report, means: Means, missing: dict[str, str], *, cuda: dict[str, bool]) -> None:
    """What a machine without a GPU can settle: the buffers, the shapes, float16, and the refusals."""
    for precision in ("float32", "float16"):
        name = f"cpu, bound buffers, {precision}"
        if f"onnx/{precision}" in missing:
            report.note(name, OPEN, missing[f"onnx/{precision}"])
        else:
            check_engine(report, name, Buffered(means.version, precision), means, shape=ON_CPU)
    for engine in cuda:
        report.check(
            f"{engine}: does not start where cuda is asked for and hidden", partial(_hidden, means, engine)
        )


def _hidden(means: Means, engine: str) -> str:
    """The service's own check, with no GPU to be seen: it must fail and say why."""
    settings = {"ENGINE": engine, "PRECISION": "float32", "DEVICE": "cuda", "LOG_FORMAT": "json"}
    store = means.version.path.parent.parent
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VALENCE_")}
    ran = subprocess.run(
        [sys.executable, "-m", "service", "check"],
        env=kept
        | {f"VALENCE_{name}": value for name, value in settings.items()}
        | {"VALENCE_MODEL_STORE": str(store), "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    said = (ran.stdout + ran.stderr).strip()
    if ran.returncode == 0 or "cuda" not in said.lower():
        raise ValueError(f"exit status {ran.returncode}: {said[-200:]}")
    return said.rsplit(": ", maxsplit=1)[-1][-200:]


def _int8_is_refused(means: Means) -> str:
    try:
        open_engine(means.version, options("onnx", "int8", "cuda"))
    except StartupError as error:
        return str(error).rsplit(": ", maxsplit=1)[-1]
    raise ValueError("it started")


def check_gpu_half(report: Report, means: Means, missing: dict[str, str], *, cuda: dict[str, bool]) -> None:
    """Every engine and precision on the GPU; what cannot be is noted with the reason."""
    for engine, precision in FORMS:
        name = f"cuda, {engine}/{precision}"
        file = f"{engine}/{precision}" if engine == "onnx" else f"{engine}/float32"
        if not cuda[engine] or file in missing:
            reason = missing.get(file, f"{engine} offers no CUDA here") if cuda[engine] else _why(engine)
            for part in ("golden texts", "parity and neighbours", "all shapes", "speed"):
                report.note(f"{name}: {part}", OPEN, reason)
            continue
        try:
            opened = open_engine(means.version, options(engine, precision, "cuda"))
        except StartupError as error:
            report.note(f"{name}: opens", WRONG, str(error))
            continue
        check_engine(report, name, opened, means, shape=(LANES, BATCH_TOKENS))
        time_engine(report, name, opened, means)
        opened.close()
    if cuda["onnx"]:
        report.check("cuda, onnx/int8: is refused", lambda: _int8_is_refused(means))
    else:
        report.note("cuda, onnx/int8: is refused", OPEN, _why("onnx"))


def _why(engine: str) -> str:
    return f"{engine} offers no CUDA here"


def time_engine(report: Report, name: str, engine: Engine, means: Means) -> None:
    """Adds the figures of an engine."""

    def run() -> str:
        made = list(gpu_bench.bench(engine, name, means.encodings, seconds=means.seconds))
        report.figures.extend(made)
        return ", ".join(f"{one.plan} {one.texts_per_s:,.0f} texts/s" for one in made)

    report.check(f"{name}: speed", run)


def check_served(report: Report, means: Means, sentences: Sequence[str], *, on_gpu: bool) -> None:
    """The service on the GPU under wrk."""
    name = "cuda: served"
    if not on_gpu or shutil.which("wrk") is None:
        report.note(name, OPEN, "wrk is not installed" if on_gpu else _why("onnx"))
        return

    def run() -> str:
        made = gpu_bench.served(
            sentences,
            seconds=5 * means.seconds,
            model_store=means.version.path.parent.parent,
            engine="onnx",
            precision="auto",
            device="cuda",
            lanes=LANES,
            max_batch_items=BATCH_ITEMS,
            max_batch_tokens=BATCH_TOKENS,
        )
        report.figures.extend(made)
        return ", ".join(f"{one.plan}: {one.texts_per_s:,.0f} texts/s" for one in made)

    report.check(name, run)


def cuda_of_engines() -> dict[str, bool]:
    """Which engines say that they can use CUDA."""
    import onnxruntime  # noqa: PLC0415

    found = {"onnx": "CUDAExecutionProvider" in onnxruntime.get_available_providers(), "torchscript": False}
    try:
        import torch  # noqa: PLC0415
    except ModuleNotFoundError:
        return found
    return found | {"torchscript": torch.cuda.is_available()}


def prepare(version: Version, *, short: bool, sentences: Sequence[str]) -> Means:
    """The texts, and what the CPU says of them in float32."""
    manifest = version.manifest
    tokenizer = Tokenizer.load(
        version.read(manifest.tokenizer), max_tokens=manifest.max_tokens, max_text_chars=32_768
    )
    chosen = [*sentences[: 8 if short else 256], *texts.reviews(200)[: 1 if short else 32]]
    encodings = [tokenizer.encode(text) for text in chosen]
    engine = open_engine(version, options("onnx", "float32", "cpu"))
    expected = np.concatenate([engine.run(TokenBatch.of([one])) for one in encodings])
    engine.close()
    return Means(version, tokenizer, encodings, expected, 0.05 if short else 1.0)


def run(original: Version, *, short: bool) -> Report:
    """Everything, on that version."""
    cuda = cuda_of_engines()
    report = Report(
        [processor(), f"GPU: {'; '.join(gpus()) or 'none'}", versions(), f"texts: {texts.source()}"]
    )
    print("\n".join(report.machine), flush=True)
    sentences = texts.sentences()
    with tempfile.TemporaryDirectory(prefix="valence-gpu-") as store:
        version, missing = with_gpu_forms(original, Path(store))
        means = prepare(version, short=short, sentences=sentences)
        check_gpu_half(report, means, missing, cuda=cuda)
        check_served(report, means, sentences, on_gpu=cuda["onnx"])
        check_cpu_half(report, means, missing, cuda=cuda)
        for precision in ("float32", "int8"):
            engine = open_engine(version, options("onnx", precision, "cpu"))
            time_engine(report, f"cpu, onnx/{precision}, one thread", engine, means)
            engine.close()
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, prints, writes `gpu_check.json` and `gpu_check.md`; gives the exit status."""
    parser = argparse.ArgumentParser(description="Checks and times what runs on a GPU.")
    parser.add_argument("version", type=Path, nargs="?", help="its folder; the one that is served")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="folder for the report")
    parser.add_argument("--short", action="store_true", help="few texts and short timings")
    chosen = parser.parse_args(arguments)
    report = run(chosen_version(chosen.version), short=chosen.short)
    chosen.out.mkdir(parents=True, exist_ok=True)
    record = {"machine": report.machine, "checks": [asdict(one) for one in report.checks]}
    record["figures"] = [asdict(one) for one in report.figures]
    (chosen.out / "gpu_check.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (chosen.out / "gpu_check.md").write_text(report.markdown(), encoding="utf-8")
    counts = {outcome: sum(one.outcome == outcome for one in report.checks) for outcome in (OK, WRONG, OPEN)}
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return report.exit_code()


if __name__ == "__main__":
    sys.exit(main())
