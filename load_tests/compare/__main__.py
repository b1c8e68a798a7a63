"""Compares Valence with other servers: same model file or weights, same texts, same generator, in turns.

    VALENCE_DATA=… python -m load_tests.compare [--only valence,mosec-docs] [--seconds 8] [--rounds 3]

Installs what is missing, checks what each server answers, prints the tables and writes them as result.json
and result.md. Ends with 0, with 1 when requests were not answered with 200, and with 2 when it could not run.
README.md of this folder says how to read it.
"""

import argparse
import contextlib
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from load_tests import texts, verdict
from load_tests.chosen import chosen_version
from load_tests.compare import environments, wrk
from load_tests.compare.contestants import ROOT, Contestant, Place, all_contestants
from load_tests.compare.engine_alone import EngineAlone
from load_tests.compare.report import Report, Turn
from load_tests.compare.rounds import Plan, play, running
from load_tests.compare.servers import ServerError
from service.errors import StartupError

CACHE = ROOT / ".cache" / "compare"
END_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, run, write; the exit code."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, _leave)
    try:
        wrk.find()
        chosen = _chosen(options.only, options.skip)
        version = chosen_version(options.model_version).path
        cache = options.cache.resolve()
        place = Place(version, cache / "checkpoint", cache, len(os.sched_getaffinity(0)))
        _prepare(chosen, place)
        report = _compare(chosen, place, options)
    except (wrk.WrkError, environments.InstallError, ServerError, StartupError) as error:
        print(f"cannot run: {error}", file=sys.stderr)
        return verdict.EXIT_CANNOT_RUN
    except KeyboardInterrupt:
        print("stopped, and every server ended", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        _end_children()
    failed = _write(report, options.out)
    return verdict.EXIT_MISSED if failed else verdict.EXIT_MET


def _compare(chosen: Sequence[Contestant], place: Place, options: argparse.Namespace) -> Report:
    served = texts.sentences()
    plan = Plan(options.seconds, options.rounds, options.connections, options.lock)
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="valence-compare-")))
        machine = verdict.machine()  # with the load from before
        entries = [stack.enter_context(running(one, place=place, work=work, texts=served)) for one in chosen]
        engine = stack.enter_context(
            contextlib.closing(EngineAlone(place.version, served, cores=place.cores))
        )
        report = Report(
            date=f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC",
            machine=machine,
            texts=f"{len(served)} sentences ({_source()})",
            seconds=plan.seconds,
            about={
                entry.contestant.name: {
                    "about": entry.contestant.about,
                    "versions": environments.versions(entry.contestant.environment, place.cache),
                    "rss_mb": entry.server.rss_mb(),
                }
                for entry in entries
            },
        )
        for figure in play(entries, engine, plan):
            if isinstance(figure, Turn):
                report.turns.append(figure)
                print(
                    f"round {figure.round + 1}, {figure.server}, {figure.connections}:"
                    f" {figure.load.rate:.0f} requests/s",
                    flush=True,
                )
            else:
                report.bounds.append(figure)
    return report


def _write(report: Report, out: Path) -> int:
    """Print and keep it; how many requests failed."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    (out / "result.md").write_text(report.as_markdown(), encoding="utf-8")
    print(f"\n{report.as_markdown()}\nwritten to {out}")
    failed = sum(row.failed for row in report.rows())
    if failed:
        print(f"{failed} requests were not answered with 200")
    return failed


def _chosen(only: str, skip: str) -> list[Contestant]:
    """By name, or by the first part of it: `mosec` is every mosec. Raises ServerError: there is none."""
    everyone = all_contestants()
    wanted, unwanted = (set(filter(None, names.split(","))) for names in (only, skip))
    known = {one.name for one in everyone} | {one.environment for one in everyone}
    if unknown := (wanted | unwanted) - known:
        raise ServerError(
            f"no server is called {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}"
        )
    chosen = [
        one
        for one in everyone
        if (not wanted or wanted & {one.name, one.environment}) and not unwanted & {one.name, one.environment}
    ]
    if not chosen:
        raise ServerError("no server is left to compare")
    return chosen


def _prepare(chosen: Sequence[Contestant], place: Place) -> None:
    """The environments, and the checkpoint made in a process of its own: torch does not stay in this one."""
    for name in dict.fromkeys(one.environment for one in chosen):
        if environments.install(name, place.cache):
            print(f"{name}: installed", flush=True)
    if any(one.needs_checkpoint for one in chosen):
        command = [
            sys.executable,
            "-m",
            "load_tests.compare.checkpoint",
            str(place.version),
            str(place.checkpoint),
        ]
        made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise ServerError(
                f"the checkpoint cannot be made (it needs the extra `train`): {made.stderr[-1500:]}"
            )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="load_tests.compare", description="Compares Valence with other servers."
    )
    parser.add_argument("--only", default="", help="names with commas between; the rest is left out")
    parser.add_argument("--skip", default="", help="names to leave out")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--connections", type=_numbers, default=[1, 16, 64], help="default 1,16,64")
    parser.add_argument("--model-version", type=Path, help="its folder; the one that is served")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the environments")
    parser.add_argument(
        "--out", type=Path, default=CACHE / "result", help="folder for result.json and result.md"
    )
    parser.add_argument("--lock", type=Path, help="a file that is locked (flock) during each turn")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.seconds < 1:
        parser.error("at least one round of one second")
    return options


def _source() -> str:
    return "SST-2 dev" if os.environ.get("VALENCE_DATA") else texts.source()


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def _end_children() -> None:
    """What a signal caught between its start and the moment that we knew of it."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=END_S)


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    """SIGTERM ends the servers, too: on the way out each `with` ends its own."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
