"""Opens what can be measured: a run (read by PyTorch), a version (by the service's tokenizer and engine).

Knows nothing of labelled data or scores.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm

from service.core import FloatArray, TokenBatch
from service.engines import EngineOptions, open_engine
from service.errors import StartupError, TextRefused
from service.store import open_version
from service.tokenizer import Tokenizer
from training.config import ConfigError
from training.evaluate import Classifier
from training.pretrained import clear_limits, label_names, load_classifier, load_tokenizer, usable_tokens

BATCH_ITEMS = 32
MAX_TEXT_CHARS = 32_768


class LogitReader(Protocol):
    """Texts in, logits out, in the order of the texts."""

    def logits(self, texts: Sequence[str]) -> FloatArray: ...


def open_classifier(path: Path, *, threads: int, engine: str = "auto", precision: str = "auto") -> Classifier:
    """Opens a version (it has a manifest.json), a run, or the folder of a fine-tuned transformers model.

    `threads` is the number of threads that compute; `engine` and `precision` choose a form of a version.
    Raises ConfigError.
    """
    if (path / "manifest.json").is_file():
        return VersionClassifier(path, threads=threads, engine=engine, precision=precision)
    folder = path / "model" if (path / "model").is_dir() else path
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{path}: neither a finished run, nor a version, nor a transformers model")
    return TorchClassifier(folder, threads=threads)


class TorchClassifier:
    """A fine-tuned transformers model, run eagerly in float32."""

    def __init__(self, folder: Path, *, threads: int) -> None:
        torch.set_num_threads(threads)
        self.tokenizer = load_tokenizer(str(folder))
        self.model = load_classifier(folder)
        self.labels = label_names(self.model.config)
        self.max_tokens = usable_tokens(self.model.config) or 512

    def logits(self, texts: Sequence[str]) -> FloatArray:
        """float32[n, labels]; a text longer than the model can read is cut."""
        batch = self.tokenizer(
            list(texts),
            truncation=True,
            max_length=self.max_tokens,
            padding=True,
            return_token_type_ids=False,
            return_tensors="pt",
        )
        clear_limits(self.tokenizer)
        with torch.inference_mode():
            logits: FloatArray = self.model(**batch).logits.numpy()
        return logits

    def about(self) -> dict[str, Any]:
        """What reads the texts."""
        return {"kind": "run", "engine": "pytorch", "precision": "float32", "max_tokens": self.max_tokens}

    def classify(self, texts: Sequence[str]) -> list[int]:
        """The index of the best label of each text."""
        return _classify(self, texts)


class VersionClassifier:
    """A version of the model store, read as the service reads it."""

    def __init__(self, folder: Path, *, threads: int, engine: str, precision: str) -> None:
        path = folder.resolve()
        options = EngineOptions(engine=engine, precision=precision, threads_per_lane=threads)
        try:
            self.version = open_version(path.parent.parent, path.parent.name, int(path.name))
            manifest = self.version.manifest
            self.engine = open_engine(self.version, options)
            self.tokenizer = Tokenizer.load(
                self.version.read(manifest.tokenizer),
                max_tokens=manifest.max_tokens,
                max_text_chars=MAX_TEXT_CHARS,
            )
        except (StartupError, ValueError) as error:
            raise ConfigError(f"{folder}: the version cannot be opened: {error}") from error
        self.labels = tuple(manifest.labels)

    def logits(self, texts: Sequence[str]) -> FloatArray:
        """float32[n, labels]. Raises ConfigError for a text that the service would refuse."""
        try:
            encodings = [self.tokenizer.encode(text) for text in texts]
        except TextRefused as refusal:
            raise ConfigError(f"the service refuses a text of the set: {refusal.detail}") from refusal
        return self.engine.run(TokenBatch.of(encodings))

    def about(self) -> dict[str, Any]:
        """What reads the texts."""
        return {
            "kind": "version",
            "engine": self.engine.name,
            "precision": self.engine.precision,
            "max_tokens": self.engine.max_tokens,
        }

    def classify(self, texts: Sequence[str]) -> list[int]:
        """The index of the best label of each text."""
        return _classify(self, texts)


def _classify(reader: LogitReader, texts: Sequence[str]) -> list[int]:
    """Texts of like length go together, so that little is padded; the answers keep the order of the texts."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    best = np.empty(len(texts), dtype=np.int64)
    with tqdm(total=len(texts), unit="text") as bar:
        for indices in _chunks(order):
            best[indices] = reader.logits([texts[index] for index in indices]).argmax(axis=1)
            bar.update(len(indices))
    answers: list[int] = best.tolist()
    return answers


def _chunks(order: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(order), BATCH_ITEMS):
        yield order[start : start + BATCH_ITEMS]
