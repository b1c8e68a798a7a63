"""What the settings that nobody gave are on a GPU. Knows nothing of engines, models or measuring."""

from typing import Any

from service.settings import Settings

ON_CUDA: dict[str, Any] = {
    # One lane computes while the other pads and copies.
    "lanes": 2,
    "threads_per_lane": 1,
    # Small batches leave most of a GPU idle, and padding costs less there than another call.
    "max_batch_items": 256,
    "max_batch_tokens": 16_384,
    "max_padding_tokens": 64,
    "max_queue_items": 8_192,
    "max_queue_tokens": 1_048_576,
}
"""Guesses: no GPU was at hand (docs/gpu.md)."""


def settings_for(device: str, settings: Settings) -> Settings:
    """The settings for an engine on a device: with CUDA, what was not given is larger than on a CPU."""
    if device != "cuda":
        return settings
    unset = {name: value for name, value in ON_CUDA.items() if name not in settings.model_fields_set}
    return settings.model_copy(update=unset)
