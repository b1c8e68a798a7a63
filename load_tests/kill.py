"""`kill -9` at random moments, while it starts and under load: does the service come back as it was?

    .venv/bin/python -m load_tests.kill --rounds 20

Each round kills the service once while it starts and once under load, and starts it again on the same port,
over a copy of the version that is served. Exit code 1 when a goal is missed.
"""

import argparse
import asyncio
import datetime as dt
import hashlib
import itertools
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from load_tests import texts
from load_tests.chosen import chosen_version
from load_tests.http_client import Client, get_request, predict_request
from load_tests.open_loop import closed_loop, shoot
from load_tests.service_process import START_S, ServiceProcess
from load_tests.verdict import Verdict, machine, note
from service.store import open_version

CALLERS = 16
MODEL = "sentiment"


@dataclass(slots=True)
class Start:
    """What was seen from a start to the first good answer.

    Attributes:
        polls: readiness and then a prediction, again and again: both statuses.
        ready_s: from the start of the process to the first readiness of 200; None when it never came.
        ready_early_s: by how much readiness was 200 before the log says that the model is warm; else 0.
    """

    polls: list[tuple[int, int]] = field(default_factory=list)
    ready_s: float | None = None
    ready_early_s: float = 0.0

    @property
    def honest(self) -> bool:
        """Ready at the end, never before the model was warm, and what is ready predicts."""
        lied = any(ready == 200 and predicted != 200 for ready, predicted in self.polls)
        return self.ready_s is not None and not self.ready_early_s and not lied


@dataclass(slots=True)
class Kills:
    """What was seen in all rounds.

    Attributes:
        starts: each start that was let through.
        killed_after_s: when the process was killed, from its start; those under load from readiness.
        answered: statuses of the requests under load that were answered before the kill, by number.
        store_problems, left_behind: what was wrong with the store, and files that a killed process left.
    """

    starts: list[Start] = field(default_factory=list)
    killed_after_s: list[float] = field(default_factory=list)
    answered: dict[str, int] = field(default_factory=dict)
    store_problems: list[str] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)


def tree(folder: Path) -> dict[str, str]:
    """The hash of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


async def watch_start(server: ServiceProcess, body: bytes) -> Start:
    """Poll a server that has just been started until it is ready."""
    seen, began_s = Start(), time.monotonic()
    first_ready = 0.0
    client = Client(server.url, keep=False)
    while time.monotonic() - began_s < START_S and server.runs():
        ready = (await shoot(client, get_request("/health/ready"))).status
        if ready == 200 and seen.ready_s is None:
            seen.ready_s, first_ready = time.monotonic() - began_s, time.time()
        seen.polls.append((ready, (await shoot(client, body)).status))
        if seen.ready_s is not None and len(seen.polls) > 1:
            break
        await asyncio.sleep(0.02)
    warm = [line["ts"] for line in server.log() if line["event"] == "ready"]
    if seen.ready_s is not None:
        told = dt.datetime.fromisoformat(warm[0]).timestamp() if warm else float("inf")
        seen.ready_early_s = max(0.0, told - first_ready)
    return seen


async def _killed_under_load(
    server: ServiceProcess, bodies: Sequence[bytes], after_s: float
) -> dict[str, int]:
    alive = True
    client = Client(server.url)

    async def kill() -> None:
        nonlocal alive
        await asyncio.sleep(after_s)
        alive = False
        server.kill()

    _, run = await asyncio.gather(
        kill(),
        closed_loop(client, itertools.cycle(bodies), callers=CALLERS, go_on=lambda: alive),
    )
    client.close()
    return dict(run.statuses())


def measure(server: ServiceProcess, store: Path, *, rounds: int, seed: int = 5) -> Kills:
    """The rounds, over the store that the server serves. It is killed before and after."""
    seen, dice = Kills(), random.Random(seed)  # noqa: S311 - seeded dice
    bodies = [predict_request(text) for text in texts.sentences()[:200]]
    intact = tree(store)

    def after_the_kill() -> None:
        if tree(store) != intact:
            seen.store_problems.append("the files of the store are not what they were")
        try:
            open_version(store, MODEL)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            seen.store_problems.append(str(error))
        seen.left_behind += [str(path) for path in server.temporary.rglob("*")]

    server.kill()
    usual_s = 3.0
    for _ in range(rounds):
        after_s = dice.uniform(0.0, usual_s)
        server.start()
        time.sleep(after_s)
        server.kill()
        seen.killed_after_s.append(after_s)
        after_the_kill()
        server.start()
        start = uvloop.run(watch_start(server, bodies[0]))
        seen.starts.append(start)
        if start.ready_s is None:
            break
        usual_s = start.ready_s
        after_s = dice.uniform(0.0, 1.5)
        for status, count in uvloop.run(_killed_under_load(server, bodies, after_s)).items():
            seen.answered[status] = seen.answered.get(status, 0) + count
        seen.killed_after_s.append(after_s)
        after_the_kill()
    return seen


def judge(seen: Kills, verdict: Verdict, *, rounds: int) -> None:
    """Print the figures and the goals."""
    note(f"{len(seen.killed_after_s)} kills, under load: {seen.answered}")
    came = [start.ready_s for start in seen.starts if start.ready_s is not None]
    if came:
        note(f"ready again after {min(came):.1f} to {max(came):.1f} s")
    verdict.goal(
        f"it came back on its port: {len(came)} of {rounds} times, {len(seen.killed_after_s)} kills",
        met=len(came) == rounds and len(seen.killed_after_s) == 2 * rounds,
    )
    honest = sum(start.honest for start in seen.starts)
    verdict.goal(f"readiness was honest: {honest} of {rounds} times", met=honest == rounds)
    wrong = {status for status in seen.answered if status.isdigit()} - {"200"}
    verdict.goal(f"what was answered before a kill was 200: others {sorted(wrong)}", met=not wrong)
    verdict.goal(f"the store is intact: {seen.store_problems or 'always'}", met=not seen.store_problems)
    verdict.goal(f"nothing is left behind: {seen.left_behind or 'nothing'}", met=not seen.left_behind)


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20, help="of two kills each")
    parser.add_argument("--seed", type=int, default=5)
    chosen = parser.parse_args(arguments)
    print(machine())
    verdict = Verdict()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        served = chosen_version().path
        shutil.copytree(served, store / served.parent.name / served.name)
        with ServiceProcess(model_store=store) as server:
            judge(
                measure(server, store, rounds=chosen.rounds, seed=chosen.seed), verdict, rounds=chosen.rounds
            )
    return verdict.exit_code()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
