"""One request in a trace: what its caller says of the trace, what is kept of the request, and for whom.

`traceparent` is read as the W3C Recommendation "Trace Context" (2021) has it. Knows nothing of HTTP, of texts
or of how spans are sent: that is `otlp`, which is imported only where an endpoint is set.
"""

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import NamedTuple, Protocol

from service.errors import Crowded, ServiceError, StartupError, Unauthorized
from service.settings import Settings

TRACEPARENT = b"traceparent"

_TRACEPARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_FIRST_VERSION = b"00"  # nothing follows the flags; a later version may have more, which is left out
_SAMPLED = 1
_LOW_64_BITS = (1 << 64) - 1
_NOT_LET_IN = (Unauthorized.code, Crowded.code)


class TraceIds(NamedTuple):
    """Where a request stands in a trace, in lower-case hexadecimal digits.

    Attributes:
        trace_id: 32 digits.
        sampled: whether the trace is kept: the caller's decision, or ours where the trace begins here.
        parent_id: 16 digits, the caller's span; None when the trace begins here.
        span_id: 16 digits, our own; None when tracing is off.
    """

    trace_id: str
    sampled: bool
    parent_id: str | None = None
    span_id: str | None = None


def caller_of(values: Sequence[bytes]) -> TraceIds | None:
    """What the `traceparent` headers of a request say; None when they are malformed, or more than one."""
    found = _TRACEPARENT.fullmatch(values[0].strip(b" \t")) if len(values) == 1 else None
    if found is None or (found[1] == _FIRST_VERSION and found[5]):
        return None
    return TraceIds(found[2].decode(), bool(int(found[4], 16) & _SAMPLED), found[3].decode())


@dataclass(eq=False, slots=True)
class Batch:
    """A batch that a lane ran, by times on the clock of `time.perf_counter`.

    Attributes:
        texts, items: answered with it, and run in it: texts with the same tokens are run once.
        tokens, padded_tokens: of the items; longest × count of them.
        lane: the thread.
        span: trace id and span id, once a request has told of the batch.
    """

    started_s: float
    ended_s: float
    texts: int
    items: int
    tokens: int
    padded_tokens: int
    lane: str
    span: tuple[int, int] | None = None


class Run(Protocol):
    """How a text of a request was run: how long it waited, and took, and the error that it met if any."""

    @property
    def queue_s(self) -> float: ...
    @property
    def run_s(self) -> float: ...
    @property
    def error(self) -> ServiceError | None: ...


class Stage(NamedTuple):
    """A stage of a request; `error` when the request ended in it, `batches` that it was in."""

    name: str
    started_s: float
    ended_s: float
    error: str | None = None
    batches: Sequence[Batch] = ()


@dataclass(eq=False, slots=True)
class Spans:
    """What is kept of a request whose trace is kept. Times are those of `time.perf_counter`.

    Attributes:
        stages: those that are over.
        name, attributes: of the whole; set by `finish`.
        error: what kind of failure of ours it ended with, if any.
    """

    ids: TraceIds
    started_s: float
    stages: list[Stage] = field(default_factory=list)
    name: str = ""
    attributes: Mapping[str, str | int] = field(default_factory=dict)
    ended_s: float = 0.0
    error: str | None = None
    _under_way: tuple[str, float] | None = None

    def begin(self, stage: str, at_s: float) -> None:
        """A stage begins."""
        self._under_way = stage, at_s

    def end(
        self,
        at_s: float,
        *,
        then: str | None = None,
        error: str | None = None,
        batches: Sequence[Batch] = (),
    ) -> None:
        """The stage that was begun ends, and the next one begins, if one does."""
        if self._under_way is not None:
            self.stages.append(Stage(*self._under_way, at_s, error, batches))
        self._under_way = None if then is None else (then, at_s)

    def ran(self, runs: Sequence[Run], batches: Iterable[Batch]) -> None:
        """The stage that was begun, the queue, ended with the first of these runs; they are `infer`."""
        if self._under_way is None:
            return
        queued_s = self._under_way[1]
        seen = dict.fromkeys(batches)
        # A run that failed has no batch; one that did not holds all of its batch.
        first_s = min([*(queued_s + one.queue_s for one in runs), *(one.started_s for one in seen)])
        last_s = max([*(queued_s + one.queue_s + one.run_s for one in runs), *(one.ended_s for one in seen)])
        error = next((one.error.code for one in runs if one.error is not None), None)
        self.end(first_s, then="infer")
        self.end(last_s, error=error, batches=tuple(seen))

    def finish(
        self,
        at_s: float,
        *,
        name: str,
        attributes: Mapping[str, str | int],
        error: str | None,
        cut: str | None,
    ) -> None:
        """The request is over; `cut` says what ended the stage that is under way, if one is."""
        self.end(at_s, error=cut)
        self.name, self.attributes, self.ended_s, self.error = name, attributes, at_s, error


class Sender(Protocol):
    """Sends spans in the background."""

    def start(self) -> None:
        """From now on what is put is sent."""

    def put(self, spans: Spans) -> None:
        """Send these, some time. Never waits and never fails: what is too much is lost."""

    def close(self, timeout_s: float) -> None:
        """Send what was put, and wait for it so many seconds at most."""


class Tracer:
    """Decides which traces are kept, and hands on what is kept.

    Args:
        ratio: the share of the traces begun here that is kept, 0 to 1. It is decided by the trace id, as
            OpenTelemetry's TraceIdRatioBased does.
    """

    def __init__(self, sender: Sender, *, ratio: float) -> None:
        self.start = sender.start
        self.close = sender.close
        self._put = sender.put
        self._kept_below = round(ratio * (_LOW_64_BITS + 1))

    def begin(self, caller: TraceIds | None) -> TraceIds:
        """The ids of a request: in the trace of its caller, who has decided; else in one that begins here."""
        span_id = f"{random.getrandbits(64) or 1:016x}"
        if caller is not None:
            return caller._replace(span_id=span_id)
        trace = random.getrandbits(128) or 1  # 0 is no id
        return TraceIds(f"{trace:032x}", trace & _LOW_64_BITS < self._kept_below, None, span_id)

    def put(self, spans: Spans) -> None:
        """Send these, unless it is a caller who was not let in that has decided."""
        if spans.ids.parent_id is None or spans.attributes.get("valence.code") not in _NOT_LET_IN:
            self._put(spans)


def open_tracer(settings: Settings, *, version: str) -> Tracer | None:
    """The tracer that the settings ask for, not yet started; None when they ask for none.

    Raises:
        StartupError: OpenTelemetry is not installed, or cannot use the endpoint or a variable of its own. Of
            these it quotes nothing, since they may hold a password.
    """
    if settings.otlp_endpoint is None:
        return None
    if "@" in settings.otlp_endpoint:
        raise StartupError(
            "VALENCE_OTLP_ENDPOINT must hold no user, no password and no @: "
            "what the collector asks for goes into OTEL_EXPORTER_OTLP_HEADERS"
        )
    try:
        sender: Sender = import_module("service.otlp").open_sender(settings.otlp_endpoint, version)
    except ModuleNotFoundError as error:
        raise StartupError(f"VALENCE_OTLP_ENDPOINT needs {error.name}: install the extra tracing") from error
    except Exception as error:  # noqa: BLE001 - the library's own, which may quote what it was given
        kind = type(error).__name__
        raise StartupError(
            f"traces cannot be sent ({kind}): look at VALENCE_OTLP_ENDPOINT and the variables OTEL_*"
        ) from None
    return Tracer(sender, ratio=settings.trace_ratio)
