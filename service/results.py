"""What the batcher gave for a text, as the predictor tells it. Knows nothing of how it came about."""

from collections.abc import Sequence
from typing import Any

from service.answers import Outcome
from service.classifier import Result, Traced
from service.core import Timings
from service.errors import EngineFailed


def result_of(outcome: Outcome[Any]) -> Result:
    """What the lane gave for a text, or the error of the batcher in its place."""
    if outcome.error is not None:
        return outcome.error
    value: Result | None = outcome.value
    return value if value is not None else EngineFailed()


def traced_result_of(outcome: Outcome[Any]) -> Result:
    """The same, of a lane that says which batch it was."""
    value: Traced | None = outcome.value
    return result_of(outcome) if value is None else value.result


def timings_of(tokenize_s: float, outcomes: Sequence[Outcome[Result | Traced]]) -> Timings:
    """The times of a request: those of its text that took longest, in seconds."""
    if not outcomes:
        return Timings(tokenize_s)
    last = max(outcomes, key=lambda outcome: outcome.queue_s + outcome.run_s)
    return Timings(tokenize_s, last.queue_s, last.run_s)
