"""Makes a model ready to serve: verifies, loads and proves the version that the settings name.

Blocks, so it runs in a thread. Knows nothing of requests, queues or HTTP.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from service.engines import Engine, EngineOptions
from service.errors import StartupError
from service.logs import log_event
from service.quota import cpu_quota, plan_lanes
from service.settings import Settings, keep_onnxruntime_silent, keep_tokenizers_single
from service.store import Manifest, Version, open_version
from service.tokenizer import Tokenizer
from service.warmup import check_golden_texts, shapes, warm_up

OpenEngine: TypeAlias = Callable[[Version, EngineOptions], Engine]

logger = logging.getLogger(__name__)

LOADING = "loading"
"""The name of the thread."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What is served, and with which means. `labels` are in index order."""

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


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that has been proven, and what belongs to it."""

    manifest: Manifest
    tokenizer: Tokenizer
    engine: Engine
    description: ModelDescription


async def load_in_thread(
    settings: Settings, open_engine: OpenEngine, *, go_on: Callable[[], bool]
) -> LoadedModel:
    """`load` in a thread that no end of the process waits for: a model file may never come back."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[LoadedModel] = loop.create_future()

    def tell(model: LoadedModel | None, error: BaseException | None) -> None:
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
            model = load(settings, open_engine, go_on=go_on)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the one who waits is told
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, model, failed)

    threading.Thread(target=work, name=LOADING, daemon=True).start()
    return await done


def load(settings: Settings, open_engine: OpenEngine, *, go_on: Callable[[], bool]) -> LoadedModel:
    """Everything between the settings and a model that may serve.

    Args:
        go_on: asked in between; when it says no, nobody waits for the model, and the proof ends early.

    Raises:
        StartupError: with the reason, for the operator.
    """
    keep_tokenizers_single()
    keep_onnxruntime_silent()
    cores = cpu_quota()
    plan = plan_lanes(cores, settings.lanes, settings.threads_per_lane)
    if plan.warning is not None:
        log_event(logger, logging.WARNING, "cpu quota", problem=plan.warning, cores=cores)
    options = EngineOptions(
        engine=settings.engine,
        precision=settings.precision,
        device=settings.device,
        lanes=plan.lanes,
        threads_per_lane=plan.threads_per_lane,
    )
    version = open_version(settings.model_store, settings.model, settings.version)
    manifest = version.manifest
    tokenizer = Tokenizer.load(
        version.read(manifest.tokenizer),
        max_tokens=manifest.max_tokens,
        max_text_chars=settings.max_text_chars,
    )
    engine = open_engine(version, options)
    try:
        _prove(engine, tokenizer, manifest, settings=settings, lanes=plan.lanes, go_on=go_on)
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
    )
    return LoadedModel(manifest, tokenizer, engine, description)


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
