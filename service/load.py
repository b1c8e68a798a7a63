"""What a look at the batcher shows: plain numbers, for metrics, readiness and tests."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """A look at the batcher.

    Attributes:
        queued_items, queued_tokens: what waits for a lane.
        oldest_age_s: how long the oldest of it has been waiting.
        busy_lanes, running_items: calls under way, and the items in them.
        longest_run_s: how long the call has been under way that was begun first.
        dead: whether a defect has ended the batcher; it then refuses everything.
    """

    queued_items: int
    queued_tokens: int
    oldest_age_s: float
    busy_lanes: int
    longest_run_s: float
    dead: bool
    running_items: int = 0
