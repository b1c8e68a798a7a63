"""The life of one service: starting, serving, draining, stopped; what it owns, in one place.

Knows nothing of HTTP, sockets or signals: the server tells it when to drain and when to stop.
"""

import asyncio
import enum
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.errors import StartupError, Stopping
from service.listing import StoreList
from service.logs import log_event
from service.metrics import Metrics
from service.predictor import Predictor
from service.settings import Settings
from service.tracing import Tracer

LAG_PERIOD_S = 0.5
FLUSH_S = 5.0
"""How long the end waits for traces to be sent, where the stop timeout leaves that much."""

logger = logging.getLogger(__name__)


class Phase(enum.Enum):
    """Where in its life the service stands. `DRAINING` still predicts; `STOPPING` does not take more."""

    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"


class Life:
    """Owns the predictor and the metrics, and starts and stops what is to be started and stopped.

    Attributes:
        started: done when the predictor is warm (None) or cannot start (the reason). Made by `run`.
    """

    def __init__(
        self, settings: Settings, metrics: Metrics, predictor: Predictor, tracer: Tracer | None = None
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self.predictor = predictor
        self.tracer = tracer
        self.store_list = StoreList(settings.model_store, timeout_s=settings.request_timeout_s)
        self.phase = Phase.SERVING
        self._stop_by_s = 0.0
        self._end: asyncio.Task[None] | None = None
        self.started: asyncio.Future[str | None]
        metrics.watch_ready(lambda: self.unready_reason() is None)

    def unready_reason(self) -> str | None:
        """Why readiness is 503, or None."""
        if self.phase is not Phase.SERVING:
            return str(self.phase.value)
        return self.predictor.unready_reason()

    def refuse_when_stopping(self) -> None:
        """Raises `Stopping` once no more work is taken."""
        if self.phase is Phase.STOPPING:
            raise Stopping

    def is_draining(self) -> bool:
        """Whether clients should go elsewhere."""
        return self.phase is not Phase.SERVING

    def drain(self) -> None:
        """From now on unready; requests are still answered."""
        self.phase = Phase.DRAINING

    def stop_taking(self) -> None:
        """From now on new predictions are refused; accepted ones go on until the stop timeout."""
        if self.phase is not Phase.STOPPING:
            self.phase = Phase.STOPPING
            self._stop_by_s = time.monotonic() + self.settings.stop_timeout_s

    async def abandon(self) -> None:
        """Refuse what was accepted and has no answer yet; the end comes at once."""
        self._stop_by_s = 0.0
        await self.predictor.stop(0)
        if self._end is not None:
            self._end.cancel()  # it may wait for a call that does not come back

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Start in the background and go on at once; at the end stop, within the stop timeout."""
        self.started = asyncio.get_running_loop().create_future()
        if self.tracer is not None:
            self.tracer.start()
        start = asyncio.create_task(self._start())
        lag = _LagProbe(self.metrics)
        try:
            yield
        finally:
            self.stop_taking()
            lag.stop()
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
            self.store_list.close()
            left_s = max(0.0, self._stop_by_s - time.monotonic())
            self._end = asyncio.create_task(self.predictor.stop(left_s))
            await asyncio.wait([self._end])
            if not self._end.cancelled():
                self._end.result()
            if self.tracer is not None:
                left_s = max(0.0, self._stop_by_s - time.monotonic())
                await asyncio.to_thread(self.tracer.close, min(left_s, FLUSH_S))

    async def _start(self) -> None:
        try:
            await self.predictor.start()
            await self.store_list.start()
            await asyncio.to_thread(time.monotonic)  # the thread that makes `/docs`, for the same reason
        except StartupError as error:
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001 - a defect must end the process, not leave it half started
            log_event(logger, logging.ERROR, "defect", exc_info=error)
            self._fail(f"{type(error).__name__}, see the log")
        else:
            self.started.set_result(None)

    def _fail(self, reason: str) -> None:
        if self.phase is Phase.STOPPING:
            self.started.cancel()  # nobody waits for the model any more: that it is not there is no failure
            return
        log_event(logger, logging.ERROR, "start failed", reason=reason)
        self.started.set_result(reason)


class _LagProbe:
    """Measures how late a timer fires, twice a second."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._set()

    def _set(self) -> None:
        self._due = self._loop.time() + LAG_PERIOD_S
        self._timer = self._loop.call_at(self._due, self._fire)

    def _fire(self) -> None:
        self._metrics.loop_lag(max(0.0, self._loop.time() - self._due))
        self._set()

    def stop(self) -> None:
        self._timer.cancel()
