"""What became of a text, as the wire has it: plain dictionaries, written by one serialisation.

Knows nothing of routes: the command line prints the same.
"""

from collections.abc import Sequence

from service.core import Prediction, Timings
from service.errors import ServiceError
from service.schemas import PredictRequest

DIGITS = 6
"""Scores are rounded to so many digits after the point; float32 has hardly more to say of a probability."""


def outcome_entry(
    labels: Sequence[str], outcome: Prediction | ServiceError, asked: PredictRequest
) -> dict[str, object]:
    """One outcome as `Predicted` or `Failed`. Scores stand best first, equal ones in label order."""
    if isinstance(outcome, ServiceError):
        return {"error": {"code": outcome.code, "detail": outcome.detail}}
    values = outcome.logits if asked.raw_scores else outcome.scores
    # By logits: two probabilities may both be 1 where these differ.
    order = sorted(range(len(labels)), key=outcome.logits.__getitem__, reverse=True)
    best = order[0]
    return {
        "label": labels[best],
        "score": round(values[best], DIGITS),
        "scores": {labels[index]: round(values[index], DIGITS) for index in order[: asked.top_k]},
        "tokens": outcome.tokens,
        "truncated": outcome.truncated,
    }


def server_timing(timings: Timings) -> str:
    """The stages in milliseconds, as the header Server-Timing has them."""
    return (
        f"tokenize;dur={timings.tokenize_s * 1000:.3f}, "
        f"queue;dur={timings.queue_s * 1000:.3f}, "
        f"infer;dur={timings.infer_s * 1000:.3f}"
    )
