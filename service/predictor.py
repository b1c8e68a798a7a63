"""The one story: texts in, predictions out. Owns the tokenizer, the batcher and the engine, and their life.

Knows nothing of HTTP, JSON or processes.
"""

import asyncio
import enum
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeAlias

from service import engines
from service.batcher import Batcher, Limits
from service.cache import Cache, TextOutcome
from service.classifier import Classifier, Result, Traced
from service.core import Encoding, Prediction, Timings
from service.errors import EngineFailed, NotReady, ServiceError, StartupError, Stopping
from service.loading import LoadedModel, ModelDescription, OpenEngine, load_in_thread
from service.logs import log_event
from service.metrics import Metrics
from service.pulse import Pulse
from service.results import result_of, timings_of, traced_result_of
from service.settings import Settings
from service.tracing import Spans

__all__ = ["Answer", "ModelDescription", "Predictor"]

_Batcher: TypeAlias = Batcher[Encoding, Result | Traced]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """One outcome for each text, in order: a prediction, or the error that only this text met."""

    outcomes: list[TextOutcome]
    timings: Timings


class _State(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPING = "stopping"


class Predictor:
    """Predicts texts with one version.

    Args:
        open_engine: makes the engine of a version; a test may bring its own.
        traced: whether results know their batch, for the spans that `predict` is given.

    Attributes:
        description: what is served, or None until it is loaded and proven.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        *,
        open_engine: OpenEngine = engines.open_engine,
        traced: bool = False,
    ) -> None:
        self._settings = settings
        self._traced = traced
        self._result_of = traced_result_of if traced else result_of
        self._metrics = metrics
        self._open_engine = open_engine
        self._state = _State.STARTING
        self._failure = ""
        self._doing = _State.STARTING.value
        self._model: LoadedModel | None = None
        self._batcher: _Batcher | None = None
        self._cache: Cache | None = None
        self._pulse = Pulse(self._ask_engine)
        self.description: ModelDescription | None = None

    async def start(self) -> None:
        """Verify, load, warm up, and check the golden texts. What blocks runs in threads: the loop turns.

        Raises:
            StartupError: with the reason, for the operator. The predictor then stays unready.
        """
        try:
            model = await load_in_thread(
                self._settings,
                self._open_engine,
                go_on=lambda: self._state is _State.STARTING,
                tell=self._tell,
            )
            batcher = self._make_batcher(model)
            await batcher.start()
        except BaseException as error:
            self._failure = str(error) if isinstance(error, StartupError) else type(error).__name__
            if self._state is _State.STARTING:
                self._state = _State.FAILED
            raise
        self._model, self._batcher = model, batcher
        if self._settings.cache_items:
            self._cache = self._make_cache(model.description)
        self._announce(model.description)
        if self._state is _State.STARTING:
            self._state = _State.READY

    async def stop(self, timeout_s: float) -> None:
        """Take no more, answer what was accepted within `timeout_s`, free everything. Safe to call twice."""
        self._state = _State.STOPPING
        self._pulse.stop()
        if self._batcher is not None:
            await self._batcher.close(timeout_s)
        if self._model is not None:
            self._model.tokenizer.close()
            self._model.engine.close()

    def unready_reason(self) -> str | None:
        """Why no predictions should be sent here now, or None."""
        if self._state is _State.FAILED:
            return f"start failed: {self._failure}"
        if self._state is not _State.READY or self._batcher is None:
            return self._doing if self._state is _State.STARTING else str(self._state.value)
        now = self._batcher.load()
        if now.dead:
            return "the batcher is dead"
        if now.longest_run_s > self._settings.request_timeout_s:
            return f"a batch has been running for {now.longest_run_s:.0f} s"
        return "the engine fails" if self._pulse.failing else None

    async def predict(
        self,
        texts: Sequence[str],
        *,
        truncate: bool = True,
        timeout_s: float | None = None,
        spans: Spans | None = None,
    ) -> Answer:
        """Predict all texts, in their order. A text that cannot be predicted has its error in its place.

        Args:
            truncate: whether a long text is cut; else it is refused.
            timeout_s: after how many seconds nobody wants the answer; the setting when None.
            spans: gets the stages.

        Raises:
            NotReady, Stopping, QueueFull, EngineDead: the request is refused as a whole.
            DeadlineExceeded: the time was over; what had not started is not run.
        """
        model, batcher = self._ready()
        deadline = asyncio.get_running_loop().time()
        deadline += self._settings.request_timeout_s if timeout_s is None else timeout_s
        if self._cache is None:
            outcomes, timings = await self._run(
                model, batcher, texts, truncate=truncate, deadline=deadline, spans=spans
            )
        else:
            run = partial(self._run, model, batcher, truncate=truncate, deadline=deadline, spans=spans)
            outcomes, timings = await self._cache.answer(texts, run, truncate=truncate, deadline=deadline)
        self._count(model.manifest.labels, outcomes)
        return Answer(outcomes, timings)

    async def _run(
        self,
        model: LoadedModel,
        batcher: _Batcher,
        texts: Sequence[str],
        *,
        truncate: bool,
        deadline: float,
        spans: Spans | None,
    ) -> tuple[list[TextOutcome], Timings]:
        """Read all texts and run those that can be."""
        # Before the texts are read, which is most of what a refusal would cost. Each has at least one token.
        batcher.refuse_when_full(len(texts), len(texts), deadline)
        started_s = time.perf_counter()
        if spans is not None:
            spans.begin("tokenize", started_s)
        encodings = await model.tokenizer.encode_all(texts, truncate=truncate, deadline=deadline)
        tokenize_s = time.perf_counter() - started_s
        self._metrics.stage("tokenize", tokenize_s)

        good = [encoding for encoding in encodings if isinstance(encoding, Encoding)]
        if spans is not None:
            spans.end(started_s + tokenize_s, then="queue" if good else None)
        answers = await batcher.submit(good, [len(one) for one in good], deadline=deadline)
        if spans is not None and answers:
            spans.ran(answers, [one.value.batch for one in answers if isinstance(one.value, Traced)])
        for one in good:
            self._metrics.text_read(tokens=len(one), truncated=one.truncated, unknown=one.unknown)
        timings = timings_of(tokenize_s, answers)
        if answers:
            self._metrics.stage("queue", timings.queue_s)
            self._metrics.stage("infer", timings.infer_s)

        results = list(map(self._result_of, answers))
        self._pulse.heard(results)
        said = iter(results)
        return [next(said) if isinstance(one, Encoding) else one for one in encodings], timings

    async def _ask_engine(self) -> bool | None:
        """Whether the engine predicts a golden text, as it did at the start; None: nobody can tell."""
        try:
            model, batcher = self._ready()
            known = min(model.manifest.golden_texts, key=lambda golden: len(golden.text))
            one = model.tokenizer.encode(known.text)
            deadline = asyncio.get_running_loop().time() + self._settings.request_timeout_s
            [answer] = await batcher.submit([one], [len(one)], deadline=deadline)
        except ServiceError:
            return None
        return isinstance(self._result_of(answer), Prediction)

    def _tell(self, doing: str) -> None:
        """What a start is at; called by the thread that loads."""
        self._doing = doing

    def _ready(self) -> tuple[LoadedModel, _Batcher]:
        if self._state is _State.STOPPING:
            raise Stopping
        if self._model is None or self._batcher is None or self._state is not _State.READY:
            raise NotReady
        return self._model, self._batcher

    def _count(self, labels: Sequence[str], outcomes: Sequence[TextOutcome]) -> None:
        failed = []
        for outcome in outcomes:
            if isinstance(outcome, Prediction):
                best = outcome.logits.index(max(outcome.logits))
                self._metrics.predicted(labels[best], outcome.scores[best])
                continue
            self._metrics.text_failed(outcome.code)
            if isinstance(outcome, EngineFailed):
                failed.append(outcome)
        if failed:
            log_event(
                logger,
                logging.ERROR,
                "engine failed",
                texts=len(failed),
                reason=failed[0].detail,
                exc_info=failed[0].__cause__,
            )

    def _make_batcher(self, model: LoadedModel) -> _Batcher:
        manifest, settings = model.manifest, model.settings
        classify = Classifier(
            model.engine, self._metrics, activation=manifest.activation, temperature=manifest.temperature
        )
        limits = Limits(
            max_batch_items=settings.max_batch_items,
            max_batch_tokens=settings.max_batch_tokens,
            max_padding_tokens=settings.max_padding_tokens,
            max_queue_items=settings.max_queue_items,
            max_queue_tokens=settings.max_queue_tokens,
            linger_s=settings.batch_linger_s,
        )
        run = classify.traced if self._traced else classify
        batcher: _Batcher = Batcher(run, lanes=model.description.lanes, limits=limits)
        self._metrics.watch(
            batcher.load,
            max_queue_items=settings.max_queue_items,
            max_queue_tokens=settings.max_queue_tokens,
        )
        return batcher

    def _make_cache(self, model: ModelDescription) -> Cache:
        served = f"{model.name}/{model.version}/{model.engine}/{model.precision}/{model.device}"
        cache = Cache(
            self._settings.cache_items,
            self._metrics,
            model=served,
            secret=secrets.token_bytes(),
            max_followers=self._settings.max_queue_items,
        )
        self._metrics.watch_cache(cache.__len__)
        return cache

    def _announce(self, model: ModelDescription) -> None:
        """Say what is served: to the metrics, to the log and to callers."""
        self._metrics.describe(
            model=model.name,
            version=model.version,
            labels=model.labels,
            engine=model.engine,
            precision=model.precision,
            device=model.device,
        )
        self._metrics.size(
            lanes=model.lanes,
            threads_per_lane=model.threads_per_lane,
            cpu_quota_cores=model.cpu_quota_cores,
        )
        log_event(logger, logging.INFO, "ready", **asdict(model))
        self.description = model
