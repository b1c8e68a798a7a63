"""The comparison: every server is started and checked once, then measured in turns, one running at a time.

Knows nothing of the command line, of installing and of tables.
"""

import contextlib
import fcntl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from load_tests.compare import wrk
from load_tests.compare.contestants import ROOT, Contestant, Place
from load_tests.compare.engine_alone import Bound, EngineAlone
from load_tests.compare.report import Turn
from load_tests.compare.servers import Server, ServerError
from load_tests.service_process import free_port

KNOWN = (
    ("A warm and funny evening; I would go again tomorrow.", "positive"),
    ("It broke on the second day and nobody answers my mails.", "negative"),
    ("not bad at all", "positive"),
    ("This is a waste of money and of two hours.", "negative"),
)
WARM_UP_CONNECTIONS = 16
WARM_UP_S = 2.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how often and with how many connections; `lock` is held during a turn when given."""

    seconds: float
    rounds: int
    connections: Sequence[int]
    lock: Path | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A contestant that runs, and its bodies."""

    contestant: Contestant
    server: Server
    bodies: Path

    def load(self, connections: int, seconds: float) -> wrk.Load:
        """Drive it."""
        return wrk.drive(self.server.url, self.bodies, connections=connections, seconds=seconds)


@contextlib.contextmanager
def running(one: Contestant, *, place: Place, work: Path, texts: Sequence[str]) -> Iterator[Entry]:
    """Started, checked, warm, and held until its turn. Raises ServerError with the end of its log."""
    port = free_port()
    folder = work / one.name
    (folder / "tmp").mkdir(parents=True)
    bodies = folder / "bodies"
    wrk.write_bodies(bodies, map(one.body, texts))
    server = Server(
        one.command(place, port),
        environment=one.surroundings(place, port, folder / "tmp"),
        url=f"http://127.0.0.1:{port}{one.path}",
        cwd=ROOT,
        log=folder / "log",
    )
    entry = Entry(one, server, bodies)
    with server:
        try:
            server.wait_ready(one.body(KNOWN[0][0]))
            _check(entry)
            entry.load(WARM_UP_CONNECTIONS, WARM_UP_S)
            server.settle()
        except (ServerError, wrk.WrkError) as error:
            raise ServerError(f"{one.name}: {error}") from error
        server.hold()
        yield entry


def play(entries: Sequence[Entry], engine: EngineAlone, plan: Plan) -> Iterator[Turn | Bound]:
    """All turns of all rounds as they end; each round starts with another server, and has the engine last."""
    for number in range(plan.rounds):
        first = number % len(entries)
        for entry in [*entries[first:], *entries[:first]]:
            with _locked(plan.lock):
                yield from _turns(entry, number, plan)
        with _locked(plan.lock):
            yield engine.measure(plan.seconds)


def _turns(entry: Entry, number: int, plan: Plan) -> list[Turn]:
    turns: list[Turn] = []
    entry.server.go_on()
    try:
        for connections in plan.connections:
            before_s = entry.server.cpu_s()
            load = entry.load(connections, plan.seconds)
            spent_s = entry.server.cpu_s() - before_s
            turns.append(Turn(number, entry.contestant.name, connections, load, spent_s))
            entry.server.settle()
    except wrk.WrkError as error:
        raise ServerError(f"{entry.contestant.name}: {error}\n{entry.server.last_lines()}") from error
    finally:
        entry.server.hold()
    return turns


def _check(entry: Entry) -> None:
    """Every server must know the sentences that anyone would know."""
    one = entry.contestant
    try:
        given = [one.label(entry.server.ask(one.body(text))).lower() for text, _ in KNOWN]
    except (OSError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerError(
            f"it answered a known sentence with {error!r}.\n{entry.server.last_lines()}"
        ) from error
    print(f"{one.name}: {', '.join(given)}", flush=True)
    if given != [label for _, label in KNOWN]:
        raise ServerError(f"it should have answered {', '.join(label for _, label in KNOWN)}")


@contextlib.contextmanager
def _locked(file: Path | None) -> Iterator[None]:
    if file is None:
        yield
        return
    with file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
