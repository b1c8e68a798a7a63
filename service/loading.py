"""Makes a model ready to serve: verifies, loads and proves the version that the settings name.

Blocks, so it runs in a thread. Knows nothing of requests, queues or HTTP.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from service import tuning
from service.calibration import OpenEngine, calibrate
from service.devices import settings_for
from service.engines import Engine, EngineOptions
from service.environment import keep_onnxruntime_silent, keep_tokenizers_single
from service.errors import StartupError
from service.logs import log_event
from service.machine import this_machine
from service.quota import LanePlan, cpu_quota, plan_lanes
from service.settings import Settings
from service.store import Manifest, Version, open_version
from service.tokenizer import Tokenizer
from service.tuning import Record
from service.warmup import check_golden_texts, shapes, warm_up

__all__ = ["LoadedModel", "ModelDescription", "OpenEngine", "load", "load_in_thread", "tune"]

Tell: TypeAlias = Callable[[str], None]

logger = logging.getLogger(__name__)

LOADING = "loading"
"""The name of the thread."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What is served, and with which means.

    Attributes:
        labels: in index order.
        tuned: the settings that a tuning decided.
    """

    name: str
    version: str
    labels: tuple[str, ...]
    engine: str
    precision: str
    device: str
    max_tokens: int
    lanes: int
    threads_per_lane: int
    cpu_quota_cores: float
    max_batch_tokens: int
    tuned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that has been proven, and what belongs to it. `settings`: with what a tuning decided."""

    settings: Settings
    manifest: Manifest
    tokenizer: Tokenizer
    engine: Engine
    description: ModelDescription


async def load_in_thread(
    settings: Settings, open_engine: OpenEngine, *, go_on: Callable[[], bool], tell: Tell
) -> LoadedModel:
    """`load` in a thread that no end of the process waits for: a model file may never come back."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[LoadedModel] = loop.create_future()

    def hand_over(model: LoadedModel | None, error: BaseException | None) -> None:
        if done.done():  # nobody waits any more
            if model is not None:
                model.engine.close()
        elif error is not None:
            done.set_exception(error)
        elif model is not None:
            done.set_result(model)

    def work() -> None:
        model, failed = None, None
        try:
            model = load(settings, open_engine, go_on=go_on, tell=tell)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the one who waits is told
            failed = _told(error)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(hand_over, model, failed)

    threading.Thread(target=work, name=LOADING, daemon=True).start()
    return await done


def _told(error: BaseException) -> Exception:
    """As it can be handed over. The panic of a library is no Exception: who waits would end by it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    reason = f"loading the version ended with {type(error).__name__}: {error}"
    return StartupError(reason).with_traceback(error.__traceback__)


def load(
    settings: Settings, open_engine: OpenEngine, *, go_on: Callable[[], bool], tell: Tell = lambda _: None
) -> LoadedModel:
    """Everything between the settings and a model that may serve.

    Args:
        go_on: asked in between; when it says no, nobody waits for the model, and the proof ends early.
        tell: called with a word for what is done, where that takes long.

    Raises:
        StartupError: with the reason, for the operator.
    """
    version, tokenizer = _open(settings)
    manifest = version.manifest
    cores = cpu_quota()
    record = tuning.find(settings, version, this_machine(cores))
    if record is None and settings.tune_at_start:
        tell("tuning")
        record = _tune_at_start(settings, version, tokenizer, open_engine=open_engine, go_on=go_on)
        tell("starting")
    settings, tuned = (settings, ()) if record is None else tuning.apply(settings, record.choice)
    engine, settings, plan = _open_proven(
        settings, version, tokenizer, device=settings.device, open_engine=open_engine, go_on=go_on
    )
    try:
        if not go_on():
            raise StartupError("stopped before the model was ready")  # noqa: TRY301 - the engine is closed below
        tokenizer.start()
    except BaseException:
        engine.close()
        raise
    description = ModelDescription(
        name=manifest.name,
        version=str(manifest.version),
        labels=tuple(manifest.labels),
        engine=engine.name,
        precision=engine.precision,
        device=engine.device,
        max_tokens=engine.max_tokens,
        lanes=plan.lanes,
        threads_per_lane=plan.threads_per_lane,
        cpu_quota_cores=cores,
        max_batch_tokens=settings.max_batch_tokens,
        tuned=tuned,
    )
    return LoadedModel(settings, manifest, tokenizer, engine, description)


def _open_proven(
    settings: Settings,
    version: Version,
    tokenizer: Tokenizer,
    *,
    device: str,
    open_engine: OpenEngine,
    go_on: Callable[[], bool],
) -> tuple[Engine, Settings, LanePlan]:
    """An engine that gave the known answers, with the settings and lanes that its device wants.

    With device "auto", one on CUDA that does not is left for the CPU.
    """
    cores = cpu_quota()
    plan = plan_lanes(cores, settings.lanes, settings.threads_per_lane)
    options = EngineOptions(
        engine=settings.engine,
        precision=settings.precision,
        device=device,
        lanes=plan.lanes,
        threads_per_lane=plan.threads_per_lane,
        lone_threads=min(settings.lone_threads, max(1, int(cores))),
    )
    engine = open_engine(version, options)
    try:
        chosen = settings_for(engine.device, settings)
        plan = plan_lanes(cores, chosen.lanes, chosen.threads_per_lane)
        _prove(engine, tokenizer, version.manifest, settings=chosen, lanes=plan.lanes, go_on=go_on)
    except StartupError as error:
        engine.close()
        if device != "auto" or engine.device != "cuda":
            raise
        log_event(logger, logging.WARNING, "cuda is not used", reason=str(error))
        return _open_proven(settings, version, tokenizer, device="cpu", open_engine=open_engine, go_on=go_on)
    except BaseException:
        engine.close()
        raise
    if plan.warning is not None:
        log_event(logger, logging.WARNING, "cpu quota", problem=plan.warning, cores=cores)
    return engine, chosen, plan


def tune(settings: Settings, open_engine: OpenEngine) -> tuple[Record, Path | None]:
    """Measure what is fastest here, and keep it where the next start finds it.

    Returns:
        The record, and its file: None when the settings say that there is none.

    Raises:
        StartupError: nothing could be measured, or the record cannot be kept; the latter is told first.
    """
    version, tokenizer = _open(settings)
    path = tuning.record_path(settings, version)
    if path is not None:
        tuning.check_writable(path)
    record = calibrate(
        version,
        tokenizer,
        settings,
        open_engine=open_engine,
        machine=this_machine(cpu_quota()),
        seconds=settings.tuning_s,
    )
    if path is not None:
        tuning.write(path, record)
    return record, path


def _tune_at_start(
    settings: Settings,
    version: Version,
    tokenizer: Tokenizer,
    *,
    open_engine: OpenEngine,
    go_on: Callable[[], bool],
) -> Record | None:
    """A new record, or None. Nothing that goes wrong with it keeps the version from being served."""
    machine = this_machine(cpu_quota())
    try:
        record = calibrate(
            version,
            tokenizer,
            settings,
            open_engine=open_engine,
            machine=machine,
            seconds=settings.tuning_s,
            go_on=go_on,
        )
    except StartupError as error:
        log_event(logger, logging.WARNING, "tuning failed", reason=str(error))
        return None
    log_event(logger, logging.INFO, "tuned", seconds=record.seconds, **asdict(record.choice))
    path = tuning.record_path(settings, version)
    try:
        if path is not None:
            tuning.write(path, record)
    except StartupError as error:
        log_event(logger, logging.WARNING, "tuning not kept", reason=str(error))
    return record


def _open(settings: Settings) -> tuple[Version, Tokenizer]:
    keep_tokenizers_single()
    keep_onnxruntime_silent()
    version = open_version(settings.model_store, settings.model, settings.version)
    tokenizer = Tokenizer.load(
        version.read(version.manifest.tokenizer),
        max_tokens=version.manifest.max_tokens,
        max_text_chars=settings.max_text_chars,
    )
    return version, tokenizer


def _prove(
    engine: Engine,
    tokenizer: Tokenizer,
    manifest: Manifest,
    *,
    settings: Settings,
    lanes: int,
    go_on: Callable[[], bool],
) -> None:
    started_s = time.perf_counter()
    check_golden_texts(engine, tokenizer, manifest, max_batch_tokens=settings.max_batch_tokens)
    golden_s = time.perf_counter() - started_s
    grid = shapes(
        max_tokens=engine.max_tokens,
        max_batch_items=settings.max_batch_items,
        max_batch_tokens=settings.max_batch_tokens,
    )
    sample = tokenizer.encode(manifest.golden_texts[0].text)
    warm_up(engine, grid, lanes=lanes, sample=sample, go_on=go_on)
    log_event(
        logger,
        logging.INFO,
        "warm",
        golden_texts=len(manifest.golden_texts),
        golden_s=round(golden_s, 3),
        shapes=len(grid),
        warm_up_s=round(time.perf_counter() - started_s - golden_s, 3),
    )
