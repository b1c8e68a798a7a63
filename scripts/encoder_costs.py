"""Measures what the parts of an encoder layer cost as the text grows. Knows nothing of figures or weights."""

import itertools
import json
import math
import resource
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from encoder.config import EncoderConfig
from encoder.model import TransformerEncoderLayer

PARTS = ("attention, written out", "attention, fused", "feed-forward")
MINILM_LAYER = EncoderConfig(words=1, max_tokens=1, width=384, heads=12, inner_width=1536, norm_first=False)


@dataclass(frozen=True)
class Cost:
    """One part of a layer at one length: its least CPU time, the share of the operating system in it, and the
    most bytes held beside its input.
    """

    part: str
    tokens: int
    seconds: float
    system_seconds: float
    peak_bytes: int


def cpu_seconds(work: Callable[[], object]) -> tuple[float, float]:
    """The CPU time that this process spent on `work`, and how much of it the operating system took."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    system = after.ru_stime - before.ru_stime
    return after.ru_utime - before.ru_utime + system, system


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that PyTorch's CPU allocator held at once during `work`, beyond those held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        trace: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    events = sorted((e for e in trace if e.get("name") == "[memory]"), key=lambda e: e["args"]["Ev Idx"])
    held = most = 0
    for event in events:
        held += event["args"]["Bytes"]  # negative when freed
        most = max(most, held)
    return most


def parts_of(layer: TransformerEncoderLayer, x: Tensor) -> Mapping[str, Callable[[], Tensor]]:
    """Each part of a layer, to be run on x [1, n, d]."""

    def attend(*, fused: bool) -> Tensor:
        layer.attention.fused = fused
        states: Tensor = layer.attention(x).states
        return states

    def feed_forward() -> Tensor:
        fed: Tensor = layer.down(functional.gelu(layer.up(x)))
        return fed

    works = (lambda: attend(fused=False), lambda: attend(fused=True), feed_forward)
    return dict(zip(PARTS, works, strict=True))


@torch.no_grad()
def measure(lengths: Sequence[int], repeats: int) -> list[Cost]:
    """Time and memory of each part at each length.

    The parts take turns, and the least CPU time counts: what else the machine does only adds. A short text is
    run more often, in proportion.
    """
    layer = TransformerEncoderLayer(MINILM_LAYER).eval()
    costs = []
    for tokens in lengths:
        works = parts_of(layer, torch.randn(1, tokens, MINILM_LAYER.width))
        least = dict.fromkeys(works, (math.inf, math.inf))
        for _ in range(1 + repeats * max(lengths) // tokens):
            for part, work in works.items():
                least[part] = min(least[part], cpu_seconds(work))
        costs += [Cost(part, tokens, *least[part], peak_bytes(work)) for part, work in works.items()]
    return costs


def crossing(costs: Sequence[Cost], part: str, other: str) -> float | None:
    """The length from which `part` takes longer than `other`: log-log between two measured ones, or None."""
    times = {(cost.part, cost.tokens): cost.seconds for cost in costs}
    lengths = sorted({cost.tokens for cost in costs})
    leads = [math.log(times[part, tokens] / times[other, tokens]) for tokens in lengths]
    for (short, behind), (long, ahead) in itertools.pairwise(zip(lengths, leads, strict=True)):
        if behind < 0 <= ahead:
            return float(short * (long / short) ** (-behind / (ahead - behind)))
    return None
