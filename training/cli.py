"""The script `valence-train`: fit, evaluate, export. Knows the options; the work is in the other modules.

Those are imported when their command runs, so that `--help` does not wait for torch.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from training.config import (
    DEFAULT_LABELS,
    ENCODERS,
    POSITIONS,
    ConfigError,
    FitConfig,
    NewEncoder,
    write_json,
)
from training.data import DataError

# ruff: noqa: PLC0415

STOPPED = 130
_LEFT = {
    "fit": "; without --restart it goes on at the last checkpoint",
    "export": "; nothing is written",
}
"""What a command that was stopped leaves behind."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0; 2 when it was refused, 1 when no version can be made of a model, 130 when it was stopped by Ctrl-C
        or SIGTERM. The reason is one line on standard error.
    """
    # onnxruntime reports to its maker unless it is told otherwise before it is imported.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    given = list(sys.argv[1:] if arguments is None else arguments)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        options = build_parser(given[0] if given else "").parse_args(given)
        code: int = options.run(options)
    except (ConfigError, DataError) as error:
        print(f"valence-train: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"valence-train: stopped{_LEFT.get(given[0] if given else '', '')}", file=sys.stderr)
        return STOPPED
    finally:
        signal.signal(signal.SIGTERM, before)
    return code


def _stop(number: int, _frame: object) -> None:
    """As Ctrl-C does, so that what was begun is put away; and once, so that it is put away to the end."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def build_parser(command: str = "") -> argparse.ArgumentParser:
    """The options of all commands; those of `export` need torch, and are there when that is the `command`."""
    parser = argparse.ArgumentParser(prog="valence-train", description="Fine-tunes, evaluates, exports.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_fit(commands.add_parser("fit", help="fine-tune an encoder of transformers into a classifier"))
    _add_evaluate(commands.add_parser("evaluate", help="measure a run or a version on labelled sets"))
    export = commands.add_parser("export", help="write a version of the model store from a run")
    if command == "export":
        module = importlib.import_module("training.export")
        module.add_arguments(export)
        export.set_defaults(run=module.main)
    return parser


def _add_fit(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base", required=True, help="folder of a transformers model, or a hub name")
    add("--encoder", choices=ENCODERS, default="library", help="whose code computes it (default %(default)s)")
    add(
        "--from-scratch",
        action="store_true",
        help="random weights, only the tokenizer of --base (own, pre-norm)",
    )
    add("--layers", type=int, help=f"of an encoder from scratch (default {NewEncoder().layers})")
    add("--width", type=int, help=f"of an encoder from scratch (default {NewEncoder().width})")
    add("--heads", type=int, help=f"of an encoder from scratch (default {NewEncoder().heads})")
    add("--positions", choices=POSITIONS, help="of an encoder from scratch (default learned)")
    add("--data", required=True, nargs="+", type=Path, help=".tsv or .tsv.gz files, or folders of them")
    add("--dev", nargs="+", type=Path, default=[], help="what chooses the best epoch (default: dev*, val*)")
    add("--out", required=True, type=Path, help="run folder; a run of the same choices is taken up again")
    add("--labels", default=",".join(DEFAULT_LABELS), help="names in index order (default %(default)s)")
    add("--lr", type=float, default=5e-5, help="peak learning rate (default %(default)s)")
    add("--weight-decay", type=float, default=0.01, help="default %(default)s")
    add("--warmup", type=float, default=0.06, help="share of the steps (default %(default)s)")
    add("--epochs", type=int, default=3, help="default %(default)s")
    add("--batch-items", type=int, default=32, help="texts in a step (default %(default)s)")
    add("--max-tokens", type=int, default=128, help="longer training texts are cut (default %(default)s)")
    add("--seed", type=int, default=42, help="default %(default)s")
    add("--save-steps", type=int, default=1000, help="steps between checkpoints (default %(default)s)")
    add("--threads", type=int, default=_cpus(), help="threads that compute (default %(default)s)")
    add("--restart", action="store_true", help="throw away the run that the folder holds")
    parser.set_defaults(run=_fit)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, help="run folder, folder of a version, or fine-tuned transformers model")
    add("--data", required=True, nargs="+", type=Path, help="files, or folders with dev*, val*, test* files")
    add("--json", type=Path, help="write the results to this file, too")
    add("--trained-on", type=Path, metavar="RUN", help="count overlaps with this run's training rows")
    add("--engine", default="auto", help="engine that reads a version (default %(default)s)")
    add("--precision", default="auto", help="precision of a version (default %(default)s)")
    add("--threads", type=int, default=_cpus(), help="threads that compute (default %(default)s)")
    parser.set_defaults(run=_evaluate)


def _fit(options: argparse.Namespace) -> int:
    config = FitConfig(
        base=str(Path(options.base).resolve()) if Path(options.base).is_dir() else options.base,
        data=tuple(str(path.resolve()) for path in options.data),
        dev=tuple(str(path.resolve()) for path in options.dev),
        labels=tuple(name.strip() for name in options.labels.split(",")),
        learning_rate=options.lr,
        weight_decay=options.weight_decay,
        warmup=options.warmup,
        epochs=options.epochs,
        batch_items=options.batch_items,
        max_tokens=options.max_tokens,
        seed=options.seed,
        save_steps=options.save_steps,
        encoder=options.encoder,
        new=_new_encoder(options),
    )
    from training.train import fit

    metrics = fit(config, options.out, restart=options.restart, threads=options.threads)
    dev = metrics["dev"]
    print(
        f"best epoch {metrics['best_epoch']}: accuracy {dev['accuracy']:.4f}, weighted F1"
        f" {dev['weighted_f1']:.4f} on {dev['rows']} dev rows; the model is in {options.out / 'model'}"
    )
    return 0


def _new_encoder(options: argparse.Namespace) -> NewEncoder | None:
    names = ("layers", "width", "heads", "positions")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if not options.from_scratch and given:
        raise ConfigError(f"--{min(given)}: the base says so, unless --from-scratch leaves it out")
    return NewEncoder(**given) if options.from_scratch else None


def _evaluate(options: argparse.Namespace) -> int:
    from training.classifiers import open_classifier
    from training.evaluate import evaluate, read_sets, table

    classifier = open_classifier(
        options.model, threads=options.threads, engine=options.engine, precision=options.precision
    )
    sets = read_sets(options.data, labels=len(classifier.labels))
    results = evaluate(classifier, sets, trained=_trained_texts(options))
    print(table(results, classifier.labels))
    if options.json is not None:
        about = {"model": options.model.name, **classifier.about(), "labels": list(classifier.labels)}
        write_json(options.json, {**about, "sets": results})
    return 0


def _trained_texts(options: argparse.Namespace) -> frozenset[str] | None:
    """The texts that a run was trained on; None when no run is named or its data is gone."""
    from training.runs import trained_texts

    run: Path = options.trained_on or options.model
    if options.trained_on is None and not (run / "metrics.json").is_file():
        return None
    try:
        return trained_texts(run)
    except DataError as error:
        print(f"valence-train: overlaps are not counted: {error}", file=sys.stderr)
        return None


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    raise SystemExit(main())
