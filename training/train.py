"""Trains an encoder classifier, of transformers or our own, on labelled sentences and leaves a run folder.

Knows nothing of ONNX, versions or serving. What the folder holds stands in `training.runs`.
"""

import json
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    DataCollatorWithPadding,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from encoder.config import EncoderConfig
from training.batches import Encoded, GroupedTrainer
from training.config import ConfigError, FitConfig, write_json
from training.curves import draw_curves
from training.data import Corpus, DataError, Example
from training.distil import DistilTrainer, Lesson, open_lesson
from training.evaluate import score
from training.leaks import Cleaning, clean_train
from training.own import OwnClassifier, from_library, new_classifier, to_library
from training.partial import freeze, set_attention_dropout
from training.pretrained import clear_limits, load_base, load_tokenizer, usable_tokens
from training.runs import corpus_of, last_checkpoint, mix_of, open_run

CPU_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
LOG_EVERY_STEPS = 50
EVAL_BATCH_ITEMS = 64


def fit(
    config: FitConfig,
    out: Path,
    *,
    restart: bool = False,
    threads: int | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> dict[str, Any]:
    """Runs, or takes up again, the fine-tuning of `config` in the folder `out`; returns the metrics.

    A folder that holds the same run goes on at its last whole checkpoint, or, when it is finished, is left as
    it is. `restart` begins anew. `threads` is the number of PyTorch threads (default: PyTorch's own).
    `callbacks` are told of every step. Raises ConfigError and DataError before anything is trained.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    corpus = corpus_of(config)
    train, cleaning = clean_train(corpus)
    _check_labels(config, train)
    lesson = open_lesson(config, corpus, train)
    mixes = mix_of(config)
    set_seed(config.seed)
    tokenizer = load_tokenizer(config.base)
    model, fresh = _open_model(config, tokenizer)
    positions = usable_tokens(model.config)
    if positions is not None and config.max_tokens > positions:
        raise ConfigError(f"max_tokens: {config.max_tokens} is more than the {positions} the base reads")
    # Only now: a run that is refused leaves no folder that stands in the way of the next one.
    open_run(config, corpus, out, restart=restart)
    if (out / "metrics.json").exists():
        finished: dict[str, Any] = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
        return finished
    trainer = build_trainer(
        config, out, model=model, tokenizer=tokenizer, train=train, dev=corpus.dev, lesson=lesson
    )
    for callback in callbacks:
        trainer.add_callback(callback)
    checkpoint = last_checkpoint(out / "checkpoints")
    started = time.monotonic()
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    metrics = {
        **_metrics(trainer, corpus, cleaning),
        "distillation": None if lesson is None else lesson.about(),
        "mix": mixes,
        "fresh_weights": fresh,
        "resumed_from": None if checkpoint is None else checkpoint.name,
        "duration_s": round(time.monotonic() - started, 1),
        "config": config.as_dict(),
    }
    _finish(trainer, tokenizer, metrics, out)
    return metrics


def _open_model(config: FitConfig, tokenizer: Any) -> tuple[PreTrainedModel, list[str]]:
    """The model to train, and the names of its weights that are random."""
    if config.new is None:
        model, fresh = load_base(config.base, config.labels)
        if config.encoder == "own":
            return from_library(model), fresh
        if config.attention_dropout is not None:
            set_attention_dropout(model, config.attention_dropout)
        if config.freeze_layers is not None:
            freeze(model, config.freeze_layers)
        return model, fresh
    shape = EncoderConfig(
        words=max(tokenizer.get_vocab().values()) + 1,
        max_tokens=config.max_tokens,
        width=config.new.width,
        layers=config.new.layers,
        heads=config.new.heads,
        inner_width=4 * config.new.width,
        positions="learned" if config.new.positions == "learned" else "sinusoidal",
    )
    new = new_classifier(shape, labels=config.labels, pad_id=int(tokenizer.pad_token_id))
    return new, sorted(name for name, _ in new.named_parameters())


class SaveBetween(TrainerCallback):
    """Asks for a checkpoint every so many steps, too, not only after each epoch."""

    def __init__(self, every_steps: int, epoch_steps: int) -> None:
        self.every_steps = every_steps
        self.epoch_steps = epoch_steps

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002 - the library passes it by name
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """The last step of an epoch is left out: its checkpoint must come after the evaluation."""
        if state.global_step % self.every_steps == 0 and state.global_step % self.epoch_steps != 0:
            control.should_save = True


def build_trainer(
    config: FitConfig,
    out: Path,
    *,
    model: PreTrainedModel,
    tokenizer: Any,
    train: Sequence[Example],
    dev: Sequence[Example],
    lesson: Lesson | None = None,
) -> Trainer:
    """The Trainer of a run. Weight decay spares biases and LayerNorm: the library sees to that.

    With a `lesson` its unlabelled texts train, too, and the loss is that of `training.distil`.
    """
    rows = [*train, *(() if lesson is None else lesson.unlabelled)]
    epoch_steps = math.ceil(len(rows) / config.batch_items)
    arguments = TrainingArguments(
        output_dir=str(out / "checkpoints"),
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        warmup_steps=math.ceil(config.warmup * epoch_steps * config.epochs),
        num_train_epochs=config.epochs,
        per_device_train_batch_size=config.batch_items,
        per_device_eval_batch_size=EVAL_BATCH_ITEMS,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="weighted_f1",
        greater_is_better=True,
        logging_steps=min(LOG_EVERY_STEPS, epoch_steps),
        seed=config.seed,
        bf16=bfloat16_is_native(),
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        report_to="none",
    )

    def judge(prediction: Any) -> dict[str, float]:
        chosen = prediction.predictions.argmax(axis=-1)
        scores = score(prediction.label_ids.tolist(), chosen.tolist(), count=len(config.labels))
        return {"accuracy": scores.accuracy, "weighted_f1": scores.weighted_f1}

    parts: dict[str, Any] = {
        "model": model,
        "args": arguments,
        "train_dataset": Encoded(
            rows, tokenizer, config.max_tokens, None if lesson is None else lesson.logits
        ),
        "eval_dataset": Encoded(dev, tokenizer, config.max_tokens),
        "data_collator": DataCollatorWithPadding(tokenizer),
        "processing_class": tokenizer,
        "compute_metrics": judge,
        "callbacks": [SaveBetween(config.save_steps, epoch_steps)],
    }
    if lesson is None:
        return GroupedTrainer(**parts)
    return DistilTrainer(weight=lesson.weight, temperature=lesson.temperature, **parts)


def bfloat16_is_native() -> bool:
    """True where the hardware computes in bfloat16; emulated, it is slower than float32."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_capability() >= (8, 0)
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return not CPU_BFLOAT16_FLAGS.isdisjoint(text.split())


def _check_labels(config: FitConfig, train: Sequence[Example]) -> None:
    present = {example.label for example in train}
    missing = [name for index, name in enumerate(config.labels) if index not in present]
    if missing:
        raise DataError(f"{', '.join(config.data)}: no training row for {', '.join(missing)}")


def _metrics(trainer: Trainer, corpus: Corpus, cleaning: Cleaning) -> dict[str, Any]:
    history = trainer.state.log_history
    epochs = [
        {
            "epoch": round(entry["epoch"]),
            "step": entry["step"],
            "dev_loss": entry["eval_loss"],
            "accuracy": entry["eval_accuracy"],
            "weighted_f1": entry["eval_weighted_f1"],
        }
        for entry in history
        if "eval_loss" in entry
    ]
    best = max(epochs, key=lambda entry: float(entry["weighted_f1"]))
    losses = [{key: entry[key] for key in ("step", "epoch", "loss")} for entry in history if "loss" in entry]
    return {
        "best_epoch": best["epoch"],
        "dev": {"rows": len(corpus.dev), "accuracy": best["accuracy"], "weighted_f1": best["weighted_f1"]},
        "epochs": epochs,
        "train_loss": losses,
        "training_rows": asdict(cleaning),
        "files": [asdict(file) for file in corpus.files],
        "machine": {
            "device": str(trainer.args.device),
            "precision": "bfloat16" if trainer.args.bf16 else "float32",
            "threads": torch.get_num_threads(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _finish(trainer: Trainer, tokenizer: Any, metrics: dict[str, Any], out: Path) -> None:
    clear_limits(tokenizer)
    trainer.save_model(str(out / "model"))
    if isinstance(trainer.model, OwnClassifier):
        # Weights that the library knows are kept under its names, so that everybody can open them.
        to_library(trainer.model).save_pretrained(out / "model")
    draw_curves(metrics, out / "curves.png")
    # Written last: a run is finished when it has its metrics.
    write_json(out / "metrics.json", metrics)
