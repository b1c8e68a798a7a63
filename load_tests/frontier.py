"""Accuracy against speed and size of several versions, in float32 and int8: one picture, one table.

Accuracies come from files of `valence-train evaluate --json`; sizes from the versions; speed, of the engine
alone on one thread, is measured here, in turns. Writes frontier.png, frontier.json and frontier.md.
What has no results or cannot run here gets a dash. Knows nothing of HTTP or of how a version was trained.

    VALENCE_DATA=… python -m load_tests.frontier model_store/sentiment/1=plain STORE/teacher/1=teacher \
        --results plain.json teacher.json=teacher --out docs/frontier
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from load_tests import texts
from load_tests.chosen import ROOT, chosen_version
from load_tests.engine_bench import spent_s, versions
from load_tests.forming import limits
from load_tests.frontier_figures import (
    Form,
    FrontierError,
    Name,
    Result,
    Speed,
    read_results,
    scores_by_form,
    shared_sets,
)
from load_tests.frontier_page import LONG, SENTENCES, Frontier, draw, ordered, page
from load_tests.verdict import EXIT_CANNOT_RUN, EXIT_MET, machine
from service.core import Encoding, TokenBatch
from service.engines import Engine, EngineOptions, open_engine
from service.errors import StartupError
from service.settings import Settings
from service.store import Version
from service.tokenizer import Tokenizer
from service.waiting import WaitingRoom

PRECISIONS = ("float32", "int8")
LONG_TOKENS = 200


@dataclass(frozen=True, slots=True)
class Named:
    """A version, and what it is called."""

    label: str
    version: Version

    def forms(self) -> list[Form]:
        """Its ONNX files in float32 and int8, without figures."""
        manifest = self.version.manifest
        return [
            Form(self.label, model.precision, f"{manifest.name} {manifest.version}", model.bytes)
            for precision in PRECISIONS
            for model in manifest.models
            if (model.format, model.precision) == ("onnx", precision)
        ]


def open_named(given: Sequence[str]) -> list[Named]:
    """The versions of FOLDER or FOLDER=LABEL; without a label it is `<name> <number>`.

    Raises StartupError when one is not there or damaged, FrontierError when two have the same label.
    """
    named: list[Named] = []
    for one in given:
        folder, _, label = one.partition("=")
        version = chosen_version(Path(folder))
        manifest = version.manifest
        named.append(Named(label or f"{manifest.name} {manifest.version}", version))
    labels = [one.label for one in named]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise FrontierError(f"two versions are called {', '.join(twice)}: name them, FOLDER=LABEL")
    return named


def all_results(given: Sequence[str], named: Sequence[Named]) -> list[Result]:
    """What the files say, each FILE or FILE=LABEL, of the forms that the versions have. FrontierError."""
    labels: dict[str, list[str]] = {}
    for one in named:
        manifest = one.version.manifest
        labels.setdefault(f"{manifest.name}/{manifest.version}", []).append(one.label)
    known = {form.name for one in named for form in one.forms()}
    results = []
    for spec in given:
        file, _, label = spec.partition("=")
        for result in read_results(Path(file), label or None, labels):
            if result.name in known:
                results.append(result)
            else:
                print(f"left out: {file}: {' in '.join(result.name)} is no ONNX file in float32 or int8")
    return results


def server_batches(encodings: Sequence[Encoding]) -> list[TokenBatch]:
    """The batches that a server with its defaults makes when all of these texts wait, one a request."""
    room: WaitingRoom[int, Encoding] = WaitingRoom(limits())
    for number, one in enumerate(encodings):
        room.add(number, [one], [len(one)])
    batches = []
    while room.items:
        batches.append(TokenBatch.of(room.take(share=len(encodings))))
    return batches


def measure(
    named: Sequence[Named], kinds: Mapping[str, Sequence[str]], *, rounds: int
) -> dict[Name, dict[str, Speed]]:
    """Texts a second and core of every form that can run here; one that cannot is printed with the reason.

    All read the same texts, in turns. Each has its own tokens and so its own batches.
    """
    with ExitStack() as stack:
        engines: dict[Name, Engine] = {}
        batches: dict[str, dict[str, list[TokenBatch]]] = {}
        for one in named:
            batches[one.label] = _batches(one.version, kinds)
            for form in one.forms():
                options = EngineOptions(engine="onnx", precision=form.precision, device="cpu")
                try:
                    engines[form.name] = open_engine(one.version, options)
                except StartupError as error:
                    print(f"left out: {form.label} in {form.precision}: {error}")
                else:
                    stack.callback(engines[form.name].close)
        spent: dict[tuple[Name, str], list[float]] = {(name, kind): [] for name in engines for kind in kinds}
        for turn in range(rounds + 1):
            for (name, kind), cpu_s in spent.items():
                took_s, _ = spent_s(engines[name], batches[name[0]][kind])
                if turn:  # what a shape costs when it is first seen is not asked here
                    cpu_s.append(took_s)
            print(f"round {turn} of {rounds}", file=sys.stderr, flush=True)
    return {
        name: {kind: _speed(spent[name, kind], batches[name[0]][kind]) for kind in kinds} for name in engines
    }


def _batches(version: Version, kinds: Mapping[str, Sequence[str]]) -> dict[str, list[TokenBatch]]:
    manifest = version.manifest
    tokenizer = Tokenizer.load(
        version.read(manifest.tokenizer),
        max_tokens=manifest.max_tokens,
        max_text_chars=Settings.model_construct().max_text_chars,
    )
    try:
        return {kind: server_batches([tokenizer.encode(one) for one in said]) for kind, said in kinds.items()}
    finally:
        tokenizer.close()


def _speed(cpu_s: Sequence[float], batches: Sequence[TokenBatch]) -> Speed:
    count = sum(map(len, batches))
    tokens = sum(int(batch.lengths.sum()) for batch in batches)
    return Speed(count / min(cpu_s), count / statistics.median(cpu_s), tokens / count)


def frontier(options: argparse.Namespace) -> Frontier:
    """Reads and measures. Raises StartupError or FrontierError, before anything is measured."""
    named = open_named(options.versions)
    results = all_results(options.results, named)
    scores = scores_by_form(results)
    forms = [replace(form, scores=scores.get(form.name, {})) for one in named for form in one.forms()]
    sets = shared_sets(forms, options.sets)
    try:
        note = "" if options.note is None else options.note.read_text(encoding="utf-8")
    except OSError as error:
        raise FrontierError(f"{options.note}: {error.strerror}") from error
    kinds = {
        SENTENCES: texts.sentences()[: options.sentences],
        LONG: texts.reviews(LONG_TOKENS)[: options.reviews],
    }
    about: dict[str, Any] = {
        "machine": machine(),  # with the load before this one
        "libraries": versions(),
        "texts": f"{len(kinds[SENTENCES])} sentences, {len(kinds[LONG])} texts of about {LONG_TOKENS} tokens "
        f"({texts.source()})",
        "rounds": options.rounds,
        "command": _command(options),
        "results": [dict(result.about, label=result.name[0]) for result in results],
    }
    speeds = measure(named, kinds, rounds=options.rounds) if options.rounds else {}
    return Frontier([replace(one, speeds=speeds.get(one.name, {})) for one in forms], sets, about, note)


def _command(options: argparse.Namespace) -> str:
    """As another machine can type it: paths from the root of the repository, or their last names."""
    words = [_shown(one, 2) for one in options.versions]
    words += ["--results", *(_shown(one, 1) for one in options.results)] if options.results else []
    words += ["--sets", *options.sets] if options.sets else []
    words += ["--sentences", str(options.sentences), "--reviews", str(options.reviews)]
    words += ["--rounds", str(options.rounds), "--out", _shown(str(options.out), 1)]
    words += [] if options.note is None else ["--note", _shown(str(options.note), 1)]
    return " ".join(["python -m load_tests.frontier", *map(shlex.quote, words)])


def _shown(given: str, names: int) -> str:
    """A path, and what stands behind `=`; of one outside the repository the last names."""
    path, equals, label = given.partition("=")
    whole = Path(path).resolve()
    inside = whole.is_relative_to(ROOT)
    return ("/".join(whole.parts[-names:]) if not inside else str(whole.relative_to(ROOT))) + equals + label


def write(made: Frontier, folder: Path) -> None:
    """frontier.png, frontier.json and frontier.md."""
    folder.mkdir(parents=True, exist_ok=True)
    draw(made, folder / "frontier.png")
    rows = [
        asdict(form) | {"mean_accuracy": form.accuracy(made.sets), "on_the_front_of": made.fronts_of(form)}
        for form in ordered(made)
    ]
    record = {**made.about, "sets": list(made.sets), "forms": rows}
    (folder / "frontier.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "frontier.md").write_text(page(made), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0, or 2 with the reason when what was given cannot be compared."""
    options = _parse(arguments)
    try:
        made = frontier(options)
    except (StartupError, FrontierError) as error:
        print(f"frontier: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    write(made, options.out)
    print(page(made), end="")
    return EXIT_MET


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("versions", nargs="+", metavar="FOLDER[=LABEL]", help="<store>/<name>/<number>, of any store")
    add("--results", nargs="*", default=[], metavar="FILE[=LABEL]", help="of valence-train evaluate --json")
    add("--sets", nargs="*", default=[], help="what the mean is over (default: all that all results have)")
    add("--out", type=Path, required=True, help="folder of the three files")
    add("--note", type=Path, help="Markdown for the end of the page")
    add("--sentences", type=int, default=96, help="measured in a round (default %(default)s)")
    add("--reviews", type=int, default=16, help="texts of 200 tokens in a round (default %(default)s)")
    add("--rounds", type=int, default=5, help="how often each has its turn; 0 for no speed")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
