"""Opens what can be measured: a run (read by PyTorch), a version (by the service's tokenizer and engine).

Texts of like length are read together, in lanes of one thread. Knows nothing of labelled data.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from service.classifier import Activation, activate
from service.core import FloatArray, IntArray, TokenBatch
from service.engines import EngineOptions, open_engine, pad
from service.errors import StartupError, TextRefused
from service.store import open_version
from service.tokenizer import Tokenizer
from training.calibrate import Chances
from training.config import ConfigError
from training.pretrained import clear_limits, label_names, load_classifier, load_tokenizer, usable_tokens

# What the service's batches hold on a CPU: more is no faster there.
BATCH_TOKENS = 1024
MAX_TEXT_CHARS = 32_768


class Reader(ABC):
    """What reads texts: ids of each, in batches of like length, in as many lanes as it was opened with.

    Attributes:
        labels: names in index order.
        temperature: logits are divided by it before the activation.
        lanes: threads that run batches at the same time, each on one core.
    """

    labels: tuple[str, ...]
    activation: Activation
    temperature: float
    lanes: int

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[IntArray]:
        """The ids of each text, cut to what the model reads."""

    @abstractmethod
    def run(self, batch: TokenBatch) -> FloatArray:
        """Logits float32[n, labels]; called by several threads at once."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """What reads the texts, in JSON types."""

    def logits(self, texts: Sequence[str], *, progress: str | None = None) -> FloatArray:
        """float32[n, labels]; a text longer than the model can read is cut.

        With `progress`, a bar of that name counts tokens on standard error.
        """
        ids = self.encode(texts)
        logits = np.empty((len(texts), len(self.labels)), dtype=np.float32)
        total = sum(map(len, ids))

        def read(batch: Sequence[int]) -> int:
            chosen = [ids[index] for index in batch]
            lengths = np.array([len(one) for one in chosen], dtype=np.int64)
            logits[batch] = self.run(TokenBatch(np.concatenate(chosen), lengths))
            return int(lengths.sum())

        with (
            ThreadPoolExecutor(self.lanes) as pool,
            tqdm(total=total, desc=progress, unit="token", unit_scale=True, disable=progress is None) as bar,
        ):
            try:
                for done in as_completed(
                    [pool.submit(read, batch) for batch in batches([len(one) for one in ids])]
                ):
                    bar.update(done.result())
            finally:
                pool.shutdown(cancel_futures=True)
        return logits

    def scores(self, texts: Sequence[str], *, progress: str | None = None) -> Chances:
        """Probabilities float64[n, labels], as the service answers them."""
        return activate(self.logits(texts, progress=progress), self.activation, temperature=self.temperature)


def open_classifier(path: Path, *, threads: int, engine: str = "auto", precision: str = "auto") -> Reader:
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


class TorchClassifier(Reader):
    """A fine-tuned transformers model, run eagerly in float32."""

    def __init__(self, folder: Path, *, threads: int) -> None:
        torch.set_num_threads(1)
        self.tokenizer = load_tokenizer(str(folder))
        self.model = load_classifier(folder)
        self.labels = label_names(self.model.config)
        self.max_tokens = usable_tokens(self.model.config) or 512
        several = self.model.config.problem_type == "multi_label_classification"
        self.activation = "sigmoid" if several or len(self.labels) == 1 else "softmax"
        self.temperature = 1.0
        self.lanes = threads

    def encode(self, texts: Sequence[str]) -> list[IntArray]:
        """The ids of each text, cut to what the model reads."""
        read = self.tokenizer(
            list(texts),
            truncation=True,
            max_length=self.max_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        clear_limits(self.tokenizer)
        return [np.array(ids, dtype=np.int64) for ids in read["input_ids"]]

    def run(self, batch: TokenBatch) -> FloatArray:
        """Logits float32[n, labels]; called by several threads at once."""
        ids, mask = pad(batch, int(self.tokenizer.pad_token_id))
        with torch.inference_mode():
            logits = self.model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits
        result: FloatArray = logits.numpy()
        return result

    def about(self) -> dict[str, Any]:
        """What reads the texts."""
        return {"kind": "run", "engine": "pytorch", "precision": "float32", "max_tokens": self.max_tokens}


class VersionClassifier(Reader):
    """A version of the model store, read as the service reads it."""

    def __init__(self, folder: Path, *, threads: int, engine: str, precision: str) -> None:
        path = folder.resolve()
        options = EngineOptions(engine=engine, precision=precision, lanes=threads, threads_per_lane=1)
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
        self.activation = manifest.activation
        self.temperature = manifest.temperature
        self.lanes = threads

    def encode(self, texts: Sequence[str]) -> list[IntArray]:
        """The ids of each text, as the service reads it. Raises ConfigError for one that it would refuse."""
        try:
            return [np.array(self.tokenizer.encode(text).ids, dtype=np.int64) for text in texts]
        except TextRefused as refusal:
            raise ConfigError(f"the service refuses a text of the set: {refusal.detail}") from refusal

    def run(self, batch: TokenBatch) -> FloatArray:
        """Logits float32[n, labels]; called by several threads at once."""
        return self.engine.run(batch)

    def about(self) -> dict[str, Any]:
        """What reads the texts."""
        return {
            "kind": "version",
            "engine": self.engine.name,
            "precision": self.engine.precision,
            "max_tokens": self.engine.max_tokens,
        }


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Places of texts of like length, the longest first, so that the time that is left is never too short.

    A batch is a rectangle of at most 1,024 tokens, or one text.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    start = 0
    while start < len(order):
        items = max(1, BATCH_TOKENS // max(1, lengths[order[start]]))
        yield order[start : start + items]
        start += items
