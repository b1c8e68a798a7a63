"""Every setting of the service, each a variable of the environment (prefix `VALENCE_`).

`service.environment` reads them. Knows nothing of what the values are used for.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

TUNING_OFF = "off"


class Settings(BaseSettings):
    """Frozen settings; each field is the variable `VALENCE_<FIELD>`."""

    model_config = SettingsConfigDict(
        env_prefix="VALENCE_", frozen=True, extra="ignore", env_ignore_empty=True
    )

    host: str = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 in a container.")
    port: int = Field(
        default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one and logs it."
    )

    model_store: Path = Field(default=Path("model_store"), description="Folder that holds <name>/<version>/.")
    model: str = Field(default="sentiment", min_length=1, description="Name of the model in the store.")
    version: int | None = Field(
        default=None, ge=1, description="Version to serve; unset takes the highest number. Set it to go back."
    )
    engine: Literal["auto", "onnx", "torchscript", "openvino"] = Field(
        default="auto",
        description="Which engine runs the model; auto takes onnx when the version has a file for it. "
        "openvino reads the same file.",
    )
    precision: Literal["auto", "float32", "float16", "bfloat16", "int8"] = Field(
        default="auto",
        description="Which form of the version is served; auto takes int8 on a CPU and "
        "float16 on a GPU when the version has it. "
        "bfloat16 is made by openvino from float32.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the model runs. cuda refuses to start when there is none."
    )
    lanes: int | None = Field(
        default=None,
        ge=1,
        le=256,
        description="Batches that run at the same time; unset: one for each core of the CPU quota.",
    )
    threads_per_lane: int | None = Field(
        default=None,
        ge=1,
        le=256,
        description="Threads inside one batch; unset: the cores of the quota shared by the lanes.",
    )
    lone_threads: int = Field(
        default=1,
        ge=1,
        le=256,
        description="Threads, within the quota, for one text of 256 tokens or more that has the engine to "
        "itself. Above 1 onnx holds the model twice (60 MB in int8); other engines, and a GPU, ignore it.",
    )

    tuning: str | None = Field(
        default=None,
        description="File of what `valence tune` chose for ENGINE, PRECISION, LANES, THREADS_PER_LANE and "
        "MAX_BATCH_TOKENS, used where they are not set; unset: beside the version; off: none.",
    )
    tune_at_start: bool = Field(
        default=False,
        description="Whether a start without a tuning that fits makes one first; until then it is not ready.",
    )
    tuning_s: float = Field(
        default=30.0, gt=0, le=3600, description="About how long a tuning measures, in seconds."
    )

    api_keys: SecretStr | None = Field(
        default=None,
        description="Keys that open the service, separated by commas; unset, with no file: open to all.",
    )
    api_keys_file: Path | None = Field(
        default=None,
        description="File of further keys, one a line, # for comments; read again when it changes.",
    )
    open_metrics: bool = Field(
        default=True, description="Whether /metrics and /health need no key where other paths do."
    )

    request_timeout_s: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="Deadline of a request, and bound on its arrival and on a client that does not read, in "
        "seconds.",
    )
    max_body_bytes: int = Field(
        default=2_000_000, ge=1, description="Largest body; a larger one is refused with 413."
    )
    max_texts: int = Field(
        default=256, ge=1, description="Most texts in one request; more are refused with 413."
    )
    max_text_chars: int = Field(
        default=32_768, ge=1, description="A text is cut to this many characters before tokenising."
    )
    max_queue_items: int = Field(
        default=1024, ge=1, description="Most texts that wait; beyond it 503. At least MAX_TEXTS."
    )
    max_queue_tokens: int = Field(default=131_072, ge=1, description="Most tokens that wait; beyond it 503.")
    # What may be run is run at the start: bounds of bounds keep that within minutes.
    max_batch_items: int = Field(default=32, ge=1, le=4096, description="Most texts in one batch.")
    max_batch_tokens: int = Field(
        default=512, ge=1, le=262_144, description="Most tokens in one batch, padding included."
    )
    max_padding_tokens: int = Field(
        default=4,
        ge=0,
        description="Padding that one more text may add to a batch; a text that would add more waits.",
    )
    batch_linger_s: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="How long a free lane waits for company, from the oldest arrival, in seconds; at most "
        "half of the time that a request has.",
    )

    cache_items: int = Field(
        default=0,
        ge=0,
        le=10_000_000,
        description="Predictions that are remembered (about 0.5 kB each), so that no text is run again soon; "
        "0: none.",
    )

    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^/\s]",
        description="Where traces are sent over OTLP/HTTP, as http://collector:4318; unset: nowhere.",
    )
    trace_ratio: float = Field(
        default=1.0, ge=0, le=1, description="Share of traces kept, of those that no caller has begun."
    )
    log_format: Literal["auto", "console", "json"] = Field(
        default="auto", description="auto: console on a terminal, else one JSON object a line."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least level that is logged."
    )

    drain_delay_s: float = Field(
        default=5.0,
        ge=0,
        le=600,
        description="After SIGTERM, SIGINT or SIGHUP: readiness is 503 and requests are still served, in "
        "seconds. Behind a load balancer longer than it takes to see that; with 0, connections that were "
        "made and not yet taken are reset.",
    )
    stop_timeout_s: float = Field(
        default=20.0,
        gt=0,
        le=600,
        description="After the drain delay: bound on answering what was accepted, in seconds.",
    )
    keep_alive_s: int = Field(
        default=75, ge=1, le=3600, description="How long an idle connection is kept, in seconds."
    )
    max_connections: int = Field(
        default=2048,
        ge=1,
        description="Most open connections; beyond it only health and metrics are answered. Each may hold a "
        "body of MAX_BODY_BYTES while it arrives. Fewer where the limit on open files is too low for them.",
    )

    max_head_bytes: int = Field(
        default=65_536,
        ge=1024,
        le=1_048_576,
        description="Longest request line and headers together; longer ones are refused with 431.",
    )

    @model_validator(mode="after")
    def _limits_agree(self) -> Self:
        if self.max_queue_items < self.max_texts:
            raise ValueError(
                f"VALENCE_MAX_QUEUE_ITEMS ({self.max_queue_items}) must be at least "
                f"VALENCE_MAX_TEXTS ({self.max_texts})"
            )
        if self.tune_at_start and self.tuning == TUNING_OFF:
            raise ValueError("VALENCE_TUNE_AT_START is set, but VALENCE_TUNING is off")
        return self


PREFIX = "VALENCE_"


def describe_settings() -> Iterator[tuple[str, str, str]]:
    """Variable, default (empty when unset) and description of each setting, in their order."""
    for name, field in Settings.model_fields.items():
        default = "" if field.default is None else str(field.default)
        yield PREFIX + name.upper(), default, field.description or ""


def env_example() -> str:
    """The documented `.env.example`: each setting, commented out, with its default."""
    parts = [f"# {description}\n#{name}={default}\n" for name, default, description in describe_settings()]
    return "\n".join(parts)
