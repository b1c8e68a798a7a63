"""Asks a teacher what it says of every text of a folder, and keeps the logits; goes on where it was stopped.

Knows what is done and what is left; how a model is opened and what the file holds is others' work.
"""

import hashlib
import json
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from service.core import FloatArray, IntArray, TokenBatch
from training.classifiers import Reader, batches, open_classifier
from training.config import ConfigError, differences
from training.data import texts_of
from training.teacher import HalfArray, TeacherLogits, read_teacher, text_hashes, write_teacher

SAVE_EVERY_S = 20.0
WEIGHTS = ("*.safetensors", "*.bin")


def ask(
    model: Path,
    data: Path,
    out: Path,
    *,
    engine: str = "auto",
    precision: str = "auto",
    threads: int = 1,
    save_every_s: float = SAVE_EVERY_S,
) -> TeacherLogits:
    """Writes what `model` says of each text of `train.tsv` and `unlabelled.tsv` in the folder `data`.

    What is done is kept beside `out`, in a file that ends in .part, and the same call goes on there; a file
    that is whole is left as it is. `threads` is the number of lanes, of one thread each: on a CPU two are
    faster than one batch on two threads. Raises ConfigError and DataError, also when the file that is there
    is of another model or other texts.
    """
    reader = open_classifier(model, threads=threads, engine=engine, precision=precision)
    base, licence = _base_of(model)
    about = {
        "model": model.resolve().name,
        "base": base,
        "base_licence": licence,
        "model_sha256": _identity(model),
        "labels": list(reader.labels),
        **reader.about(),
        "sha256": text_hashes(data),
    }
    if out.exists():
        return _same(out, about)
    texts = {name: texts_of(data / name) for name in about["sha256"]}
    part = out.with_name(out.name + ".part")
    if part.exists():
        teacher = _same(part, about)
    else:
        silence = {
            name: np.full((len(rows), len(reader.labels)), np.nan, np.float16) for name, rows in texts.items()
        }
        teacher = TeacherLogits(about, silence)
    out.parent.mkdir(parents=True, exist_ok=True)
    places = _silent(teacher)
    ids = reader.encode([texts[name][index] for name, index in places])
    save = _every(save_every_s, lambda: write_teacher(part, teacher))
    try:
        with (
            tqdm(total=sum(map(len, ids)), unit="token", unit_scale=True) as bar,
            closing(_read(reader, ids)) as done,
        ):
            for numbers, logits in done:
                for number, row in zip(numbers, _halved(logits), strict=True):
                    name, index = places[number]
                    teacher.rows[name][index] = row
                bar.update(sum(len(ids[number]) for number in numbers))
                save()
    finally:
        write_teacher(part, teacher)
    part.replace(out)
    return teacher


def _same(path: Path, about: dict[str, Any]) -> TeacherLogits:
    teacher = read_teacher(path)
    if changed := differences(teacher.about, about):
        raise ConfigError(f"{path}: it is there, of another model or other texts: {'; '.join(changed)}")
    return teacher


def _every(seconds: float, act: Callable[[], None]) -> Callable[[], None]:
    last = time.monotonic()

    def maybe() -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            act()
            last = time.monotonic()

    return maybe


def _silent(teacher: TeacherLogits) -> list[tuple[str, int]]:
    """File and index of each row that was not read yet."""
    return [
        (name, index)
        for name, said in teacher.rows.items()
        for index in np.flatnonzero(np.isnan(said).any(axis=1)).tolist()
    ]


def _read(reader: Reader, ids: Sequence[IntArray]) -> Generator[tuple[list[int], FloatArray]]:
    """Which texts a batch holds and their logits, as the lanes are done with it."""

    def read(batch: list[int]) -> tuple[list[int], FloatArray]:
        chosen = [ids[number] for number in batch]
        lengths = np.array([len(one) for one in chosen], dtype=np.int64)
        return batch, reader.run(TokenBatch(np.concatenate(chosen), lengths))

    with ThreadPoolExecutor(reader.lanes) as pool:
        try:
            for done in as_completed(
                [pool.submit(read, batch) for batch in batches([len(one) for one in ids])]
            ):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _halved(logits: FloatArray) -> HalfArray:
    """Raises ConfigError for what is no number, or none that float16 can hold."""
    with np.errstate(over="ignore"):
        halved = logits.astype(np.float16)
    if not np.isfinite(halved).all():
        raise ConfigError("the teacher says NaN, infinity or a number over 65,504 of a text")
    return halved


def _identity(model: Path) -> str:
    """The SHA-256 of what decides a model's answers: the manifest of a version, or all weights."""
    manifest = model / "manifest.json"
    folder = model / "model" if (model / "model").is_dir() else model
    files = [manifest] if manifest.is_file() else sorted(one for mask in WEIGHTS for one in folder.glob(mask))
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _base_of(model: Path) -> tuple[str | None, str | None]:
    """Name and licence of what the model was fine-tuned from, as far as it says so."""
    if (model / "manifest.json").is_file():
        base = json.loads((model / "manifest.json").read_text(encoding="utf-8"))["base_model"]
        return base["name"], base["licence"]
    if (model / "metrics.json").is_file() and (model / "config.json").is_file():
        # A folder of the training machine says nothing to anybody else but by its name.
        return Path(json.loads((model / "config.json").read_text(encoding="utf-8"))["base"]).name, None
    return None, None
