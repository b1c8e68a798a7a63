"""The open-loop user of locust: it asks by the clock, and counts from the moment it meant to ask.

One user is one request a second, at random moments (Poisson), so N users are N requests a second, whatever
the server does: each request goes off by itself, however many wait. locust's own users ask again when they
have their answer; while a server stands still they ask it nothing, and so hardly see that it did.
Knows nothing of what is asked or of what a good figure is.
"""

import random
import time
from collections.abc import Iterator

import gevent  # type: ignore[import-untyped]
from gevent.pool import Group  # type: ignore[import-untyped]
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPParseError
from locust import User, task
from locust.env import Environment

from load_tests.locust_mix import Outcome, Prepared
from load_tests.locust_results import Results
from load_tests.shapes import Phase

RATE_A_USER_PER_S = 1.0
# As many connections as there are requests under way: one that waited for a connection would not be sent.
CONNECTIONS = 20_000
TIMEOUT_S = 60.0


class WrongAnswer(Exception):
    """An answer that is not as documented, or none."""


class Sender:
    """Sends requests, each by itself, and tells locust and the results what became of it.

    Args:
        host: address of the server, `http://127.0.0.1:8000`.
        requests: what to send, without end.
    """

    def __init__(
        self,
        environment: Environment,
        results: Results,
        *,
        host: str,
        requests: Iterator[Prepared],
        api_key: str = "",
    ) -> None:
        self._events = environment.events
        self._results = results
        self._requests = requests
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = HTTPClient.from_url(
            host, concurrency=CONNECTIONS, connection_timeout=TIMEOUT_S, network_timeout=TIMEOUT_S
        )
        self._under_way = Group()

    def send(self, intended_s: float) -> None:
        """Send the next request, which was meant for this moment of `time.perf_counter`. Does not wait."""
        self._under_way.spawn(self._shoot, next(self._requests), intended_s, self._results.phase)

    def finish(self) -> None:
        """Wait until every request has its outcome."""
        self._under_way.join()
        self._client.close()

    def _shoot(self, request: Prepared, intended_s: float, phase: Phase) -> None:
        began, sent_s = time.time(), time.perf_counter()
        self._results.sent(phase, late_ms=(sent_s - intended_s) * 1e3)
        outcome, problem, length = self._ask(request)
        latency_ms = (time.perf_counter() - intended_s) * 1e3
        self._results.ended(phase, outcome, latency_ms=latency_ms, wrong_request=request.refusal is not None)
        several = len(self._results.plan.phases) > 1
        kind = (
            request.kind
            if outcome in {Outcome.ANSWERED, Outcome.WRONG}
            else f"{outcome.value} by the service"
        )
        self._events.request.fire(  # type: ignore[no-untyped-call]
            request_type="POST",
            name=f"{kind}, {phase.name}" if several else kind,
            # What was not answered rightly has no latency: a quick failure would make the service look fast.
            response_time=None if outcome is Outcome.WRONG else latency_ms,
            response_length=length,
            exception=WrongAnswer(problem) if problem else None,
            context={},
            start_time=began,
        )

    def _ask(self, request: Prepared) -> tuple[Outcome, str, int]:
        """The outcome, the problem and the length of the body."""
        headers = {"content-type": request.content_type} | self._headers
        try:
            response = self._client.post("/predict", body=request.body, headers=headers)
            body = bytes(response.read())
        except (OSError, HTTPParseError) as error:
            return Outcome.WRONG, f"no answer: {type(error).__name__}", 0
        found = {str(name).lower(): str(value) for name, value in response.headers}
        outcome, problem = request.judge(response.status_code, found, body)
        return outcome, problem, len(body)


class OpenLoopUser(User):
    """One request a second, open loop. `sender` is set before the first user starts."""

    abstract = True
    sender: Sender

    @task
    def arrive(self) -> None:
        """Until locust ends this user."""
        dice = random.Random()  # noqa: S311 - moments of arrival
        due_s = time.perf_counter()
        while True:
            due_s += dice.expovariate(RATE_A_USER_PER_S)
            gevent.sleep(max(0.0, due_s - time.perf_counter()))
            self.sender.send(due_s)
