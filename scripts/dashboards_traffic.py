"""What two instances live through while their dashboards are drawn: locust on one, trouble on the other.

The trouble comes in a fixed order, so that a picture tells a story: steady, a burst that fills the queue and
misses deadlines, a restart, and texts of one kind only. Knows nothing of Prometheus or Grafana.
"""

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import uvloop

from load_tests import texts
from load_tests.http_client import Client, predict_request
from load_tests.open_loop import arrivals, shoot
from load_tests.service_process import ROOT, ServiceProcess

STEADY_PER_S, BURST_PER_S, LOCUST_PER_S = 10.0, 25.0, 12.0
BURST, RESTART, ONE_KIND = (0.3, 0.4), 0.6, 0.75
"""When, as shares of the whole time."""

LONG_TOKENS = 600  # more than the model reads
LIST = 64  # the most texts that the troubled instance takes
LIKED = ("a wonderful film, warm and funny", "well made and quite moving", "the best evening of the year")


def even_instance() -> ServiceProcess:
    """The one that locust asks: one of the cores, and a queue that a spike fills."""
    return ServiceProcess(lanes=1, threads_per_lane=1, max_queue_items=256)


def troubled_instance() -> ServiceProcess:
    """The one with a short queue and a cache; it stops at once."""
    return ServiceProcess(
        lanes=1,
        threads_per_lane=1,
        max_texts=LIST,
        max_queue_items=2 * LIST,
        cache_items=200,
        drain_delay_s=0,
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """Both instances and for how long, in seconds. They must be ready."""

    even: ServiceProcess
    troubled: ServiceProcess
    seconds: float

    def drive(self) -> float:
        """Back when all of it is over: when it began, in Unix seconds. RuntimeError: locust could not ask."""
        sentences, long = texts.sentences(), texts.reviews(LONG_TOKENS)
        began_s = time.time()
        with ThreadPoolExecutor(1) as pool:
            locust = pool.submit(self._locust)
            uvloop.run(self._trouble(_Requests(sentences, long)))
            ran = locust.result()
        if ran.returncode not in {0, 1}:  # 1: an objective was missed, which is what the spike is for
            raise RuntimeError(f"locust ended with code {ran.returncode}: {ran.stderr[-500:]}")
        return began_s

    def _locust(self) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "locust", "-f", str(ROOT / "load_tests/locustfile.py"), "--headless"]
        command += ["--host", self.even.url, "--only-summary", "--loglevel", "ERROR", "--shape", "spike"]
        command += ["--rate", f"{LOCUST_PER_S}", "--seconds", f"{self.seconds}"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    async def _trouble(self, requests: "_Requests") -> None:
        began_s = asyncio.get_running_loop().time()
        client = Client(self.troubled.url)
        restart = asyncio.create_task(self._restart())
        dice = random.Random(5)  # noqa: S311 - seeded dice
        shots: list[asyncio.Task[object]] = []

        def later(request: bytes) -> None:
            shots.append(asyncio.create_task(shoot(client, request)))

        for due_s in arrivals(STEADY_PER_S, self.seconds, dice):
            await asyncio.sleep(max(0.0, began_s + due_s - asyncio.get_running_loop().time()))
            at = due_s / self.seconds
            later(requests.of_one_kind() if at > ONE_KIND else requests.steady())
            if BURST[0] < at < BURST[1]:
                for _ in range(round(BURST_PER_S / STEADY_PER_S)):
                    later(requests.many())
        await asyncio.gather(*shots)
        await restart
        client.close()

    async def _restart(self) -> None:
        await asyncio.sleep(RESTART * self.seconds)
        await asyncio.to_thread(self._start_again)

    def _start_again(self) -> None:
        self.troubled.ask_to_stop()
        self.troubled.exit_code()
        self.troubled.start()
        self.troubled.wait_ready()


@dataclass(frozen=True, slots=True)
class _Requests:
    """What the troubled instance is asked, each with a trace."""

    sentences: Sequence[str]
    long: Sequence[str]
    dice: random.Random = field(default_factory=lambda: random.Random(5))  # noqa: S311 - seeded dice

    def steady(self) -> bytes:
        """Sentences, liked ones more often, and now and then a list, a long text or one that is refused."""
        kinds: list[tuple[float, str | list[str]]] = [
            (0.52, self.dice.choice(self.sentences)),
            (0.16, self.dice.choice(LIKED)),
            (0.15, self.dice.choices(self.sentences, k=self.dice.randint(2, 12))),
            (0.09, self.dice.choice(self.long)),
            (0.03, ""),
            (0.03, "ᚠᚢᚦ ᚨᚱᚲ ᚷᚹᚺ: a film in runes"),
            (0.02, ["a film"] * (LIST + 1)),
        ]
        weights = [weight for weight, _ in kinds]
        [(_, some)] = self.dice.choices(kinds, weights)
        return self._traced(some)

    def many(self) -> bytes:
        """A list, each text new to the cache; half of the callers do not wait long."""
        patience = "x-request-timeout: 0.15\r\n" if self.dice.random() < 0.5 else ""
        chosen = self.dice.choices(self.sentences, k=LIST // 2)
        return self._traced([f"{text} {self.dice.randint(1, 9999)}" for text in chosen], patience)

    def of_one_kind(self) -> bytes:
        """A liked film."""
        return self._traced(f"{self.dice.choice(LIKED)}, number {self.dice.randint(1, 500)}")

    def _traced(self, inputs: str | list[str], headers: str = "") -> bytes:
        trace, span = self.dice.getrandbits(128) | 1, self.dice.getrandbits(64) | 1
        return predict_request(inputs, f"traceparent: 00-{trace:032x}-{span:016x}-01\r\n{headers}")
