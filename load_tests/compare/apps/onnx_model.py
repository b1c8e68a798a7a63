"""Texts to labels with the ONNX file of a version, as a user of another server would write it.

Runs in the environments of the other servers: imports onnxruntime and tokenizers, nothing of Valence.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

# As in service/engines/onnx.py: these fused CPU kernels are slower than what they replace.
SLOW_FUSIONS = ["SkipLayerNormFusion", "BiasGeluFusion"]
VARIABLE = "COMPARE_OPTIONS"


@dataclass(frozen=True, slots=True)
class Options:
    """What the command gives to an app, as JSON in one environment variable.

    Attributes:
        version: folder of the version.
        workers: processes that run the model.
        threads: of onnxruntime in each.
        batch: most texts in one call.
        wait_ms: how long a batch waits to fill.
        tuned: fusions that slow the graph off, no spinning threads, and the server's own options for speed.
        group: a batch is sorted by length and run in groups of so many; 0 runs it padded as it came.
    """

    version: str
    workers: int
    threads: int
    batch: int
    wait_ms: int
    tuned: bool
    group: int = 0

    @classmethod
    def read(cls) -> "Options":
        """From the environment."""
        return cls(**json.loads(os.environ[VARIABLE]))


class OnnxModel:
    """The int8 file and its tokenizer."""

    def __init__(self, options: Options) -> None:
        folder = Path(options.version)
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        self._labels: list[str] = manifest["labels"]
        self._group = options.group
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(manifest["max_tokens"])
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = options.threads
        if options.tuned:
            settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            str(folder / "model.int8.onnx"),
            settings,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=SLOW_FUSIONS if options.tuned else [],
        )
        self._inputs = {node.name for node in self._session.get_inputs()}

    def predict(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Label and probability of each text, in order."""
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        order = sorted(range(len(ids)), key=lambda index: len(ids[index])) if self._group else range(len(ids))
        size = self._group or len(ids)
        answers: list[dict[str, Any]] = [{} for _ in ids]
        for start in range(0, len(ids), size):
            chosen = list(order[start : start + size])
            logits = self._run([ids[index] for index in chosen])
            shares = np.exp(logits - logits.max(axis=1, keepdims=True))
            shares /= shares.sum(axis=1, keepdims=True)
            for index, row in zip(chosen, shares, strict=True):
                best = int(row.argmax())
                answers[index] = {"label": self._labels[best], "score": float(row[best])}
        return answers

    def _run(self, ids: Sequence[Sequence[int]]) -> Any:
        """Logits float32[n, labels] of texts padded to the longest."""
        shape = (len(ids), max(len(row) for row in ids))
        feed = {
            name: np.zeros(shape, dtype=np.int64)
            for name in ("input_ids", "attention_mask", "token_type_ids")
        }
        for index, row in enumerate(ids):
            feed["input_ids"][index, : len(row)] = row
            feed["attention_mask"][index, : len(row)] = 1
        return self._session.run(None, {name: feed[name] for name in self._inputs})[0]
