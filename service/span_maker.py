"""Makes OpenTelemetry's spans of what was kept of a request. Knows nothing of how they are sent."""

import random
import time
from collections.abc import Iterator

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from service.tracing import Batch, Spans, Stage

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_OK = Status(StatusCode.UNSET)
_FAILED = Status(StatusCode.ERROR)
_NS = 1_000_000_000
_STEP_NS = 10_000_000  # somebody has set the clock; less is no reason to tear related spans apart


class SpanMaker:
    """Makes spans of what was kept. Belongs to one thread.

    A batch has requests of several traces: it is a trace of its own, which the `infer` span of each request
    links to. It is told once, by the first of them.
    """

    def __init__(self, resource: Resource, version: str) -> None:
        self._resource = resource
        self._scope = InstrumentationScope("valence", version)
        self._epoch_ns = _epoch_ns()

    def of(self, kept: Spans) -> Iterator[ReadableSpan]:
        """The spans of a request, and of the batches of which nothing was told yet."""
        if abs(_epoch_ns() - self._epoch_ns) > _STEP_NS:
            self._epoch_ns = _epoch_ns()
        ids = kept.ids
        trace = int(ids.trace_id, 16)
        own = SpanContext(trace, int(ids.span_id or "1", 16), is_remote=False, trace_flags=_SAMPLED)
        parent = None
        if ids.parent_id is not None:
            parent = SpanContext(trace, int(ids.parent_id, 16), is_remote=True, trace_flags=_SAMPLED)
        yield ReadableSpan(
            kept.name,
            own,
            parent,
            self._resource,
            kept.attributes,
            kind=SpanKind.SERVER,
            status=_OK if kept.error is None else _FAILED,
            start_time=self._ns(kept.started_s),
            end_time=self._ns(kept.ended_s),
            instrumentation_scope=self._scope,
        )
        for stage in kept.stages:
            for batch in stage.batches:
                if batch.span is None:
                    batch.span = _some_id(128), _some_id(64)
                    yield self._batch(batch, batch.span)
            yield self._stage(stage, own)

    def _ns(self, at_s: float) -> int:
        return self._epoch_ns + int(at_s * _NS)

    def _stage(self, stage: Stage, whole: SpanContext) -> ReadableSpan:
        links = [_context(*batch.span) for batch in stage.batches if batch.span is not None]
        return ReadableSpan(
            stage.name,
            _context(whole.trace_id, _some_id(64)),
            whole,
            self._resource,
            {} if stage.error is None else {"error.type": stage.error},
            links=[Link(one) for one in links],
            status=_OK if stage.error is None else _FAILED,
            start_time=self._ns(stage.started_s),
            end_time=self._ns(stage.ended_s),
            instrumentation_scope=self._scope,
        )

    def _batch(self, batch: Batch, span: tuple[int, int]) -> ReadableSpan:
        return ReadableSpan(
            "batch",
            _context(*span),
            None,
            self._resource,
            {
                "valence.batch.texts": batch.texts,
                "valence.batch.items": batch.items,
                "valence.batch.tokens": batch.tokens,
                "valence.batch.padded_tokens": batch.padded_tokens,
                "valence.batch.lane": batch.lane,
            },
            start_time=self._ns(batch.started_s),
            end_time=self._ns(batch.ended_s),
            instrumentation_scope=self._scope,
        )


def _epoch_ns() -> int:
    """What `time.perf_counter` lacks to the time since the epoch; a pause between both makes it less."""
    return max(time.time_ns() - time.perf_counter_ns() for _ in range(3))


def _context(trace: int, span: int) -> SpanContext:
    return SpanContext(trace, span, is_remote=False, trace_flags=_SAMPLED)


def _some_id(bits: int) -> int:
    return random.getrandbits(bits) or 1  # 0 is no id
