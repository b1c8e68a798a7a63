"""Runs a version that is not in the store yet through the gate, and measures what its manifest will say.

Everything is read by the service's own tokenizer and engine. Knows nothing of how the files were made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from service.classifier import activate
from service.core import FloatArray
from service.engines import Engine, EngineOptions, open_engine
from service.errors import TextRefused
from service.store import GoldenText, Manifest, Metric, ModelFile, Version, form
from service.tokenizer import Tokenizer
from training.data import DataError, Example
from training.leaks import normalised
from training.parity import (
    RERUN_BOUNDS,
    ParityError,
    Plain,
    PlainSession,
    Vocabulary,
    check_company,
    check_grid,
    eager_logits,
    grid,
    join,
    run_all,
)
from training.torchscript import PlainScript

LEAST_ROWS = 2_000
LARGEST_UNKNOWN = 0.5
"""The share of the golden texts' tokens that may be unknown: of a text of unknown words nothing is proven."""
LARGEST_LOSS = 0.005
"""How much accuracy another form may lose against float32, as a share of the rows."""
MAX_TEXT_CHARS = 32_768
BATCH_ITEMS = 8
ALL_SETS = "all sets"
LOGIT_CHANGE = "largest change of a logit against the eager model"
COMPANY_CHANGE = "largest change of a probability by neighbours"

_STORY = (
    "We waited an hour for a table, the soup was cold and the waiter forgot us. Still, the cake was lovely. "
)
GOLDEN_TEXTS = (
    "good",
    "A warm and funny evening; I would go again tomorrow.",
    "It broke on the second day and nobody answers my mails.",
    "The acting is wonderful, but the story drags on and I nearly fell asleep.",
    "I was sure that I would hate it. I laughed the whole time.",
    "not bad at all",
    "¡Qué película! 10/10 – naïve café, Straße… 😀 [SEP] <b>wow</b>\t#nofilter",
    _STORY * 40,
)

BASELINE = "onnx/float32"
"""The form that the others are compared with on the sets, where the version has it."""

Sets = Mapping[str, Sequence[Example]]


@dataclass(frozen=True, slots=True)
class Commands:
    """What somebody else types to get a figure again: the export, and an evaluation by set and form."""

    export: str
    evaluate: Mapping[tuple[str, str], str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a version that passed says of itself."""

    golden_texts: list[GoldenText]
    metrics: list[Metric]


def run_gate(
    version: Version,
    reference: PreTrainedModel,
    *,
    vocabulary: Vocabulary,
    sets: Sets,
    commands: Commands,
    threads: int,
) -> Outcome:
    """Holds every file of the version to the eager model, itself and its accuracy.

    Raises:
        ParityError: something is off by more than its bound.
        DataError: a text of the sets would be refused by the service.
    """
    manifest = version.manifest
    tokenizer = Tokenizer.load(
        version.read(manifest.tokenizer), max_tokens=manifest.max_tokens, max_text_chars=MAX_TEXT_CHARS
    )
    golden = _encode_golden(tokenizer)
    batches = [*grid(vocabulary, manifest.max_tokens), join(golden)]
    expected = [eager_logits(reference, batch, manifest.pad_id) for batch in batches]
    texts = {name: _encode(name, examples, tokenizer) for name, examples in sets.items()}
    company = [*golden, *(ids for encoded in texts.values() for ids in encoded)]
    answers: dict[str, dict[str, FloatArray]] = {}
    rows: dict[str, list[list[float]]] = {"reference": expected[-1].tolist()}
    metrics: list[Metric] = []
    for file in manifest.models:
        options = EngineOptions(engine=file.format, precision=file.precision, threads_per_lane=threads)
        engine = open_engine(version, options)
        worst = check_grid(engine, _plain(version, file), batches, expected)
        change, count = check_company(engine, company, manifest.activation, temperature=manifest.temperature)
        texts_run = sum(len(batch) for batch in batches)
        for name, on, value, examples in (
            (LOGIT_CHANGE, "grid and golden texts", worst, texts_run),
            (COMPANY_CHANGE, "golden texts and sets", change, count),
        ):
            metrics.append(
                Metric(name, on, file.precision, value, examples, commands.export, format=file.format)
            )
        rows[form(file)] = run_all(engine, golden, range(len(golden)), items=1).tolist()
        answers[form(file)] = {name: _run(engine, encoded) for name, encoded in texts.items()}
        engine.close()
    for file in manifest.models:
        metrics += _accuracies(file, answers[form(file)], sets, commands)
    if sets and BASELINE in answers:
        for file in manifest.models:
            if form(file) != BASELINE:
                metrics += _losses(file, answers, sets, manifest=manifest, command=commands.export)
    return Outcome(_golden_texts(rows), metrics)


def _encode_golden(tokenizer: Tokenizer) -> list[Sequence[int]]:
    """The ids of each golden text. Raises ParityError when the tokenizer hardly knows a word of them."""
    encodings = [tokenizer.encode(text) for text in GOLDEN_TEXTS]
    unknown = sum(encoding.unknown for encoding in encodings)
    count = sum(map(len, encodings))
    if unknown > LARGEST_UNKNOWN * count:
        raise ParityError(
            f"the tokenizer does not know {unknown} of the {count} tokens of the golden texts: it belongs to "
            "another model, or to one of another language"
        )
    return [encoding.ids for encoding in encodings]


def _plain(version: Version, file: ModelFile) -> Plain:
    kind = PlainScript if file.format == "torchscript" else PlainSession
    return kind(version.read(file), version.manifest.pad_id)


def _golden_texts(rows: Mapping[str, list[list[float]]]) -> list[GoldenText]:
    """The texts whose label is beyond doubt: a label that another processor may flip proves nothing there."""
    doubt = 2 * max(RERUN_BOUNDS.values())
    sure = [
        GoldenText(text, logits)
        for at, text in enumerate(GOLDEN_TEXTS)
        if min(map(_margin, (logits := {key: values[at] for key, values in rows.items()}).values())) > doubt
    ]
    if not sure:
        raise ParityError("the model is in doubt about every golden text: it was hardly trained")
    return sure


def _margin(logits: Sequence[float]) -> float:
    """How far the best label is ahead of the next; with one label, how far the logit is from 0."""
    best, second = [*sorted(logits, reverse=True), 0.0][:2]
    return abs(best - second)


def check_rows(sets: Sets) -> None:
    """Raises DataError when the sets are too small to judge what int8 loses."""
    count = sum(len(examples) for examples in sets.values())
    if count < LEAST_ROWS:
        raise DataError(
            f"int8 is judged on at least {LEAST_ROWS:,} labelled texts, {count:,} are given (--data)"
        )


def _accuracies(
    file: ModelFile, by_set: Mapping[str, FloatArray], sets: Sets, commands: Commands
) -> list[Metric]:
    return [
        Metric(
            "accuracy",
            name,
            file.precision,
            float(_hits(logits, sets[name]).mean()),
            len(sets[name]),
            commands.evaluate[name, form(file)],
            format=file.format,
        )
        for name, logits in by_set.items()
    ]


def _losses(
    file: ModelFile,
    answers: Mapping[str, Mapping[str, FloatArray]],
    sets: Sets,
    *,
    manifest: Manifest,
    command: str,
) -> list[Metric]:
    """What a form changes against float32, over all sets. Raises ParityError when it loses too much.

    A text that stands in several sets counts once.
    """
    own = form(file)
    once = _once(sets)
    hits, scores = {}, {}
    for key in (BASELINE, own):
        by_set = answers[key]
        hits[key] = np.concatenate([_hits(by_set[name], sets[name]) for name in sets])[once]
        logits = np.concatenate([by_set[name] for name in sets])[once]
        scores[key] = activate(logits, manifest.activation, temperature=manifest.temperature)
    loss = float(hits[BASELINE].mean() - hits[own].mean())
    if not loss <= LARGEST_LOSS:
        raise ParityError(
            f"{own} loses {loss:.2%} of accuracy against float32, and {LARGEST_LOSS:.1%} is allowed"
        )
    change = np.abs(scores[own] - scores[BASELINE]).max(axis=1)
    values = {
        "accuracy lost against float32": loss,
        "p99 of the change of a probability against float32": float(np.quantile(change, 0.99)),
    }
    return [
        Metric(name, ALL_SETS, file.precision, value, len(change), command, format=file.format)
        for name, value in values.items()
    ]


def _once(sets: Sets) -> list[int]:
    """Where each text stands first, as indices into the rows of all sets, one set after the other."""
    texts = [normalised(example.text) for examples in sets.values() for example in examples]
    return list({text: at for at, text in reversed(list(enumerate(texts)))}.values())


def _encode(name: str, examples: Sequence[Example], tokenizer: Tokenizer) -> list[Sequence[int]]:
    encoded = []
    for number, example in enumerate(examples, 1):
        try:
            encoded.append(tokenizer.encode(example.text).ids)
        except TextRefused as refusal:
            raise DataError(
                f"{name}, row {number}: the service refuses the text: {refusal.detail}"
            ) from refusal
    return encoded


def _run(engine: Engine, texts: Sequence[Sequence[int]]) -> FloatArray:
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    return run_all(engine, texts, by_length, items=BATCH_ITEMS)


def _hits(logits: FloatArray, examples: Sequence[Example]) -> NDArray[np.bool_]:
    """Whether each answer is the label; a single logit says 1 above zero."""
    best = (logits[:, 0] > 0).astype(np.int64) if logits.shape[1] == 1 else logits.argmax(axis=1)
    right: NDArray[np.bool_] = best == np.array([example.label for example in examples])
    return right
