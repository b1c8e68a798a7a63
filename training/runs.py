"""The folder of a run: whether it is the same run, where it goes on, what it was trained on.

It holds `config.json` (the choices, and the data by SHA-256), `checkpoints/`, and in the end `model/` (the
best epoch and its tokenizer), `curves.png` and `metrics.json`. Knows nothing of how a model is trained.
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from training.config import ConfigError, FitConfig, differences, read_config, write_json
from training.data import UNLABELLED_FILE, Corpus, DataError, add_unlabelled, load_corpus, source_file
from training.leaks import clean_train, fresh_texts
from training.mix import read_mix


def corpus_of(config: FitConfig) -> Corpus:
    """The rows that a run reads. Raises DataError when nothing trains or nothing chooses the best epoch."""
    corpus = load_corpus(
        [Path(path) for path in config.data],
        labels=len(config.labels),
        dev_paths=[Path(path) for path in config.dev],
    )
    if not corpus.train:
        raise DataError(f"{', '.join(config.data)}: no training rows")
    if config.teacher is not None:
        # Not in every folder: without a teacher nobody says what these texts are.
        unlabelled, teacher = Path(config.data[0]) / UNLABELLED_FILE, Path(config.teacher)
        if unlabelled.is_file():
            add_unlabelled(corpus, unlabelled)
        corpus.files.append(source_file(teacher))
    if not corpus.dev:
        raise DataError(f"{', '.join(config.data)}: no dev rows to choose the best epoch by (see --dev)")
    return corpus


def trained_texts(run: Path) -> frozenset[str]:
    """The texts that a run was trained on, with a label or without one, read again.

    Raises DataError when its data is gone or changed.
    """
    config = read_config(run)
    corpus = corpus_of(config)
    kept = json.loads((run / "config.json").read_text(encoding="utf-8"))["files"]
    if kept != [asdict(file) for file in corpus.files]:
        raise DataError(f"{', '.join(config.data)}: not the data that the run was trained on any more")
    train, _ = clean_train(corpus)
    return frozenset(example.text for example in (*train, *fresh_texts(corpus.unlabelled, corpus, train)))


def mix_of(config: FitConfig) -> list[dict[str, Any]]:
    """What the summaries of the data folders say; none for a folder that is no mix. Raises DataError."""
    summaries = [read_mix(Path(path)) for path in config.data]
    return [summary for summary in summaries if summary is not None]


def open_run(config: FitConfig, corpus: Corpus, out: Path, *, restart: bool) -> None:
    """Makes the run folder, or checks that the one there is of the same choices and data.

    With `restart` the run that is there is deleted. Raises ConfigError when another run is there, or no run.
    """
    record = {**config.as_dict(), "files": [asdict(file) for file in corpus.files]}
    kept = out / "config.json"
    if out.exists() and any(out.iterdir()):
        # Also before a restart: nothing but a run is ever deleted.
        chosen = read_config(out)
        if restart:
            shutil.rmtree(out)
        else:
            then = {**chosen.as_dict(), "files": json.loads(kept.read_text(encoding="utf-8"))["files"]}
            changed = differences(_flat(then), _flat(record))
            if changed:
                raise ConfigError(f"{out}: another run is there (--restart: anew): {'; '.join(changed)}")
    out.mkdir(parents=True, exist_ok=True)
    write_json(kept, record)


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """The record with a line of its own for each file."""
    files = {f"file {n} {file['name']}": file["sha256"][:12] for n, file in enumerate(record["files"], 1)}
    return {name: value for name, value in record.items() if name != "files"} | files


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint. One that was being written when the run was killed is removed."""
    found = {int(path.name.rpartition("-")[2]): path for path in folder.glob("checkpoint-*")}
    for _, path in sorted(found.items(), reverse=True):
        try:
            # The Trainer writes its state last.
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            shutil.rmtree(path)
        else:
            return path
    return None
