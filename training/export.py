"""The command `valence-train export`: makes a version of the model store, after it passed the gate.

Knows the order of the steps and what is measured; graphs, precision, bounds and the layout are others' work.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import onnx_ir as ir
import torch
from transformers import PreTrainedModel

from service.engines import EngineOptions, open_engine
from service.errors import StartupError
from service.store import (
    FileRecord,
    GoldenText,
    Manifest,
    Metric,
    ModelFile,
    Source,
    Version,
    form,
    open_version,
    versions,
    write_version,
)
from service.tokenizer import Tokenizer
from service.warmup import check_golden_texts
from training.annotate import read_notes
from training.calibrate import calibration_sets
from training.card import card_of
from training.commands import commands_of
from training.config import ConfigError
from training.data import Example
from training.evaluate import read_sets
from training.forms import FORMS, formats_of
from training.gate import GOLDEN_TEXTS, MAX_TEXT_CHARS, Outcome, check_rows, run_gate
from training.graph import (
    Unexportable,
    architecture_of,
    graph_weights,
    one_reason,
    rebuild,
    round_to_half,
    store_half,
    trace,
)
from training.half import compute_half
from training.origin import Origin, open_origin
from training.own import through_encoder
from training.parity import RERUN_BOUNDS, Vocabulary, check_same_weights
from training.quantize import quantize
from training.sources import NONE_STATED
from training.temper import temper
from training.torchscript import script_weights, trace_script


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("source", type=Path, help="run folder, or folder of any fine-tuned classifier of transformers")
    add("--name", required=True, help="name of the model in the store")
    add("--version", required=True, type=int, help="number of the version, which must be new")
    add("--store", type=Path, default=Path("model_store"), help="default %(default)s")
    add(
        "--formats",
        "--format",
        default="onnx,int8",
        help=f"some of {', '.join(FORMS)}, comma separated; int8, and float16 for a GPU, need onnx "
        "(default %(default)s)",
    )
    add(
        "--data", nargs="+", type=Path, default=[], help="labelled sets; int8 is judged on 2,000 rows or more"
    )
    add(
        "--calibrate-on",
        nargs="+",
        type=Path,
        default=[],
        help="fit a temperature on the dev rows of these files (default: 1)",
    )
    add("--labels", default="", help="names in index order, comma separated (default: those of the model)")
    add("--max-tokens", type=int, help="longest text (default: what model and tokenizer allow)")
    add("--base-model", type=_source, metavar="NAME=LICENCE", help="what was fine-tuned")
    add("--trained-on", type=_source, nargs="+", default=[], metavar="NAME=LICENCE", help="training sets")
    add("--card", type=Path, nargs="+", default=[], help="Markdown files with more for the model card")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default %(default)s")


def main(options: argparse.Namespace) -> int:
    """Writes the version and returns 0; 1 when none can be made of the model.

    Raises ConfigError or DataError, and writes nothing, when refused.
    """
    try:
        path = export(options)
    except (StartupError, FileExistsError) as error:
        raise ConfigError(str(error)) from error
    except Unexportable as error:
        print(f"valence-train: error: {error}", file=sys.stderr)
        return 1
    print(f"{options.name} {options.version} is written: {path}")
    return 0


def export(options: argparse.Namespace) -> Path:
    """Makes the files, holds them to the gate and writes the version. Returns its folder."""
    formats = formats_of(options.formats)
    if options.version in versions(options.store, options.name):
        raise FileExistsError(f"{options.name} {options.version} is in the store; a version is never changed")
    notes = read_notes(options.card)
    torch.set_num_threads(options.threads)
    origin = open_origin(
        options.source,
        labels=[name.strip() for name in options.labels.split(",") if name.strip()],
        max_tokens=options.max_tokens,
        base_model=options.base_model,
        training_data=options.trained_on,
    )
    count = max(2, len(origin.labels))
    sets = read_sets(options.data, labels=count) if options.data else {}
    dev = calibration_sets(options.calibrate_on, labels=count) if options.calibrate_on else {}
    if "int8" in formats:
        check_rows(sets)
    with tempfile.TemporaryDirectory(prefix="valence-export-") as work:
        with one_reason(origin.model):
            files = make_files(origin, formats, Path(work))
        trial = _try(options, origin, files, work=Path(work), sets=sets, dev=dev)
        sizes = {name: path.stat().st_size for name, path in files.items()}
        card = card_of(trial, sizes, notes).encode()
        return write_version(options.store, trial, _content(origin, files, card))


def make_files(origin: Origin, formats: Sequence[str], folder: Path) -> dict[str, Path]:
    """Rounds the model of the origin to float16 and writes a file for each format; by file name.

    They are made through our encoder where it knows the family. The reference stays with the library's code.
    """
    round_to_half(origin.model)
    plain = through_encoder(origin.model)
    parameters = [name for name, _ in origin.model.named_parameters()]
    files = {FORMS[name].path: folder / FORMS[name].path for name in formats}
    if "onnx" in formats:
        graph = trace(plain, origin.max_tokens)
        for name in set(formats) & {"onnx", "float16", "int8"}:
            made = graph.clone()
            if name == "int8":
                quantize(made)
            if name == "float16":
                compute_half(made)
            else:
                store_half(made, parameters)
            ir.save(made, files[FORMS[name].path])
    if "torchscript" in formats:
        files["model.torchscript"].write_bytes(trace_script(plain))
    return files


def _reference(model: PreTrainedModel, files: dict[str, Path]) -> PreTrainedModel:
    """The eager model, read back from the file; where there are two float files, both hold the same."""
    held = []
    if "model.onnx" in files:
        held.append(graph_weights(files["model.onnx"]))
    if "model.torchscript" in files:
        held.append(script_weights(files["model.torchscript"].read_bytes()))
    rebuilt = [rebuild(weights, architecture_of(model)) for weights in held]
    for reference in rebuilt:
        check_same_weights(model, reference)
    return rebuilt[0]


def _try(
    options: argparse.Namespace,
    origin: Origin,
    files: dict[str, Path],
    *,
    work: Path,
    sets: dict[str, list[Example]],
    dev: dict[str, list[Example]],
) -> Manifest:
    """The manifest of a version that passed: it was written to a store of its own and read back for that.

    `dev` are the sets that the temperature is fitted on, before the gate: it holds the probabilities that
    will be served.
    """
    reference = _reference(origin.model, files)
    draft = _draft(options, origin, files)
    write_version(work / "store", draft, _content(origin, files, b"-"))
    version = open_version(work / "store", draft.name, draft.version)
    commands = commands_of(options, sets, draft)
    tempered: list[Metric] = []
    if dev:
        temperature, tempered = temper(version, dev, threads=options.threads, command=commands.export)
        version = replace(version, manifest=replace(version.manifest, temperature=temperature))
    outcome = run_gate(
        version,
        reference,
        vocabulary=Vocabulary(origin.special, origin.words, origin.pad_id),
        sets=sets,
        commands=commands,
        threads=options.threads,
    )
    outcome = replace(outcome, metrics=[*outcome.metrics, *tempered])
    if origin.dev is not None:
        origin.dev.check(outcome.metrics)
    return _confirmed(version, outcome, options.threads)


def _content(origin: Origin, files: dict[str, Path], card: bytes) -> dict[str, bytes | Path]:
    return {**files, "tokenizer.json": origin.tokenizer_json, "README.md": card}


def _confirmed(version: Version, outcome: Outcome, threads: int) -> Manifest:
    """The manifest with its golden texts and metrics, after the service's own check at start accepted it."""
    manifest = replace(version.manifest, golden_texts=outcome.golden_texts, metrics=outcome.metrics)
    tokenizer = Tokenizer.load(
        version.read(manifest.tokenizer), max_tokens=manifest.max_tokens, max_text_chars=MAX_TEXT_CHARS
    )
    for file in manifest.models:
        options = EngineOptions(engine=file.format, precision=file.precision, threads_per_lane=threads)
        engine = open_engine(version, options)
        check_golden_texts(engine, tokenizer, manifest)
        engine.close()
    return manifest


def _draft(options: argparse.Namespace, origin: Origin, files: dict[str, Path]) -> Manifest:
    """All that is known before the gate; the golden logits are none yet."""
    models = [
        ModelFile(one.path, one.format, one.precision, 0, "", RERUN_BOUNDS[one.precision])
        for one in FORMS.values()
        if one.path in files
    ]
    nothing = {form(model): [0.0] * len(origin.labels) for model in models}
    return Manifest(
        schema_version=1,
        name=options.name,
        version=options.version,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        labels=list(origin.labels),
        activation=origin.activation,
        max_tokens=origin.max_tokens,
        padding_side="right",
        pad_id=origin.pad_id,
        base_model=origin.base_model,
        training_data=list(origin.training_data),
        metrics=[],
        temperature=1.0,
        golden_texts=[GoldenText(text, nothing) for text in GOLDEN_TEXTS],
        tokenizer=FileRecord("tokenizer.json", 0, ""),
        models=models,
        architecture=architecture_of(origin.model),
    )


def _source(given: str) -> Source:
    name, _, licence = given.partition("=")
    if not name.strip():
        raise argparse.ArgumentTypeError("a name is missing: NAME=LICENCE")
    return Source(name.strip(), licence.strip() or NONE_STATED)
