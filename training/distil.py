"""What a student learns from a teacher: the texts, the teacher's logits of them, and the loss.

Knows nothing of how the teacher was asked or of what a run folder holds. The loss of a text with a label is

    w T^2 KL(softmax(teacher / T) || softmax(student / T)) + (1 - w) CE(label, student),

w being the soft weight and T the soft temperature (Hinton, Vinyals and Dean 2015, "Distilling the knowledge
in a neural network", section 2; T^2 keeps the gradients of the soft part in proportion). Of a text without a
label the first term counts alone, with weight 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.batches import GroupedTrainer
from training.config import ConfigError, FitConfig
from training.data import NO_LABEL, Corpus, DataError, Example
from training.leaks import fresh_texts
from training.teacher import HalfArray, read_teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What a teacher adds to a run.

    Attributes:
        unlabelled: texts that the teacher alone labels, without repeats and without what stands elsewhere.
        logits: by text, float16[labels].
        teacher: what the file says of it.
        read: how many unlabelled rows there were.
    """

    unlabelled: Sequence[Example]
    logits: dict[str, HalfArray]
    weight: float
    temperature: float
    teacher: dict[str, Any]
    read: int

    def about(self) -> dict[str, Any]:
        """For the metrics of a run, as JSON types."""
        counts = {"rows_read": self.read, "rows_kept": len(self.unlabelled)}
        return {
            "teacher": self.teacher,
            "soft_weight": self.weight,
            "soft_temperature": self.temperature,
            "unlabelled": counts,
        }


def open_lesson(config: FitConfig, corpus: Corpus, train: Sequence[Example]) -> Lesson | None:
    """None without a teacher. `train` are the rows with a label that are kept.

    Raises ConfigError for a file that is no teacher's or one of other labels, DataError when it is not of
    the texts of the run.
    """
    if config.teacher is None or config.soft_weight is None or config.soft_temperature is None:
        return None
    teacher = read_teacher(Path(config.teacher))
    if tuple(teacher.about["labels"]) != config.labels:
        names = ", ".join(teacher.about["labels"])
        raise ConfigError(f"{config.teacher}: its labels are {names}, not {', '.join(config.labels)}")
    for file in corpus.files:
        trains = file.rows["train"] and file.sha256 not in teacher.about["sha256"].values()
        if trains:
            raise DataError(f"{file.name}: not a file that the teacher {teacher.about['model']} has read")
    return Lesson(
        unlabelled=fresh_texts(corpus.unlabelled, corpus, train),
        logits=teacher.by_text(Path(config.data[0])),
        weight=config.soft_weight,
        temperature=config.soft_temperature,
        teacher=teacher.about,
        read=len(corpus.unlabelled),
    )


def distil_loss(
    student: Tensor, teacher: Tensor, labels: Tensor, *, weight: float, temperature: float
) -> Tensor:
    """The mean over a batch of the loss above.

    student and teacher float32[n, labels] (logits), labels int64[n], NO_LABEL where there is none.
    """
    said = functional.log_softmax(teacher / temperature, dim=-1)
    learnt = functional.log_softmax(student / temperature, dim=-1)
    soft = temperature**2 * functional.kl_div(learnt, said, log_target=True, reduction="none").sum(dim=-1)
    hard = functional.cross_entropy(student, labels, ignore_index=NO_LABEL, reduction="none")
    return torch.where(labels == NO_LABEL, soft, weight * soft + (1 - weight) * hard).mean()


class DistilTrainer(GroupedTrainer):
    """Batches of like length, and the loss above for rows that have a teacher; the dev rows have none."""

    def __init__(self, *, weight: float, temperature: float, **parts: Any) -> None:
        super().__init__(**parts)
        self.weight = weight
        self.temperature = temperature

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of a batch, with the outputs when they are asked for; the library calls it."""
        if "teacher" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        words = {name: value for name, value in inputs.items() if name not in ("labels", "teacher")}
        outputs = model(**words)
        loss = distil_loss(
            outputs.logits.float(),
            inputs["teacher"],
            inputs["labels"],
            weight=self.weight,
            temperature=self.temperature,
        )
        return (loss, outputs) if return_outputs else loss
