"""The generator of load against a stub: what it calls a latency, whom it counts where, how it ends."""

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from load_tests.http_client import Answer, Client, get_request, predict_request, scrape
from load_tests.open_loop import Run, Shot, arrivals, closed_loop, open_loop, percentile, shoot
from load_tests.overload import Overload
from load_tests.soak import robust_slope

Reply = Callable[[int], Awaitable[bytes]]


@dataclass
class Stub:
    """Where it is, and how many connections were made to it."""

    url: str = ""
    connections: int = 0


def answer(status: int = 200, *headers: str, body: str = "{}") -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers, "", body]
    return "\r\n".join(lines).encode()


@asynccontextmanager
async def stub(reply: Reply) -> AsyncIterator[Stub]:
    """A server that answers the n-th request with what `reply` gives for n; nothing: it hangs up."""
    numbers, seen = itertools.count(), Stub()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        this = asyncio.current_task()
        assert this is not None
        tasks.add(this)
        seen.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in head.split(b"\r\n") if line.startswith(b"content-length")]
                await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)
                made = await reply(next(numbers))
                if not made:
                    break
                writer.write(made)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    seen.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield seen
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_r68_latency_counts_from_the_intended_start_while_the_server_stands_still() -> None:
    gate, count = asyncio.Event(), 20
    asked = asyncio.Semaphore(0)

    async def reply(_: int) -> bytes:
        asked.release()
        await gate.wait()
        return answer()

    async with stub(reply) as server:
        client = Client(server.url)
        began_s = time.monotonic()
        due_s = [0.0] * count
        running = asyncio.create_task(open_loop(client, itertools.repeat(predict_request("x")), due_s))
        for _ in range(count):
            await asked.acquire()  # all are sent, though none is answered
        opened_s = time.monotonic()
        gate.set()
        run = await running
        client.close()
    assert run.statuses() == {"200": count}
    assert all(shot.ended_s >= opened_s and shot.intended_s <= opened_s for shot in run.shots)
    assert min(run.latencies_ms(200)) >= (opened_s - max(shot.intended_s for shot in run.shots)) * 1e3
    assert all(shot.intended_s >= began_s for shot in run.shots)


async def test_r68_refusals_and_lost_ones_are_kept_apart_from_answers() -> None:
    replies = [answer(), answer(503, "Retry-After: 7"), b"", answer(500)]

    async def reply(number: int) -> bytes:
        return replies[number]

    async with stub(reply) as server:
        client = Client(server.url)
        shots = [await shoot(client, predict_request("x")) for _ in replies]
        client.close()
    run = Run(0.0, shots=shots)
    assert run.statuses() == {"200": 1, "503": 1, "ConnectionResetError": 1, "500": 1}
    assert [len(run.latencies_ms(status)) for status in (200, 503, 500)] == [1, 1, 1]
    assert [shot.retry_after_s for shot in shots] == [0, 7, 0, 0]


async def test_a_connection_is_used_again_unless_it_ends() -> None:
    async def reply(number: int) -> bytes:
        return answer(200, "Connection: close") if number == 1 else answer()

    async with stub(reply) as server:
        for keep, connections in ((True, 2), (False, 4)):
            before = server.connections
            client = Client(server.url, keep=keep)
            for _ in range(4):
                assert (await client.ask(get_request("/"))).status == 200
            client.close()
            assert server.connections - before == connections


async def test_who_is_not_answered_in_time_has_no_answer() -> None:
    async def reply(_: int) -> bytes:
        await asyncio.Event().wait()
        return b""

    async with stub(reply) as server:
        shot = await shoot(Client(server.url, timeout_s=0.05), get_request("/"))
    assert (shot.status, shot.problem) == (0, "TimeoutError")


async def test_who_cannot_connect_has_no_answer() -> None:
    async with stub(lambda _: asyncio.sleep(0, b"")) as server:
        pass
    shot = await shoot(Client(server.url), get_request("/"))
    assert (shot.status, shot.problem) == (0, "ConnectionRefusedError")


async def test_a_closed_loop_asks_as_often_as_it_is_told() -> None:
    async with stub(lambda _: asyncio.sleep(0, answer())) as server:
        client, left = Client(server.url), itertools.count(1)
        run = await closed_loop(
            client, itertools.repeat(get_request("/")), callers=3, go_on=lambda: next(left) <= 30
        )
        client.close()
    assert run.statuses() == {"200": 30}
    assert run.good_per_s() > 0


async def test_metrics_are_read_by_name_and_labels() -> None:
    page = '# HELP a b\na 1.0\nb{route="/x y"} 2.5\n'
    async with stub(lambda _: asyncio.sleep(0, answer(body=page))) as server:
        client = Client(server.url)
        assert await scrape(client) == {"a": 1.0, 'b{route="/x y"}': 2.5}
        client.close()


def test_arrivals_keep_their_rate() -> None:
    assert list(arrivals(4, 1)) == [0, 0.25, 0.5, 0.75]
    assert len(list(arrivals(100, 10))) == 1000
    poisson = list(arrivals(100, 50, random.Random(1)))
    assert poisson == sorted(poisson)
    assert 4500 < len(poisson) < 5500
    gaps = [b - a for a, b in itertools.pairwise(poisson)]
    assert sum(gap > 0.01 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03), "exponential: 1/e"


def test_percentiles_are_values_that_were_seen() -> None:
    assert percentile([1, 2, 3, 4], 0.5) == 2
    assert percentile([1, 2, 3, 4], 0.99) == 4
    assert percentile([5], 0.0) == 5


def answer_of(status: int) -> Answer:
    return Answer(status, {}, b"")


def test_goodput_counts_what_came_within_the_phase() -> None:
    good = answer_of(200)
    shots = [Shot(0, 0, ended_s, good) for ended_s in (0.5, 1.5, 1.9, 2.5)] + [
        Shot(0, 0, 1.7, answer_of(503))
    ]
    assert Run(1.0, 2.0, shots).good_per_s() == 2
    assert Run(0.0, 4.0, shots).good_per_s() == 1


def test_capacity_is_the_mean_of_before_and_after() -> None:
    def run(began_s: float, rate: int) -> Run:
        return Run(
            began_s, began_s + 4, [Shot(0, 0, began_s + i / rate, answer_of(200)) for i in range(4 * rate)]
        )

    seen = Overload(run(0, 10), run(10, 5), run(20, 20), [], [], [], [], 0.0)
    assert seen.recovered_per_s == 20
    assert seen.capacity_per_s == 15


def test_a_slope_is_found_among_outliers_and_has_an_error() -> None:
    dice = random.Random(1)
    x = [number / 10 for number in range(100)]
    flat = [200 + dice.gauss(0, 1) for _ in x]
    slope, error = robust_slope(x, flat)
    assert abs(slope) < 3 * error < 0.2
    rising = [y + 2 * at for at, y in zip(x, flat, strict=True)]
    rising[::10] = [500.0] * 10
    slope, error = robust_slope(x, rising)
    assert slope == pytest.approx(2, abs=0.15)
    assert slope > 3 * error
