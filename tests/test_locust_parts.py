"""What the load test asks, how its rate goes, and how it judges: without locust and without a server."""

import itertools
import json
from collections import Counter
from typing import Any

import pytest

from load_tests.locust_mix import MARK, Deck, Outcome, Prepared, Refusal, wrong_requests
from load_tests.locust_results import Objectives, Results
from load_tests.shapes import SHAPES, Phase, plan
from load_tests.verdict import EXIT_CANNOT_RUN, EXIT_MET, EXIT_MISSED

JSON = {"content-type": "application/json"}
PROBLEM = {"content-type": "application/problem+json"}


def prediction(score: float = 0.9) -> dict[str, Any]:
    scores = {"positive": score, "negative": 1 - score}
    return {"label": "positive", "score": score, "scores": scores, "tokens": 5, "truncated": False}


def answer(*predictions: dict[str, Any], **other: Any) -> bytes:
    return json.dumps({"model": "m", "version": "1", "predictions": predictions} | other).encode()


def problem(status: int, code: str, **other: Any) -> bytes:
    words = {"type": "t", "title": "t", "detail": "d", "request_id": "r"}
    return json.dumps(words | {"status": status, "code": code} | other).encode()


EMPTY = {"error": {"code": "text_empty", "detail": "d"}}
SINGLE = Prepared("sentence", b"")
PAIR = Prepared("list", b"", texts=2, unreadable=frozenset({1}))
WRONG = Prepared("wrong", b"", refusal=Refusal(422, "text_empty"))


@pytest.mark.parametrize(
    ("request_", "status", "headers", "body", "outcome"),
    [
        (SINGLE, 200, JSON, answer(prediction()), Outcome.ANSWERED),
        (SINGLE, 200, JSON, answer(prediction(), prediction()), Outcome.WRONG),
        (SINGLE, 200, JSON, answer(prediction(0.1)), Outcome.WRONG),  # the best label is not first
        (SINGLE, 200, JSON, answer(prediction(1.5)), Outcome.WRONG),
        (SINGLE, 200, JSON, answer(prediction() | {"label": "negative"}), Outcome.WRONG),
        (SINGLE, 200, JSON, answer(prediction() | {"tokens": 0}), Outcome.WRONG),
        (SINGLE, 200, JSON, answer(EMPTY), Outcome.WRONG),
        (SINGLE, 200, JSON, answer(prediction(), version=""), Outcome.WRONG),
        (SINGLE, 200, JSON, b"[]", Outcome.WRONG),
        (SINGLE, 200, JSON, b"<html>", Outcome.WRONG),
        (SINGLE, 500, PROBLEM, problem(500, "engine_failed"), Outcome.WRONG),
        (SINGLE, 422, PROBLEM, problem(422, "text_empty"), Outcome.WRONG),
        (SINGLE, 503, PROBLEM | {"retry-after": "2"}, problem(503, "queue_full"), Outcome.REFUSED),
        (SINGLE, 503, PROBLEM, problem(503, "queue_full"), Outcome.WRONG),
        (SINGLE, 503, PROBLEM | {"retry-after": "0"}, problem(503, "queue_full"), Outcome.WRONG),
        (SINGLE, 503, JSON | {"retry-after": "2"}, problem(503, "queue_full"), Outcome.WRONG),
        (SINGLE, 504, PROBLEM, problem(504, "deadline_exceeded"), Outcome.LATE),
        (PAIR, 200, JSON, answer(prediction(), EMPTY), Outcome.ANSWERED),
        (PAIR, 200, JSON, answer(EMPTY, prediction()), Outcome.WRONG),
        (PAIR, 200, JSON, answer(prediction(), {"error": "empty"}), Outcome.WRONG),
        (WRONG, 422, PROBLEM, problem(422, "text_empty"), Outcome.ANSWERED),
        (WRONG, 422, PROBLEM, problem(422, "unprocessable"), Outcome.WRONG),
        (WRONG, 422, PROBLEM, problem(400, "text_empty"), Outcome.WRONG),
        (WRONG, 422, PROBLEM, problem(422, "text_empty", detail=f"not {MARK}"), Outcome.WRONG),
        (WRONG, 422, PROBLEM, problem(422, "text_empty", request_id=""), Outcome.WRONG),
        (WRONG, 200, JSON, answer(prediction()), Outcome.WRONG),
        (WRONG, 503, PROBLEM | {"retry-after": "2"}, problem(503, "queue_full"), Outcome.REFUSED),
    ],
)
def test_an_answer_is_read_and_not_only_its_status(
    request_: Prepared, status: int, headers: dict[str, str], body: bytes, outcome: Outcome
) -> None:
    found, why = request_.judge(status, headers, body)
    assert found is outcome
    assert bool(why) == (outcome is Outcome.WRONG)


def test_a_hundred_requests_hold_each_kind_in_proportion() -> None:
    kinds = [Counter(one.kind for one in itertools.islice(Deck("realistic"), 100 * n)) for n in (1, 2)]
    assert set(kinds[0]) == {"sentence", "review", "list", "list with an empty text"} | {
        one.kind for one in wrong_requests()
    }
    assert kinds[1] == Counter({kind: 2 * count for kind, count in kinds[0].items()})
    valid = list(itertools.islice(Deck("valid"), 100))
    assert all(one.refusal is None for one in valid)
    assert {one.kind for one in itertools.islice(Deck("sentences"), 100)} == {"sentence"}
    assert all(len(json.loads(one.body)["inputs"]) == one.texts for one in valid if "list" in one.kind)
    with pytest.raises(ValueError, match="realistic"):
        Deck("other")


def test_no_trace_shows_a_text() -> None:
    assert "secret" not in repr(Prepared("sentence", b'{"inputs": "secret"}'))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_plan_is_as_long_as_asked_and_is_judged_somewhere(shape: str) -> None:
    made = plan(shape, rate_per_s=100, seconds=60)
    assert made.seconds == pytest.approx(60)
    assert any(phase.judged for phase in made.phases)
    assert len({phase.name for phase in made.phases}) == len(made.phases)
    starts = itertools.accumulate((phase.seconds for phase in made.phases[:-1]), initial=0.0)
    assert [made.at(start + 0.01) for start in starts] == list(made.phases)
    assert made.at(60.01) is None


def test_the_knee_climbs_to_the_rate_and_a_spike_comes_back() -> None:
    rates = [phase.rate_per_s for phase in plan("knee", rate_per_s=400).phases]
    assert rates == sorted(set(rates))
    assert rates[-1] == 400
    before, spike, *_, after = plan("spike").phases
    assert before.rate_per_s == after.rate_per_s < spike.rate_per_s
    assert [before.judged, spike.judged, after.judged] == [True, False, True]


@pytest.mark.parametrize("wrong", [{"rate_per_s": 0}, {"seconds": -1}])
def test_a_plan_without_load_is_none(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        plan("smoke", **wrong)
    with pytest.raises(ValueError, match="smoke, knee"):
        plan("other")


def end(
    results: Results, phase: Phase, outcome: Outcome, *, ms: float = 1.0, wrong: bool = False, times: int = 1
) -> None:
    for _ in range(times):
        results.sent(phase, late_ms=0.0)
        results.ended(phase, outcome, latency_ms=ms, wrong_request=wrong)


def smoke(outcome: Outcome = Outcome.ANSWERED, *, ms: float = 1.0, wrong: bool = False) -> Results:
    """A smoke run of 999 quick answers and one of these."""
    results = Results(plan("smoke"))
    end(results, results.phase, Outcome.ANSWERED, times=999)
    end(results, results.phase, outcome, ms=ms, wrong=wrong)
    return results


def test_the_exit_code_is_the_verdict() -> None:
    bounds = Objectives(latency_ms=10, in_time=1.0, available=1.0)
    assert smoke().judge(bounds) == EXIT_MET
    assert smoke(ms=10.5).judge(bounds) == EXIT_MISSED
    assert smoke(Outcome.REFUSED).judge(bounds) == EXIT_MISSED
    assert smoke(Outcome.WRONG).judge(Objectives(available=0.5)) == EXIT_MISSED, "what is untrue is no rate"
    assert smoke(Outcome.LATE).judge(Objectives()) == EXIT_MET, "one in a thousand may fail"
    assert Results(plan("smoke")).judge(bounds) == EXIT_CANNOT_RUN


def test_wrong_requests_are_in_no_latency_and_must_be_refused() -> None:
    bounds = Objectives(latency_ms=10, in_time=1.0, available=1.0)
    assert smoke(ms=99, wrong=True).judge(bounds) == EXIT_MET
    assert smoke(Outcome.WRONG, wrong=True).judge(bounds) == EXIT_MISSED
    assert smoke(Outcome.REFUSED, wrong=True).judge(bounds) == EXIT_MET, "503 is no untruth"


def test_a_request_without_an_outcome_is_missed() -> None:
    results = smoke()
    results.sent(results.phase, late_ms=0.0)
    assert results.judge(Objectives()) == EXIT_MISSED


def test_in_a_spike_some_may_be_refused_but_not_before_or_after() -> None:
    for refused_in, code in (("spike", EXIT_MET), ("calm", EXIT_MET), ("after", EXIT_MISSED)):
        results = Results(plan("spike"))
        for phase in results.plan.phases:
            end(results, phase, Outcome.ANSWERED)
            if phase.name == refused_in:
                end(results, phase, Outcome.REFUSED)
        assert results.judge(Objectives()) == code


def test_the_knee_is_the_last_step_before_one_that_does_not_hold() -> None:
    results = Results(plan("knee", rate_per_s=500))
    for number, phase in enumerate(results.plan.phases):
        end(results, phase, Outcome.ANSWERED, ms=300 if number == 3 else 5)
    bounds = Objectives()
    figures = results.figures(bounds)
    assert figures["knee_per_s"] == 150
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert results.judge(bounds) == EXIT_MET, "the steps beyond are there to find out"
    lost = Results(plan("knee"))
    end(lost, lost.phase, Outcome.ANSWERED, ms=300)
    assert lost.figures(bounds)["knee_per_s"] is None
    assert lost.judge(bounds) == EXIT_MISSED
