"""The warm-up runs every shape in every lane; the golden texts catch what is not the model that was made."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from service.core import Encoding, FloatArray, TokenBatch
from service.engines import EngineOptions
from service.errors import StartupError
from service.store import Manifest, open_version
from service.tokenizer import Tokenizer
from service.warmup import check_golden_texts, companies, shapes, warm_up
from tests.models import bert_tokenizer, make_version
from tests.service.stand_ins import SAFETY_S, GatedEngine, Opener

ON_CPU = EngineOptions(device="cpu")


def parts(store: Path) -> tuple[GatedEngine, Tokenizer, Manifest]:
    version = open_version(store, "sentiment")
    manifest = version.manifest
    tokenizer = Tokenizer.load(
        version.read(manifest.tokenizer), max_tokens=manifest.max_tokens, max_text_chars=999
    )
    return Opener()(version, ON_CPU), tokenizer, manifest


@pytest.mark.parametrize(
    ("max_tokens", "items", "tokens"), [(128, 32, 1024), (512, 32, 1024), (64, 1, 16), (3, 8, 9)]
)
def test_r50_shapes_hold_the_corners_and_nothing_that_cannot_come(
    max_tokens: int, items: int, tokens: int
) -> None:
    grid = shapes(max_tokens=max_tokens, max_batch_items=items, max_batch_tokens=tokens)
    assert len(set(grid)) == len(grid)
    assert {length for _, length in grid} >= {3, max_tokens}
    assert all(count == 1 or (count <= items and count * length <= tokens) for count, length in grid)
    for length in {length for _, length in grid}:
        counts = [count for count, other in grid if other == length]
        assert (min(counts), max(counts)) == (1, max(1, min(items, tokens // length)))
    volumes = [count * length for count, length in grid]
    assert volumes == sorted(volumes, reverse=True)


def test_every_shape_is_run_in_every_lane_at_once(tmp_path: Path) -> None:
    make_version(tmp_path)
    engine, _, _ = parts(tmp_path)
    grid = [(4, 16), (1, 64), (1, 3)]
    all_inside = threading.Barrier(3)
    engine.fault = lambda _: all_inside.wait(SAFETY_S)
    warm_up(engine, grid, lanes=3, sample=Encoding([2, 9, 3]), go_on=lambda: True)
    shapes_run = [(len(lengths), lengths[0]) for lengths, _ in engine.calls]
    assert sorted(shapes_run) == sorted(grid * 3)
    assert all(set(ids) <= {2, 9, 3} for _, ids in engine.calls)


def test_the_warm_up_ends_when_nobody_waits_for_it(tmp_path: Path) -> None:
    make_version(tmp_path)
    engine, _, _ = parts(tmp_path)
    warm_up(engine, [(1, 3)] * 50, lanes=1, sample=Encoding([2, 3]), go_on=lambda: len(engine.calls) < 5)
    assert len(engine.calls) == 5


def test_a_shape_that_fails_refuses_the_start(tmp_path: Path) -> None:
    make_version(tmp_path)
    engine, _, _ = parts(tmp_path)

    def fail(batch: TokenBatch) -> None:
        if len(batch) == 4:
            raise MemoryError("too much")

    engine.fault = fail
    with pytest.raises(StartupError, match="failed on 4 × 16 tokens: too much"):
        warm_up(engine, [(4, 16), (1, 3)], lanes=2, sample=Encoding([2, 3]), go_on=lambda: True)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_the_right_model_passes(tmp_path: Path, precision: str) -> None:
    make_version(tmp_path, precisions=("float32", "int8"), labels=("bad", "so-so", "good"))
    version = open_version(tmp_path, "sentiment")
    _, tokenizer, manifest = parts(tmp_path)
    check_golden_texts(Opener()(version, replace(ON_CPU, precision=precision)), tokenizer, manifest)


def swap_tokenizer(folder: Path, content: bytes) -> None:
    """Put another tokenizer in, and a manifest that agrees with it."""
    (folder / "tokenizer.json").write_bytes(content)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["tokenizer"] |= {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    path.write_text(json.dumps(manifest))


def test_r39_a_foreign_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = make_version(tmp_path)
    cased = json.loads(bert_tokenizer().to_str())
    cased["normalizer"]["lowercase"] = False
    swap_tokenizer(folder, json.dumps(cased).encode())
    with pytest.raises(StartupError, match=r"golden text 4: a logit is off by .*the tokenizer, the model"):
        check_golden_texts(*parts(tmp_path))


def shift_reference(manifest: Manifest) -> Manifest:
    first, *rest = manifest.golden_texts
    row = first.logits["onnx/float32"]
    moved = {**first.logits, "onnx/float32": [row[0] + 0.002, row[1]]}
    return replace(manifest, golden_texts=[replace(first, logits=moved), *rest])


def test_logits_further_off_than_the_file_states_are_refused(tmp_path: Path) -> None:
    make_version(tmp_path, change=shift_reference)
    with pytest.raises(StartupError, match=r"golden text 1: a logit is off by 0\.002, and 0\.001 is allowed"):
        check_golden_texts(*parts(tmp_path))


def widen(manifest: Manifest) -> Manifest:
    return replace(manifest, models=[replace(model, logit_bound=99.0) for model in manifest.models])


CHANGES: dict[str, tuple[Callable[[FloatArray], FloatArray], str]] = {
    "the labels are swapped": (
        lambda logits: logits[:, ::-1],
        "its best label is not the one in the manifest",
    ),
    "not a number": (lambda logits: logits * np.float32(np.nan), "a logit is off by nan"),
    "company counts": (lambda logits: logits * np.float32(1 + len(logits) / 100), "changes by .* in company"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_an_engine_with_other_answers_is_refused(tmp_path: Path, case: str) -> None:
    make_version(tmp_path, change=widen)
    engine, tokenizer, manifest = parts(tmp_path)
    engine.change, reason = CHANGES[case]
    with pytest.raises(StartupError, match=reason):
        check_golden_texts(engine, tokenizer, manifest)


def test_an_engine_of_another_form_is_refused(tmp_path: Path) -> None:
    make_version(tmp_path)
    engine, tokenizer, manifest = parts(tmp_path)
    engine.precision = "bfloat16"
    with pytest.raises(StartupError, match="onnx/bfloat16, which the version does not have"):
        check_golden_texts(engine, tokenizer, manifest)


# Company.


@pytest.mark.parametrize(
    ("lengths", "budget", "expected"),
    [
        ([5, 9, 512, 7], 1024, [[0, 3, 1], [2, 0]]),  # the long one beside the shortest
        ([5, 9, 512, 7], 1023, [[0, 3, 1]]),  # which no batch of the service could hold
        ([100, 4, 100, 4], 200, [[1, 3], [0, 2]]),
        ([4], 1024, []),
        ([], 1024, []),
    ],
)
def test_company_is_what_a_batch_may_hold(lengths: list[int], budget: int, expected: list[list[int]]) -> None:
    assert companies(lengths, budget) == expected
