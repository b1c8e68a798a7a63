"""Two servers behind haproxy, one of which is told to stop: does any request fail?

    apt-get install haproxy
    VALENCE_DATA=<data sets> .venv/bin/python -m load_tests.drain

100 requests a second, each on a connection of its own; after three tenths of them one server gets SIGTERM.
haproxy polls /health/ready and neither retries nor sends elsewhere what has failed, so that only the service
itself can save a request. `--drain-delay 0` shows what that delay is for. Exit code 1 when a request failed,
2 when haproxy is missing. Knows nothing of how the service stops.
"""

import argparse
import asyncio
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from load_tests import texts
from load_tests.http_client import Client, get_request, predict_request
from load_tests.open_loop import Run, arrivals, percentile, send, shoot
from load_tests.service_process import START_S, ServiceProcess, free_port
from load_tests.verdict import EXIT_CANNOT_RUN, Verdict, machine, note

SERVED_BY = b"x-served-by"
CONFIG = """
global
    maxconn 4096
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    timeout check 5s
    retries 0
    no option redispatch
frontend front
    bind 127.0.0.1:{port}
    http-response set-header x-served-by %s
    default_backend service
backend service
    balance roundrobin
    option httpchk GET /health/ready
    http-check expect status 200
    default-server check inter 500ms fall 2 rise 1
    server one 127.0.0.1:{one}
    server two 127.0.0.1:{two}
"""


@dataclass(slots=True)
class Drain:
    """What was seen.

    Attributes:
        run: the requests.
        stopped_s, ended_s: when the one server was told to stop, and when it had ended.
        exit_code: with which it ended.
    """

    run: Run
    stopped_s: float
    ended_s: float
    exit_code: int

    def served(self, *, after_s: float = 0.0) -> Counter[str]:
        """Answers by server, to the requests that were sent after this moment."""
        answers = (shot.answer for shot in self.run.shots if shot.answer and shot.sent_s > after_s)
        return Counter(answer.headers.get(SERVED_BY, b"haproxy itself").decode() for answer in answers)


@contextmanager
def haproxy(one: int, two: int) -> Iterator[str]:
    """The URL of a haproxy before the servers on these ports; ended at the end."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder) / "haproxy.cfg", Path(folder) / "log"
        config.write_text(CONFIG.format(port=port, one=one, two=two), encoding="utf-8")
        program = shutil.which("haproxy") or "haproxy"
        with (
            log.open("wb") as said,
            subprocess.Popen([program, "-f", str(config), "-db"], stdout=said, stderr=said) as process,
        ):
            try:
                yield f"http://127.0.0.1:{port}"
            finally:
                process.terminate()
                process.wait(60)


async def _both_are_in(client: Client) -> None:
    """RuntimeError: haproxy does not lead to both servers."""
    seen: set[bytes] = set()
    give_up_s = time.monotonic() + START_S
    while len(seen) < 2:
        shot = await shoot(client, get_request("/health/ready"))
        if shot.answer is not None and shot.status == 200:
            seen.add(shot.answer.headers[SERVED_BY])
        if time.monotonic() > give_up_s:
            raise RuntimeError(f"haproxy leads to {seen} only")
        await asyncio.sleep(0.02)


async def measure(url: str, leaving: ServiceProcess, *, requests: int, rate_per_s: float) -> Drain:
    """The requests through the proxy at `url`, and SIGTERM to one server after three tenths of them."""
    client = Client(url, keep=False)
    await _both_are_in(client)
    bodies = itertools.cycle([predict_request(text) for text in texts.sentences()])
    sending = asyncio.create_task(send(client, bodies, arrivals(rate_per_s, requests / rate_per_s)))
    await asyncio.sleep(0.3 * requests / rate_per_s)
    stopped_s = time.monotonic()
    leaving.ask_to_stop()
    exit_code = await asyncio.to_thread(leaving.exit_code)
    ended_s = time.monotonic()
    run, under_way = await sending
    run.shots = list(await asyncio.gather(*under_way))
    return Drain(run, stopped_s, ended_s, exit_code)


def judge(seen: Drain, verdict: Verdict) -> None:
    """Print the figures and the goals."""
    run = seen.run
    good, lag = run.latencies_ms(200), run.lag_ms()
    note(f"{len(run.shots)} requests, served by {dict(seen.served())}")
    note(
        f"the one that was stopped ended {seen.ended_s - seen.stopped_s:.1f} s after SIGTERM; "
        f"sent later were served by {dict(seen.served(after_s=seen.stopped_s))}"
    )
    note(f"latency p50 {percentile(good, 0.5):.0f} ms, p99 {percentile(good, 0.99):.0f} ms")
    note(f"generator: {run.generator_cores:.2f} cores, sent late by p99 {percentile(lag, 0.99):.1f} ms")
    for shot in run.shots:
        if shot.status != 200:
            server = shot.answer.headers.get(SERVED_BY, b"-").decode() if shot.answer else "-"
            note(
                f"failed: sent {shot.sent_s - seen.stopped_s:+.2f} s from SIGTERM, status {shot.status} "
                f"{shot.problem} by {server}"
            )
    failed = sum(shot.status != 200 for shot in run.shots)
    verdict.goal(f"{failed} of {len(run.shots)} requests failed", met=failed == 0)
    verdict.goal(f"the one that was stopped ended with code {seen.exit_code}", met=seen.exit_code == 0)
    after = sum(shot.sent_s > seen.stopped_s for shot in run.shots)
    verdict.goal(f"{after} requests were sent after SIGTERM", met=after > 0)


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--drain-delay", type=float, default=4.0, help="VALENCE_DRAIN_DELAY_S")
    chosen = parser.parse_args(arguments)
    if shutil.which("haproxy") is None:
        print("haproxy is missing: apt-get install haproxy")
        return EXIT_CANNOT_RUN
    print(machine())
    verdict = Verdict()
    delay_s = chosen.drain_delay
    with ServiceProcess(drain_delay_s=delay_s) as leaving, ServiceProcess(drain_delay_s=delay_s) as staying:
        for server in (leaving, staying):
            server.wait_ready()
        with haproxy(leaving.port, staying.port) as url:
            seen = uvloop.run(measure(url, leaving, requests=chosen.requests, rate_per_s=chosen.rate))
        judge(seen, verdict)
    return verdict.exit_code()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
