"""The command `valence`: serve, predict, check, tune, models, settings. Settings come from the environment.

Knows nothing of routes or engines; answers go to standard output, logs and errors to standard error.
"""

import argparse
import asyncio
import logging
import math
import os
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from itertools import islice
from typing import Annotated

import orjson
from pydantic import TypeAdapter

from service.core import Prediction
from service.engines import open_engine
from service.environment import SettingsError, read_settings, unknown_variables
from service.errors import ServiceError, StartupError
from service.loading import ModelDescription, tune
from service.logs import configure, log_event
from service.manifest import form
from service.metrics import Metrics, service_version
from service.predictor import Predictor
from service.schemas import PredictRequest
from service.settings import Settings, env_example
from service.store import list_models
from service.tuning import table
from service.wire import outcome_entry

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

_BATCHES_AT_A_TIME = 4
_STANDARD_ERROR = 2

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 when all went well, 1 when something failed, 2 for a wrong command or setting.
    """
    _fill_standard_files()
    asked = parser().parse_args(arguments)
    if asked.command == "settings":
        print(env_example(), end="")
        return EXIT_OK
    try:
        settings = read_settings()
        configure(settings.log_format, settings.log_level if asked.command == "serve" else "warning")
        for line in unknown_variables():
            log_event(logger, logging.WARNING, line)
        return _run(asked, settings)
    except SettingsError as error:
        for problem in error.problems:
            print(f"valence: {problem}", file=sys.stderr)
        return EXIT_USAGE
    except (StartupError, ServiceError) as error:
        print(f"valence: {error}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        # Nobody reads on: nothing more is to be said, not even by Python when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _fill_standard_files() -> None:
    """Open what a daemon was started without: else a socket takes its number, and what is written to it."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        pass
    os.close(number)


def parser() -> argparse.ArgumentParser:
    """The commands and their help."""
    made = argparse.ArgumentParser(
        prog="valence",
        description="A sentiment classifier. Settings are environment variables: see `valence settings`.",
    )
    made.add_argument("--version", action="version", version=service_version())
    commands = made.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("serve", help="answer over HTTP until a signal ends it")
    predict = commands.add_parser(
        "predict",
        help="predict texts here, without HTTP",
        description="Writes one JSON object a text, in order. Exit code 1 when a text has no prediction.",
    )
    predict.add_argument(
        "texts", nargs="*", metavar="text", help="a text; without any, each line of standard input"
    )
    predict.add_argument("--raw-scores", action="store_true", help="logits instead of probabilities")
    predict.add_argument("--no-truncate", action="store_true", help="refuse a text that is too long")
    commands.add_parser("check", help="load, verify and warm the version, and predict its golden texts")
    tuning = commands.add_parser(
        "tune",
        help="measure what runs the version fastest here, and keep it for the next start",
        description="Compares engines, precisions, lanes × threads and batches on an otherwise idle machine. "
        "What a setting gives is not varied.",
    )
    tuning.add_argument(
        "--seconds", type=_seconds, metavar="N", help="about how long (default: VALENCE_TUNING_S)"
    )
    commands.add_parser("models", help="list the versions in the model store")
    commands.add_parser("settings", help="print every setting with its default, as a .env file")
    return made


def _run(asked: argparse.Namespace, settings: Settings) -> int:
    if asked.command == "serve":
        # Here, since the other commands need neither FastAPI nor uvicorn.
        from service.server import serve  # noqa: PLC0415

        return serve(settings)
    if asked.command == "predict":
        # What is not UTF-8 becomes lone surrogates, which are refused in their place.
        given = sys.stdin.buffer if sys.stdin is not None else ()  # none, where it is closed
        lines = (line.decode(errors="surrogateescape").rstrip("\r\n") for line in given)
        return asyncio.run(_predict(settings, asked.texts or lines, asked))
    if asked.command == "check":
        return asyncio.run(_check(settings))
    if asked.command == "tune":
        return _tune(settings if asked.seconds is None else settings.model_copy(update=asked.seconds))
    return _models(settings)


async def _predict(settings: Settings, texts: Iterable[str], asked: argparse.Namespace) -> int:
    request = PredictRequest(inputs=[""], raw_scores=asked.raw_scores, truncate=not asked.no_truncate)
    failed = False
    async with _started(settings) as (predictor, model):
        # A few batches at a time: the input may be longer than the memory, and the queue has an end.
        for chunk in _chunks(texts, min(settings.max_texts, settings.max_batch_items * _BATCHES_AT_A_TIME)):
            # Whoever gives a file waits for all of it, however long its texts are.
            answer = await predictor.predict(chunk, truncate=request.truncate, timeout_s=math.inf)
            for one in answer.outcomes:
                failed = failed or not isinstance(one, Prediction)
                print(orjson.dumps(outcome_entry(model.labels, one, request)).decode(), flush=True)
    return EXIT_FAILED if failed else EXIT_OK


async def _check(settings: Settings) -> int:
    async with _started(settings) as (_, model):
        print(orjson.dumps({"status": "ready", **asdict(model)}).decode())
    return EXIT_OK


def _tune(settings: Settings) -> int:
    record, path = tune(settings, open_engine)
    print(table(record))
    print("kept nowhere: VALENCE_TUNING is off" if path is None else f"kept in {path}")
    return EXIT_OK


def _seconds(text: str) -> dict[str, float]:
    """The setting that the option stands for, within its bounds. ValueError: it is outside of them."""
    # Of all settings this one alone: what is wrong with the others is told when they are read.
    bounded: TypeAdapter[float] = TypeAdapter(Annotated[float, Settings.model_fields["tuning_s"]])
    return {"tuning_s": bounded.validate_python(float(text))}


def _models(settings: Settings) -> int:
    listings = list_models(settings.model_store)
    for one in listings:
        if one.manifest is None:
            print(f"{one.name} {one.version}: {one.problem}")
        else:
            forms = ", ".join(form(model) for model in one.manifest.models)
            print(f"{one.name} {one.version}: {', '.join(one.manifest.labels)}; {forms}")
    if not listings:
        print(f"valence: no versions in {settings.model_store}", file=sys.stderr)
    return EXIT_OK if listings else EXIT_FAILED


@asynccontextmanager
async def _started(settings: Settings) -> AsyncIterator[tuple[Predictor, ModelDescription]]:
    predictor = Predictor(settings, Metrics(deadline_s=settings.request_timeout_s))
    try:
        await predictor.start()
        if predictor.description is None:
            raise StartupError("the version is not ready")
        yield predictor, predictor.description
    finally:
        await predictor.stop(settings.stop_timeout_s)


def _chunks(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    rest = iter(texts)
    while chunk := list(islice(rest, size)):
        yield chunk
