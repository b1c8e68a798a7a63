"""What `front_bench` drives: the service with an engine that answers at once, or the least that can answer.

    python -m load_tests.front_server valence|plain

Reads the settings of the service. Knows nothing of load or figures.
"""

import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import uvicorn

from service import engines, logs
from service.core import FloatArray, TokenBatch
from service.engines import Engine, EngineOptions
from service.environment import read_settings
from service.lanes import LANE
from service.server import serve
from service.settings import Settings
from service.store import Version

PLAIN_HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"2")]


class InstantEngine:
    """The real engine at the start; in a lane it answers at once: what is left is the way in and out."""

    def __init__(self, real: Engine) -> None:
        self._real = real
        self.name, self.precision, self.device = real.name, real.precision, real.device
        self.labels, self.max_tokens = real.labels, real.max_tokens

    def run(self, batch: TokenBatch) -> FloatArray:
        """The real logits at the start, zeros for each request."""
        if threading.current_thread().name.startswith(LANE):
            return np.zeros((len(batch), self.labels), dtype=np.float32)
        return self._real.run(batch)

    def close(self) -> None:
        """Free the real engine."""
        self._real.close()


def open_instant(version: Version, options: EngineOptions) -> Engine:
    """An instant engine in place of the real one."""
    return InstantEngine(engines.open_engine(version, options))


async def plain(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """Read the body, answer `{}`: the floor for whatever uvicorn serves."""
    if scope["type"] == "http":
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": PLAIN_HEADERS})
        await send({"type": "http.response.body", "body": b"{}"})


def serve_plain(settings: Settings) -> int:
    """The floor, on the same server, loop and parser as the service."""
    uvicorn.run(
        plain,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http="httptools",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
    )
    return 0


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal ends it."""
    settings = read_settings()
    if arguments == ["plain"]:
        return serve_plain(settings)
    logs.configure(settings.log_format, settings.log_level)
    return serve(settings, open_engine=open_instant)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
