"""What the load scripts call met and missed: each goal of an overload is missed by what it is about."""

from collections.abc import Callable

import pytest

from load_tests.http_client import Answer
from load_tests.open_loop import Run, Shot
from load_tests.overload import Overload, judge
from load_tests.service_process import Footprint
from load_tests.verdict import EXIT_MET, EXIT_MISSED, Verdict


def shot(at_s: float, status: int = 200, *, latency_s: float = 0.01, told: bool = True) -> Shot:
    headers = {b"retry-after": b"2"} if told and status == 503 else {}
    return Shot(at_s, at_s, at_s + latency_s, Answer(status, headers, b"") if status else None, "lost")


def steady(began_s: float, seconds: int, per_s: int = 10) -> Run:
    shots = [shot(began_s + number / per_s) for number in range(seconds * per_s)]
    return Run(began_s, began_s + seconds, shots)


def footprint(rss_mb: float) -> Footprint:
    return Footprint(int(rss_mb * 1e6), files=10, threads=5, cpu_s=1.0, loop_cpu_s=0.5)


def healthy() -> Overload:
    """Ten good answers a second before, meanwhile and after, and twenty refusals a second."""
    load = steady(10, 10)
    load.shots += [shot(10 + number / 20, 503) for number in range(200)]
    return Overload(
        before=steady(0, 10),
        load=load,
        after=steady(20, 10),
        live=[shot(15)],
        obeyed_under_load=[shot(15, 503)],
        obeyed_after=[shot(22)],
        footprints=[footprint(200), footprint(210), footprint(211), footprint(211)],
        alone_cpu_s=1.0,
    )


def verdict_on(seen: Overload) -> Verdict:
    verdict = Verdict()
    judge(seen, verdict, goodput=0.9, deadline_s=10)
    return verdict


def lose_one(seen: Overload) -> None:
    seen.load.shots.append(shot(15, 0))


def fail_one(seen: Overload) -> None:
    seen.load.shots.append(shot(15, 500))


def tell_one_nothing(seen: Overload) -> None:
    seen.load.shots.append(shot(15, 503, told=False))


def collapse(seen: Overload) -> None:
    seen.load.shots = [one for one in seen.load.shots if one.status == 503 or one.intended_s < 15]


def refuse_late(seen: Overload) -> None:
    seen.load.shots += [shot(15, 503, latency_s=1) for _ in range(10)]


def answer_late(seen: Overload) -> None:
    seen.load.shots += [shot(10, latency_s=11) for _ in range(5)]


def lie_about_the_wait(seen: Overload) -> None:
    seen.obeyed_after.append(shot(22, 503))


def be_dead_once(seen: Overload) -> None:
    seen.live.append(shot(15, 0))


def grow(seen: Overload) -> None:
    seen.footprints[2] = footprint(300)


def stay_slow(seen: Overload) -> None:
    seen.after = steady(20, 10, per_s=5)


def test_a_healthy_service_meets_every_goal() -> None:
    verdict = verdict_on(healthy())
    assert verdict.missed() == []
    assert verdict.exit_code() == EXIT_MET


@pytest.mark.parametrize(
    ("harm", "goal"),
    [
        (lose_one, "every request has an answer"),
        (fail_one, "each is a 200 or a 503"),
        (tell_one_nothing, "each 503 has a Retry-After"),
        (collapse, "goodput"),
        (refuse_late, "p99 of refusals"),
        (answer_late, "p99 of the admitted"),
        (lie_about_the_wait, "who was refused last"),
        (be_dead_once, "liveness 200 throughout"),
        (grow, "memory flat"),
        (stay_slow, "from 2 s after it"),
    ],
)
def test_each_goal_is_missed_by_what_it_is_about(harm: Callable[[Overload], None], goal: str) -> None:
    seen = healthy()
    harm(seen)
    verdict = verdict_on(seen)
    assert any(name.startswith(goal) for name in verdict.missed()), verdict.goals
    assert verdict.exit_code() == EXIT_MISSED
