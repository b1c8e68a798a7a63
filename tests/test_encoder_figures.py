"""The figures of docs/encoder.md: what is measured is what is meant, and what is drawn fits the page."""

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scripts.encoder_costs import PARTS, Cost, crossing, measure, peak_bytes
from scripts.encoder_figures import (
    FIGURES,
    NEGATED,
    VERSION,
    load_version,
    main,
    shuffle,
    without_positions,
)

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def unchanged_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command sets the threads of the process and silences the profiler; both end with the test."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def size_of(path: Path) -> tuple[int, int]:
    """Width and height of a PNG in pixels."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:])
    return width, height


def test_peak_is_what_is_held_at_once() -> None:
    def work() -> torch.Tensor:
        for _ in range(3):
            torch.empty(1_000)  # freed at once: does not add up
        kept = torch.empty(500)
        torch.empty(250)
        return kept

    assert peak_bytes(work) == 4_000
    assert peak_bytes(lambda: torch.empty(1_000) + torch.empty(1_000)) == 12_000


def test_memory_is_quadratic_written_out_and_linear_fused() -> None:
    held = {(cost.part, cost.tokens): cost.peak_bytes for cost in measure((256, 512, 1024), repeats=1)}
    written, fused, feed_forward = PARTS
    # 12 heads, scores and weights of n × n float32, are held at once: all of the growth but the linear rest.
    assert held[written, 1024] >= 2 * 12 * 1024 * 1024 * 4
    assert held[written, 1024] > 3.5 * held[written, 512]
    for part in (fused, feed_forward):
        assert held[part, 1024] <= 2.1 * held[part, 512]


def test_crossing_lies_between_two_lengths() -> None:
    def costs(slow: list[float]) -> list[Cost]:
        return [
            Cost(part, tokens, seconds, 0.0, 0)
            for part, times in (("slow", slow), ("even", [1.0, 1.0, 1.0]))
            for tokens, seconds in zip((16, 64, 256), times, strict=True)
        ]

    assert crossing(costs([0.25, 0.5, 2.0]), "slow", "even") == pytest.approx(128)
    assert crossing(costs([0.25, 0.5, 0.75]), "slow", "even") is None


def test_without_positions_real_weights_answer_a_shuffled_sentence_alike() -> None:
    classifier, tokenizer = load_version(VERSION)
    ids = tokenizer.encode(NEGATED).ids
    learned, bare = (shuffle(model, ids, NEGATED) for model in (classifier, without_positions(classifier)))
    assert learned.as_written < 0.5 < max(learned.shuffled)
    assert bare.shuffled == pytest.approx([bare.as_written] * len(bare.shuffled), abs=1e-5)


def test_one_command_draws_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--out", str(tmp_path), "--lengths", "16", "32", "64", "--repeats", "1"])
    assert {path.stem: size_of(path)[0] for path in tmp_path.iterdir()} == dict.fromkeys(FIGURES, 900)
    assert NEGATED in capsys.readouterr().out


def test_each_figure_can_be_chosen(tmp_path: Path) -> None:
    main(["--out", str(tmp_path), "--figures", "positions"])
    assert [path.name for path in tmp_path.iterdir()] == ["positions.png"]


def test_figures_on_the_page_are_there_and_small() -> None:
    page = (ROOT / "docs/encoder.md").read_text(encoding="utf-8")
    assert set(FIGURES) <= set(re.findall(r"\(encoder/(\w+)\.png\)", page))
    for name in FIGURES:
        path = ROOT / f"docs/encoder/{name}.png"
        assert size_of(path)[0] == 900
        assert path.stat().st_size < 120_000
