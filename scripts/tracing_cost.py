"""CPU time of a request with tracing off, at 1 % and at 100 %: `python scripts/tracing_cost.py`.

Calls the application itself, 16 requests at a time, with an engine that answers at once; a collector in
another process takes what is sent. The least of many rounds is shown: what others do on the machine only adds
to it; of the process, which sends some time later, the mean of the better half.
"""

import asyncio
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from service import engines, logs
from service.app import create_app, life_of
from service.core import FloatArray, TokenBatch
from service.engines import Engine, EngineOptions
from service.environment import keep_onnxruntime_silent
from service.settings import Settings
from service.store import Version

ROOT = Path(__file__).parent.parent
TURNS, ROUNDS, REQUESTS_AT_A_TIME, GROUPS = 3, 60, 16, 10
RATIOS = ("off", "0.01", "1")


class InstantEngine:
    """A real engine until it is told to answer at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name, self.precision, self.device = engine.name, engine.precision, engine.device
        self.labels, self.max_tokens = engine.labels, engine.max_tokens
        self.instant = False

    def run(self, batch: TokenBatch) -> FloatArray:
        if self.instant:
            return np.ones((len(batch), self.labels), np.float32)
        return self._engine.run(batch)

    def close(self) -> None:
        self._engine.close()


class Collector(BaseHTTPRequestHandler):
    """Takes everything and keeps nothing."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the library's
        pass


async def measure(settings: Settings) -> tuple[float, float]:
    """CPU microseconds a request: of the thread of the loop, and of the whole process."""
    opened: list[InstantEngine] = []

    def open_engine(version: Version, options: EngineOptions) -> InstantEngine:
        opened.append(InstantEngine(engines.open_engine(version, options)))
        return opened[0]

    app = create_app(settings, open_engine=open_engine)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start" and message["status"] != 200:
            raise SystemExit(f"answered {message['status']}")

    async def ask() -> None:
        body = [{"type": "http.request", "body": b'{"inputs": "a good film"}', "more_body": False}]

        async def receive() -> Any:
            return body.pop()

        headers = [(b"content-type", b"application/json"), (b"host", b"x")]
        scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers, "state": {}}
        await app(scope, receive, send)

    loop_s, process_s = [], []
    async with life_of(app).run():
        reason = await life_of(app).started
        if reason is not None:
            raise SystemExit(reason)
        opened[0].instant = True
        for _ in range(ROUNDS):
            begun = time.thread_time(), time.process_time()
            for _ in range(GROUPS):
                await asyncio.gather(*(ask() for _ in range(REQUESTS_AT_A_TIME)))
            loop_s.append(time.thread_time() - begun[0])
            process_s.append(time.process_time() - begun[1])
    requests = GROUPS * REQUESTS_AT_A_TIME
    # The first rounds warm up.
    rest = sorted(process_s[10:])[: ROUNDS // 2]
    return min(loop_s) / requests * 1e6, sum(rest) / len(rest) / requests * 1e6


def main() -> None:
    """Measure each ratio in a process of its own, in turns."""
    if len(sys.argv) == 3:
        ratio, url = sys.argv[1:]
        traced: dict[str, Any] = {} if ratio == "off" else {"otlp_endpoint": url, "trace_ratio": float(ratio)}
        keep_onnxruntime_silent()
        with Path(os.devnull).open("w") as nowhere:
            logs.configure("json", "info", stream=nowhere)
            settings = Settings(lanes=1, threads_per_lane=1, model_store=ROOT / "model_store", **traced)
            print(*asyncio.run(measure(settings)))
        return
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    best: dict[str, list[float]] = {}
    for ratio in RATIOS * TURNS:
        out = subprocess.check_output([sys.executable, __file__, ratio, url], cwd=ROOT, text=True)
        seen = [float(one) for one in out.split()]
        best[ratio] = [min(pair) for pair in zip(best.get(ratio, seen), seen, strict=True)]
    print("tracing      loop  process   CPU µs a request")
    for ratio, (loop_us, process_us) in best.items():
        print(f"{ratio:<12} {loop_us:4.0f}     {process_us:4.0f}")


if __name__ == "__main__":
    main()
