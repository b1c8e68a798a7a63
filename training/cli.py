"""The script `valence-train`. Knows the commands and their options; the work is in the other modules.

Those are imported when their command runs, so that `--help` does not wait for torch.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training import annotate, goals
from training.config import (
    DEFAULT_LABELS,
    ENCODERS,
    POSITIONS,
    ConfigError,
    FitConfig,
    NewEncoder,
)
from training.data import DataError

# ruff: noqa: PLC0415

STOPPED = 130
SOFT_WEIGHT = 0.8
SOFT_TEMPERATURE = 2.0
_LEFT = {
    "fit": "; without --restart it goes on at the last checkpoint",
    "logits": "; the same command goes on",
    "evaluate": "; --json has what was measured",
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
    _add_mix(commands.add_parser("mix", help="draw the rows of a recipe from the data sets"))
    _add_logits(commands.add_parser("logits", help="keep what a teacher says of the texts of a mix"))
    _add_card_table(commands.add_parser("card-table", help="the results of evaluate beside the goals"))
    card = commands.add_parser("card", help="write the model card of a version anew, with notes")
    annotate.add_arguments(card)
    card.set_defaults(run=annotate.main)
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
    add("--freeze-layers", type=int, help="keep the embeddings and so many layers (default: all learn)")
    add("--attention-dropout", type=float, help="0 is far faster on a CPU (default: that of the base)")
    add("--teacher", type=Path, metavar="FILE.npz", help="learn from logits that the command logits kept")
    add("--soft-weight", type=float, help=f"share of the teacher in the loss (default {SOFT_WEIGHT})")
    add("--soft-temperature", type=float, help=f"of teacher and student (default {SOFT_TEMPERATURE})")
    add("--threads", type=int, default=_cpus(), help="threads that compute (default %(default)s)")
    add("--restart", action="store_true", help="throw away the run that the folder holds")
    parser.set_defaults(run=_fit)


def _add_mix(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", type=Path, help="TOML, as those in training/recipes")
    add("--data", required=True, type=Path, help="folder of the data sets")
    add("--out", required=True, type=Path, help="folder that is written, for fit --data")
    parser.set_defaults(run=_mix)


def _add_logits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, help="run folder, folder of a version, or fine-tuned transformers model")
    add("--data", required=True, type=Path, help="folder with train.tsv, unlabelled.tsv or both")
    add("--out", required=True, type=Path, metavar="FILE.npz", help="the file, for fit --teacher")
    add("--engine", default="auto", help="engine that reads a version (default %(default)s)")
    add("--precision", default="auto", help="precision of a version (default %(default)s)")
    add("--threads", type=int, default=_cpus(), help="lanes that compute (default %(default)s)")
    parser.set_defaults(run=_logits)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, help="run folder, folder of a version, or fine-tuned transformers model")
    sets = parser.add_mutually_exclusive_group(required=True)
    sets.add_argument("--data", nargs="+", type=Path, help="files, or folders with dev*, val*, test* files")
    sets.add_argument("--suite", type=Path, help="folder of all data sets: every set, and CheckList")
    add("--quick", action="store_true", help="of the suite, a part of the longest set")
    add("--checklist-rows", type=int, help="at most so many cases of each CheckList test (default: all)")
    add("--against", metavar="PRECISION", help="also what is lost against another precision of the version")
    add("--json", type=Path, help="write the results to this file, too")
    add("--diagrams", type=Path, metavar="FOLDER", help="draw how honest the probabilities of test sets are")
    add("--trained-on", type=Path, metavar="RUN", help="count overlaps with this run's training rows")
    add("--engine", default="auto", help="engine that reads a version (default %(default)s)")
    add("--precision", default="auto", help="precision of a version (default %(default)s)")
    add("--threads", type=int, default=_cpus(), help="threads that compute (default %(default)s)")
    parser.set_defaults(run=_evaluate)


def _add_card_table(parser: argparse.ArgumentParser) -> None:
    goals.add_arguments(parser)
    parser.set_defaults(run=goals.main)


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
        freeze_layers=options.freeze_layers,
        attention_dropout=options.attention_dropout,
        **_teaching(options),
    )
    from training.train import fit

    metrics = fit(config, options.out, restart=options.restart, threads=options.threads)
    dev = metrics["dev"]
    print(
        f"best epoch {metrics['best_epoch']}: accuracy {dev['accuracy']:.4f}, weighted F1"
        f" {dev['weighted_f1']:.4f} on {dev['rows']} dev rows; the model is in {options.out / 'model'}"
    )
    return 0


def _teaching(options: argparse.Namespace) -> dict[str, Any]:
    """A weight without a teacher is refused with the other choices."""
    weight, temperature = options.soft_weight, options.soft_temperature
    if options.teacher is None:
        return {"soft_weight": weight, "soft_temperature": temperature}
    return {
        "teacher": str(options.teacher.resolve()),
        "soft_weight": SOFT_WEIGHT if weight is None else weight,
        "soft_temperature": SOFT_TEMPERATURE if temperature is None else temperature,
    }


def _mix(options: argparse.Namespace) -> int:
    from training.mix import mix_table, write_mix
    from training.recipe import read_recipe

    print(mix_table(write_mix(read_recipe(options.recipe), options.data, options.out)))
    return 0


def _logits(options: argparse.Namespace) -> int:
    from training.logits import ask

    teacher = ask(
        options.model,
        options.data,
        options.out,
        engine=options.engine,
        precision=options.precision,
        threads=options.threads,
    )
    counts = " and ".join(f"{len(rows)} rows of {name}" for name, rows in teacher.rows.items())
    print(f"{teacher.about['model']}: {counts} are in {options.out}")
    return 0


def _new_encoder(options: argparse.Namespace) -> NewEncoder | None:
    names = ("layers", "width", "heads", "positions")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if not options.from_scratch and given:
        raise ConfigError(f"--{min(given)}: the base says so, unless --from-scratch leaves it out")
    return NewEncoder(**given) if options.from_scratch else None


def _evaluate(options: argparse.Namespace) -> int:
    from training.measure import main as measure

    return measure(options)


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    raise SystemExit(main())
