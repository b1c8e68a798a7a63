"""The engine alone: texts and tokens a second and core, of every engine and precision that is installed here.

Each runs the same texts on one thread, one by one, in arriving order by 16, and by length in 8 and in 32. The
engines take turns, round by round. CPU time is that of the process, so that a library's own threads count.
The yardstick is onnxruntime's ready-made dynamic int8 of the same weights (one scale a batch), once with the
fusions that the service switches off, once without. Knows nothing of HTTP, queues or goals.

    VALENCE_DATA=… python -m load_tests.engine_bench [model_store/<name>/<version>] [--rounds 5] [--texts 96]
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import onnxruntime

from load_tests import alone
from load_tests.chosen import chosen_version
from load_tests.neighbours import ready_made_int8
from load_tests.texts import reviews, sentences, source
from load_tests.verdict import machine
from service.core import Encoding, FloatArray, TokenBatch
from service.engines import ENGINES, EngineOptions, ModelShape, open_engine, pad
from service.engines.onnx import SLOW_FUSIONS
from service.errors import StartupError
from service.store import Version
from service.tokenizer import Tokenizer

PRECISIONS = ("float32", "bfloat16", "int8")
REVIEW_TOKENS = (16, 32, 64, 128, 256, 480)
YARDSTICK = "ready-made int8"
FUSED_YARDSTICK = "ready-made int8, all fusions"


class Subject(Protocol):
    """What is measured."""

    def run(self, batch: TokenBatch) -> FloatArray: ...


@dataclass(frozen=True, slots=True)
class Row:
    """A figure: `*_texts_per_s` by CPU time of the least round, of the median one, and by the clock."""

    texts: str
    plan: str
    engine: str
    best_texts_per_s: float
    median_texts_per_s: float
    best_tokens_per_s: float
    clock_texts_per_s: float
    to_yardstick: float


class ReadyMade:
    """onnxruntime's dynamic int8, in a session of one thread."""

    def __init__(self, content: bytes, shape: ModelShape, *, without: Sequence[str]) -> None:
        """Load the graph, with the fusions of onnxruntime but those."""
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = 1
        settings.enable_mem_pattern = False
        self._session = onnxruntime.InferenceSession(
            content, settings, providers=["CPUExecutionProvider"], disabled_optimizers=list(without)
        )
        self._pad_id = shape.pad_id
        self._extra = [one.name for one in self._session.get_inputs()][2:]

    def run(self, batch: TokenBatch) -> FloatArray:
        """Logits float32[n, labels] of a batch."""
        ids, mask = pad(batch, self._pad_id)
        zeros = dict.fromkeys(self._extra, ids * 0)
        logits: FloatArray = self._session.run(None, {"input_ids": ids, "attention_mask": mask, **zeros})[0]
        return logits


def subjects(version: Version, wanted: Sequence[str]) -> tuple[dict[str, Subject], list[str]]:
    """What can be measured here, by name, and why the rest cannot.

    Args:
        wanted: names like "onnx", "onnx/int8" or "ready-made int8"; all when empty.
    """
    found: dict[str, Subject] = {}
    reasons: list[str] = []
    for name in ENGINES:
        for precision in PRECISIONS:
            if _is_wanted(f"{name}/{precision}", wanted):
                options = EngineOptions(engine=name, precision=precision, device="cpu")
                try:
                    found[f"{name}/{precision}"] = open_engine(version, options)
                except StartupError as error:
                    reasons.append(f"{name}/{precision}: {error}")
    yardsticks = {YARDSTICK: SLOW_FUSIONS, FUSED_YARDSTICK: []}
    if asked := {name: fusions for name, fusions in yardsticks.items() if _is_wanted(name, wanted)}:
        content, shape = ready_made_int8(version), _shape(version)
        found |= {name: ReadyMade(content, shape, without=fusions) for name, fusions in asked.items()}
    return found, reasons


def _is_wanted(name: str, wanted: Sequence[str]) -> bool:
    return not wanted or any(one in (name, name.split("/", maxsplit=1)[0]) for one in wanted)


def _shape(version: Version) -> ModelShape:
    manifest = version.manifest
    return ModelShape(len(manifest.labels), manifest.max_tokens, manifest.pad_id)


def plans(texts: Sequence[Encoding]) -> dict[str, list[TokenBatch]]:
    """The ways to batch texts."""
    return {
        "one by one": alone.batches(texts, 1),
        "FIFO, 16": [TokenBatch.of(texts[start : start + 16]) for start in range(0, len(texts), 16)],
        "by length, 8": alone.batches(texts, 8),
        "by length, 32": alone.batches(texts, 32),
    }


def spent_s(subject: Subject, batches: Sequence[TokenBatch]) -> tuple[float, float]:
    """Seconds of CPU and by the clock that the batches take."""
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    for batch in batches:
        subject.run(batch)
    return time.process_time() - cpu_started_s, time.perf_counter() - started_s


def measure(
    found: dict[str, Subject], batches: Sequence[TokenBatch], *, rounds: int, names: tuple[str, str]
) -> Iterator[Row]:
    """A row for each engine, which take turns.

    Args:
        names: of the texts and of the plan.
    """
    count = sum(map(len, batches))
    tokens = sum(int(batch.lengths.sum()) for batch in batches)
    for subject in found.values():  # what a shape costs when it is first seen is not asked here
        spent_s(subject, batches)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, subject in found.items():
            times[name].append(spent_s(subject, batches))
    yardstick_s = min(cpu for cpu, _ in times.get(YARDSTICK, [(math.nan, 0.0)]))
    for name, spent in times.items():
        best_s = min(cpu for cpu, _ in spent)
        yield Row(
            *names,
            engine=name,
            best_texts_per_s=count / best_s,
            median_texts_per_s=count / statistics.median(cpu for cpu, _ in spent),
            best_tokens_per_s=tokens / best_s,
            clock_texts_per_s=count / min(clock for _, clock in spent),
            to_yardstick=yardstick_s / best_s,
        )


def texts_of(version: Version, count: int) -> dict[str, list[Encoding]]:
    """So many sentences, and half as many reviews cut at mixed lengths, in an order that is not by length."""
    manifest = version.manifest
    tokenizer = Tokenizer.load(
        version.read(manifest.tokenizer), max_tokens=manifest.max_tokens, max_text_chars=32_768
    )
    each = max(1, math.ceil(count / 2 / len(REVIEW_TOKENS)))
    mixed = chain.from_iterable(zip(*(reviews(tokens)[:each] for tokens in REVIEW_TOKENS), strict=True))
    chosen = {"sentences": sentences()[:count], "reviews": list(mixed)}
    return {name: [tokenizer.encode(text) for text in texts] for name, texts in chosen.items()}


def versions() -> str:
    """The libraries that may be measured, each with its version."""
    found = []
    for name in ("onnxruntime", "openvino", "torch"):
        try:
            found.append(f"{name} {installed(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints a table for each kind of text."""
    options = _parse(arguments)
    version = chosen_version(options.version)
    found, reasons = subjects(version, options.engines)
    print(f"{machine()}; {versions()}")
    print(f"{version.manifest.name} {version.manifest.version}, one thread, texts: {source()}")
    for reason in reasons:
        print(f"left out: {reason}")
    rows: list[Row] = []
    for kind, texts in texts_of(version, options.texts).items():
        if options.kinds and kind not in options.kinds:
            continue
        tokens = sum(map(len, texts)) / len(texts)
        print(f"\n{kind}: {len(texts)}, {tokens:.1f} tokens on average, least of {options.rounds} rounds\n")
        print("| batches | engine | texts/s/core (median) | tokens/s/core | texts/s by clock | × yardstick |")
        print("|---|---|---|---|---|---|")
        for plan, batches in plans(texts).items():
            if not options.plans or plan in options.plans:
                for row in measure(found, batches, rounds=options.rounds, names=(kind, plan)):
                    rows.append(row)
                    print(_line(row), flush=True)
    if options.json is not None:
        record: dict[str, Any] = {"machine": machine(), "versions": versions()}
        record["rows"] = [asdict(row) for row in rows]
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _line(row: Row) -> str:
    return (
        f"| {row.plan} | {row.engine} | {row.best_texts_per_s:.0f} ({row.median_texts_per_s:.0f}) "
        f"| {row.best_tokens_per_s:,.0f} | {row.clock_texts_per_s:.0f} | {row.to_yardstick:.2f} |"
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The engines alone, on real texts.")
    parser.add_argument("version", type=Path, nargs="?", help="its folder; the one that is served")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=96, help="sentences; half as many reviews")
    parser.add_argument("--engines", nargs="*", default=[], help="such as onnx, onnx/int8, openvino/float32")
    parser.add_argument("--kinds", nargs="*", default=[], choices=["sentences", "reviews"])
    parser.add_argument("--plans", nargs="*", default=[], help="such as 'by length, 8'")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
