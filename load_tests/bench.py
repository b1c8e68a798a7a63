"""Every yardstick in one command: runs the parts one after another and writes one report.

    VALENCE_DATA=… python -m load_tests.bench [--out .cache/bench] [--only served,knee] [--short]

Needs wrk, and a machine that does nothing else. Writes report.md and report.json, and prints the table of the
goals. Ends with 0, with 1 when a goal is missed, with 2 when a part could not run. `--short` runs every part
for about a second, several at a time, to see that it works: no goal decides the exit code.
"""

import argparse
import contextlib
import datetime as dt
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from load_tests import goals, texts
from load_tests.bench_parts import Part, all_parts
from load_tests.compare import wrk
from load_tests.record import Record
from load_tests.service_process import ROOT
from load_tests.verdict import EXIT_CANNOT_RUN, EXIT_MET, EXIT_MISSED, machine

OUT = ROOT / ".cache" / "bench"
SHORT_AT_A_TIME = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a part: its record, or why it could not run."""

    part: str
    record: Record | None
    problem: str
    took_s: float


def run_part(part: Part, folder: Path, *, is_short: bool) -> Outcome:
    """Run one; whatever it raises is its problem alone."""
    own = folder / part.name
    own.mkdir(parents=True, exist_ok=True)
    began_s = time.perf_counter()
    found, problem = None, ""
    try:
        found = part.run(own, is_short)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the other parts go on
        problem = f"{type(error).__name__}: {error}"
    return Outcome(part.name, found, problem, time.perf_counter() - began_s)


def run_all(parts: Sequence[Part], folder: Path, *, is_short: bool) -> Iterator[Outcome]:
    """One after another, in short several at a time; in their order. All that they started is ended."""
    pool = ThreadPoolExecutor(SHORT_AT_A_TIME if is_short else 1)
    try:
        yield from pool.map(lambda part: run_part(part, folder, is_short=is_short), parts)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def as_markdown(outcomes: Sequence[Outcome], about: str) -> str:
    """The goals first, then each part."""
    took_s = sum(one.took_s for one in outcomes)
    lines = ["# Benchmark", "", f"{about}; {took_s / 60:.1f} minutes of measuring, installs aside.", ""]
    lines += goals.table(figures(outcomes))
    for one in outcomes:
        lines += ["", f"<!-- {one.part}, {one.took_s:.0f} s -->"]
        lines.append(
            one.record.as_markdown() if one.record else f"## {one.part}\n\nDid not run: {one.problem}"
        )
    return "\n".join(lines).rstrip() + "\n"


def as_json(outcomes: Sequence[Outcome], about: str) -> dict[str, Any]:
    """Everything, for a program."""
    seen = figures(outcomes)
    return {
        "about": about,
        "goals": {name: {"figure": seen[name], "met": goals.GOALS[name].met(seen[name])} for name in seen},
        "parts": {one.part: asdict(one) for one in outcomes},
    }


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The figure of every goal that was measured."""
    return {name: figure for one in outcomes if one.record for name, figure in one.record.goals.items()}


def _write(outcomes: Sequence[Outcome], about: str, folder: Path) -> None:
    """Both files; after each part, so that a run that is ended early leaves what it has."""
    (folder / "report.md").write_text(as_markdown(outcomes, about), encoding="utf-8")
    (folder / "report.json").write_text(
        json.dumps(as_json(outcomes, about), indent=1) + "\n", encoding="utf-8"
    )


def _chosen(only: str, skip: str) -> list[Part]:
    """Raises ValueError: there is no such part."""
    parts = all_parts()
    names = {part.name for part in parts}
    wanted, unwanted = (set(filter(None, text.split(","))) for text in (only, skip))
    if unknown := (wanted | unwanted) - names:
        raise ValueError(
            f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}"
        )
    return [part for part in parts if part.name not in unwanted and (not wanted or part.name in wanted)]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the report")
    parser.add_argument("--only", default="", help="parts, with commas between")
    parser.add_argument("--skip", default="", help="parts to leave out")
    parser.add_argument("--short", action="store_true", help="see that it works; asserts no times")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the exit codes stand above."""
    options = _options(arguments)
    try:
        wrk.find()
        parts = _chosen(options.only, options.skip)
    except (wrk.WrkError, ValueError) as error:
        print(f"cannot run: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC; {machine()}; texts: {texts.source()}"
    outcomes: list[Outcome] = []
    if options.short:
        about = f"SHORT FORM, THE FIGURES MEAN NOTHING; {about}"
    try:
        for outcome in run_all(parts, folder, is_short=options.short):
            outcomes.append(outcome)
            _write(outcomes, about, folder)
            print(f"{outcome.part}: {outcome.problem or 'done'}, {outcome.took_s:.0f} s", flush=True)
    except KeyboardInterrupt:
        print(f"stopped; what was measured is in {folder}", file=sys.stderr)
        return 128 + signal.SIGINT
    seen = figures(outcomes)
    print("\n".join(["", about, "", *goals.table(seen), "", f"written to {folder}"]))
    if any(outcome.problem for outcome in outcomes):
        return EXIT_CANNOT_RUN
    return EXIT_MISSED if goals.missed(seen) and not options.short else EXIT_MET


if __name__ == "__main__":
    sys.exit(main())
