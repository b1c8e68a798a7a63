"""Builds a tiny classifier of each family, as the library saves one, and says what the library answers.

The weights are random, and the head was set to have opinions: the answers differ from text to text.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertTokenizer,
    DistilBertTokenizer,
    MPNetTokenizer,
    PreTrainedModel,
    RobertaTokenizer,
)

from encoder.config import EncoderConfig
from service.core import FloatArray
from tests.models import BAD, BERT_SPECIAL, CHARACTERS, GOOD, PLAIN, ROBERTA_SPECIAL
from tests.training.tiny import ALL_ROWS, write_rows
from training.own import new_classifier
from training.pretrained import load_classifier, load_tokenizer

MONTHS = (
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
)
CAPITALS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ACCENTS = "éèêüßñ"
# Before a word and inside it.
PIECES = [*CHARACTERS, *CAPITALS, *ACCENTS, *(f"##{c}" for c in (*CHARACTERS, *CAPITALS, *ACCENTS))]
TITLES = [word.title() for word in (*GOOD, *BAD)]
LEAST_ROWS = 2_000
SPREAD = 0.2
MARGIN = 1.0
"""How far ahead of the next label the answer of a labelled row is, so that only a real fault turns it."""
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
DISTILBERT_SHAPE: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}


@dataclass(frozen=True)
class Family:
    """A classifier to be made.

    Attributes:
        kind: the `model_type` of the library, or "valence" for a pre-norm encoder of our own.
        positions: rows of its table of positions.
        max_tokens: of these, what a text can use.
        several: whether more than one label can be right at once.
    """

    name: str
    kind: Literal["bert", "distilbert", "roberta", "mpnet", "valence"]
    labels: tuple[str, ...] = ("negative", "positive")
    positions: int = 64
    max_tokens: int = 64
    cased: bool = False
    several: bool = False

    @property
    def sigmoid(self) -> bool:
        """Whether each label is judged for itself."""
        return self.several or len(self.labels) == 1


FAMILIES = (
    Family("bert", "bert"),
    Family("cased, 3 labels", "bert", ("bad", "so-so", "good"), cased=True),
    Family("several labels at once", "bert", ("sad", "funny", "long", "new"), several=True),
    Family("distilbert, 1 label", "distilbert", ("positive",)),
    Family("roberta, 12 labels", "roberta", MONTHS, positions=514, max_tokens=512, cased=True),
    Family("pre-norm of our own", "valence"),
    Family("mpnet", "mpnet", positions=66),
)


@dataclass(frozen=True)
class Saved:
    """The folder of a classifier, and labelled rows whose labels are its own answers."""

    family: Family
    folder: Path
    rows: Path


@dataclass(frozen=True)
class Expected:
    """What the library says of a text."""

    logits: FloatArray
    scores: dict[str, float]
    tokens: int
    truncated: bool


def save_family(family: Family, folder: Path) -> Saved:
    """Makes the classifier and its rows. The same for the same family."""
    saved = folder / "classifier"
    tokenizer = _tokenizer(family)
    tokenizer.save_pretrained(saved)
    torch.manual_seed(5)
    model = _model(family, tokenizer)
    model.save_pretrained(saved)
    texts = [text for text, _ in ALL_ROWS]
    _give_opinions(model, np.concatenate([[e.logits] for e in Library(family, saved).answer(texts)]))
    model.save_pretrained(saved)
    _sort_names_as_strings(saved / "config.json")
    rows = [
        (text, label)
        for text, expected in zip(texts, Library(family, saved).answer(texts), strict=True)
        if (label := _clear_label(expected.logits)) is not None
    ]
    assert len({label for _, label in rows}) > 1, "one answer for all texts tells nothing"
    return Saved(family, saved, write_rows(folder / "dev.tsv", islice(cycle(rows), LEAST_ROWS)))


class Library:
    """A saved classifier read by the library's own tokenizer and model (by our encoder, if it is our own).

    The weights are rounded to float16, as those of a version are, and computed with in float32.
    """

    def __init__(self, family: Family, folder: Path) -> None:
        self._family = family
        self._tokenizer = load_tokenizer(str(folder))
        self._model = load_classifier(folder)
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.copy_(parameter.half().float())

    def answer(self, texts: Sequence[str]) -> list[Expected]:
        """Each text for itself, cut as the library cuts; control tokens in a text are plain characters."""
        return [self._answer(text) for text in texts]

    def _answer(self, text: str) -> Expected:
        whole = self._tokenizer(text, split_special_tokens=True)["input_ids"]
        inputs = self._tokenizer(
            text,
            truncation=True,
            max_length=self._family.max_tokens,
            split_special_tokens=True,
            return_tensors="pt",
        )
        with torch.inference_mode():
            logits = self._model(**inputs).logits[0]
        scores = torch.sigmoid(logits) if self._family.sigmoid else torch.softmax(logits, 0)
        names = self._family.labels
        return Expected(
            logits.numpy(),
            dict(zip(names, scores.tolist(), strict=True)),
            int(inputs["input_ids"].shape[1]),
            len(whole) > self._family.max_tokens,
        )


def _tokenizer(family: Family) -> Any:
    """The library's own class for the family."""
    if family.kind == "roberta":
        vocabulary, merges = _byte_pairs()
        return RobertaTokenizer(vocab=vocabulary, merges=merges)
    special = (*ROBERTA_SPECIAL[:4], "[UNK]", "<mask>") if family.kind == "mpnet" else BERT_SPECIAL
    words = (*special, *GOOD, *BAD, *PLAIN, *TITLES, *PIECES)
    ids = {word: index for index, word in enumerate(dict.fromkeys(words))}
    if family.kind == "mpnet":
        return MPNetTokenizer(vocab=ids)
    kind: Any = DistilBertTokenizer if family.kind == "distilbert" else BertTokenizer
    return kind(vocab=ids, do_lower_case=not family.cased)


def _byte_pairs() -> tuple[dict[str, int], Any]:
    """Bytes merged to the words of the rows, as in a real vocabulary; and the pairs that are merged."""
    backend = Backend(BPE(unk_token=ROBERTA_SPECIAL[3]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=list(ROBERTA_SPECIAL),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text for text, _ in ALL_ROWS], trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def _model(family: Family, tokenizer: Any) -> PreTrainedModel:
    if family.kind == "valence":
        shape = EncoderConfig(
            words=len(tokenizer),
            max_tokens=family.positions,
            width=32,
            layers=2,
            heads=2,
            inner_width=64,
            norm_first=True,
            spread=SPREAD,
        )
        own = new_classifier(shape, labels=family.labels, pad_id=tokenizer.pad_token_id)
        own.train(False)
        return own
    config = AutoConfig.for_model(
        family.kind,
        **(DISTILBERT_SHAPE if family.kind == "distilbert" else SHAPE),
        vocab_size=len(tokenizer),
        max_position_embeddings=family.positions,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=SPREAD,
        id2label=dict(enumerate(family.labels)),
        label2id={name: index for index, name in enumerate(family.labels)},
        problem_type="multi_label_classification" if family.several else None,
    )
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    model.train(False)
    return model


def _give_opinions(model: PreTrainedModel, logits: FloatArray) -> None:
    """Centres and spreads the logits float32[n, labels] that it gave, so that answers differ by the text."""
    output = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
    assert output.out_features == logits.shape[1]
    scale = 2 / logits.std(axis=0)
    with torch.no_grad():
        output.weight.mul_(torch.from_numpy(scale)[:, None])
        output.bias.sub_(torch.from_numpy(logits.mean(axis=0))).mul_(torch.from_numpy(scale))


def _clear_label(logits: FloatArray) -> int | None:
    """The label of a text, if it is beyond doubt; a single logit says 1 above zero."""
    if len(logits) == 1:
        return int(logits[0] > 0) if abs(logits[0]) > MARGIN else None
    second, best = np.sort(logits)[-2:]
    return int(logits.argmax()) if best - second > MARGIN else None


def _sort_names_as_strings(path: Path) -> None:
    """Puts "10" before "2", as files do that were written with sorted keys."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["id2label"] = dict(sorted(config["id2label"].items()))
    path.write_text(json.dumps(config), encoding="utf-8")
