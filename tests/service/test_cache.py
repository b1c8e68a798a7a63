"""The cache: a text is run once, and nobody is harmed by what becomes of the one who runs it.

Here the texts are run by hand; `test_predictor_cache.py` runs them by a real engine.
"""

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from service.cache import Cache, TextOutcome
from service.core import Prediction, Timings
from service.errors import (
    ClientGone,
    DeadlineExceeded,
    EngineDead,
    EngineFailed,
    QueueFull,
    ServiceError,
    Stopping,
    TextEmpty,
    TextTooLong,
)
from service.metrics import Metrics
from tests.service.by_hand import LOOPS, on_each_loop, run_on, turns

Answered = tuple[list[TextOutcome], Timings]
LATER_S = 60.0


def prediction(text: str) -> Prediction:
    """An answer that belongs to this text; one that begins with "long" was cut."""
    logit = float(int.from_bytes(text.encode(errors="surrogatepass")[-6:]))
    return Prediction((logit, -logit), (0.75, 0.25), len(text), text.startswith("long"))


class Runs:
    """The way to run texts, which the test lets come back.

    Attributes:
        calls: the texts of each call, in the order in which they began.
    """

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self._answers: list[asyncio.Future[Sequence[TextOutcome]]] = []

    async def __call__(self, texts: Sequence[str]) -> Answered:
        self.calls.append(list(texts))
        self._answers.append(asyncio.get_running_loop().create_future())
        return list(await self._answers[-1]), Timings(0.25, 0.5, 1.0)

    def come_back(self, number: int, outcomes: Sequence[TextOutcome] | None = None) -> None:
        """Call `number` gives these outcomes, or the right ones."""
        if outcomes is None:
            outcomes = [prediction(text) for text in self.calls[number]]
        self._answers[number].set_result(outcomes)

    def refuse(self, number: int, error: BaseException) -> None:
        """Call `number` raises."""
        self._answers[number].set_exception(error)

    def under_way(self) -> list[int]:
        """The calls that have not come back and were not abandoned."""
        return [number for number, answer in enumerate(self._answers) if not answer.done()]


class Desk:
    """A cache with the way to run texts and its metrics."""

    def __init__(self, items: int = 10) -> None:
        self.runs = Runs()
        self.metrics = Metrics()
        self.cache = Cache(items, self.metrics, model="sentiment/1", secret=b"secret")

    async def now(self, *texts: str, truncate: bool = True) -> list[TextOutcome]:
        """Ask, and let whatever runs for it come back at once."""
        asking = self.ask(*texts, truncate=truncate)
        await turns()
        for number in self.runs.under_way():
            self.runs.come_back(number)
        return (await asking)[0]

    def ask(self, *texts: str, truncate: bool = True, within_s: float = LATER_S) -> asyncio.Task[Answered]:
        """A request in a task of its own."""
        deadline = asyncio.get_running_loop().time() + within_s
        return asyncio.create_task(self.cache.answer(texts, self.runs, truncate=truncate, deadline=deadline))

    @property
    def counts(self) -> list[float | None]:
        """Hits, misses and shared."""
        names = ("hits", "misses", "shared")
        return [self.metrics.registry.get_sample_value(f"valence_cache_{name}_total") for name in names]


# What is remembered.


def test_a_key_is_of_the_whole_text_the_model_and_the_secret() -> None:
    def key(text: str, *, model: str = "sentiment/1", secret: bytes = b"secret") -> bytes:
        return Cache(1, Metrics(), model=model, secret=secret).key(text)

    smile_in_two_halves = "\ud83d\ude00"
    different = [
        key("good"),
        key("Good"),
        key("good "),
        key(""),
        key("\U0001f600"),
        key(smile_in_two_halves),
        key("\ud83d"),
        key("?"),
        key("??"),
        key("x" * 40_000),
        key("x" * 40_001),
        key("good", model="sentiment/2"),
        key("ood", model="sentiment/1g"),
        key("good", secret=b"another"),
    ]
    assert len(set(different)) == len(different)
    assert {len(one) for one in different} == {16}
    assert key("good") == key("good")


def test_a_cache_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="0 items"):
        Cache(0, Metrics(), model="m", secret=b"")


@on_each_loop
async def test_a_text_that_was_predicted_is_not_run_again() -> None:
    desk = Desk()
    assert await desk.now("good") == [prediction("good")]
    again, timings = await desk.ask("good")
    assert again == [prediction("good")]
    assert isinstance(again[0], Prediction)
    assert timings == Timings()
    assert desk.runs.calls == [["good"]]
    assert desk.counts == [1, 1, 0]


@on_each_loop
async def test_the_one_goes_that_was_asked_for_longest_ago() -> None:
    desk = Desk(items=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        assert await desk.now(text) == [prediction(text)]
        assert len(desk.cache) <= 2
    assert desk.runs.calls == [["a"], ["b"], ["c"], ["b"]]
    await desk.now("d", "e", "f")
    assert len(desk.cache) == 2
    await desk.now("e", "f")
    assert desk.runs.calls[4:] == [["d", "e", "f"]]


@on_each_loop
async def test_of_a_list_only_what_is_missing_is_run_and_each_text_once() -> None:
    desk = Desk()
    await desk.now("b", "d")
    asked = ["a", "b", "c", "a", "d", "b"]
    assert await desk.now(*asked) == [prediction(text) for text in asked]
    assert desk.runs.calls == [["b", "d"], ["a", "c"]]
    assert desk.counts == [2, 4, 2]
    assert not (await desk.ask())[0]


@on_each_loop
async def test_an_error_is_not_remembered_and_spoils_no_neighbour() -> None:
    desk = Desk()
    first = desk.ask("a", "b")
    await turns()
    failed = EngineFailed()
    desk.runs.come_back(0, [failed, prediction("b")])
    assert (await first)[0] == [failed, prediction("b")]
    assert await desk.now("a", "b") == [prediction("a"), prediction("b")]
    assert desk.runs.calls == [["a", "b"], ["a"]]


@on_each_loop
async def test_a_cut_text_is_refused_to_who_wants_it_whole() -> None:
    desk = Desk()
    await desk.now("long a", "b")
    refused = await desk.now("b", "long a", truncate=False)
    assert refused[0] == prediction("b")
    assert isinstance(refused[1], TextTooLong)
    assert await desk.now("long a") == [prediction("long a")]
    assert desk.runs.calls == [["long a", "b"]]


# One text in flight.


@on_each_loop
async def test_a_text_in_flight_is_waited_for() -> None:
    desk = Desk()
    first, second = desk.ask("a"), desk.ask("a")
    whole = desk.ask("a", truncate=False)
    await turns()
    assert desk.runs.calls == [["a"]]
    desk.runs.come_back(0)
    outcomes = [(await one)[0] for one in (first, second, whole)]
    assert outcomes == [[prediction("a")]] * 3
    assert (await first)[1] == Timings(0.25, 0.5, 1.0)
    waited = (await second)[1]
    assert (waited.tokenize_s, waited.infer_s) == (0, 0)
    assert waited.queue_s > 0
    assert desk.counts == [0, 1, 2]


@on_each_loop
async def test_who_waits_wants_it_whole_or_cut_by_his_own_choice() -> None:
    desk = Desk()
    first, whole = desk.ask("long a"), desk.ask("long a", truncate=False)
    await turns()
    desk.runs.come_back(0)
    assert (await first)[0] == [prediction("long a")]
    assert isinstance((await whole)[0][0], TextTooLong)

    whole, cut = desk.ask("long b", truncate=False), desk.ask("long b")
    await turns()
    desk.runs.come_back(1, [TextTooLong()])
    await turns()
    desk.runs.come_back(2)
    assert isinstance((await whole)[0][0], TextTooLong)
    assert (await cut)[0] == [prediction("long b")]


@on_each_loop
async def test_a_deadline_of_who_waits_is_his_alone() -> None:
    desk = Desk()
    leader, hasty, patient = desk.ask("a"), desk.ask("a", within_s=0), desk.ask("a")
    with pytest.raises(DeadlineExceeded):
        await hasty
    desk.runs.come_back(0)
    assert (await leader)[0] == (await patient)[0] == [prediction("a")]
    assert desk.runs.calls == [["a"]]


@on_each_loop
async def test_who_waits_and_goes_disturbs_nobody() -> None:
    desk = Desk()
    leader, gone, patient = desk.ask("a"), desk.ask("a"), desk.ask("a")
    await turns()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    desk.runs.come_back(0)
    assert (await leader)[0] == (await patient)[0] == [prediction("a")]


GIVEN_UP: list[ServiceError | None] = [
    None,
    QueueFull(retry_after_s=1),
    DeadlineExceeded(),
    ClientGone(),
    EngineDead(),
    Stopping(),
]


@pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("error", GIVEN_UP, ids=lambda error: error.code if error else "cancelled")
def test_a_leader_that_gives_up_fails_nobody(new_loop: type, error: ServiceError | None) -> None:
    async def test() -> None:
        desk = Desk()
        leader = desk.ask("a")
        waiting = [desk.ask("a") for _ in range(3)]
        await turns()
        if error is None:
            leader.cancel()
        else:
            desk.runs.refuse(0, error)
        with pytest.raises(type(error) if error else asyncio.CancelledError):
            await leader
        await turns()
        assert desk.runs.calls == [["a"], ["a"]]  # one of the three leads now
        desk.runs.come_back(1)
        assert [(await one)[0] for one in waiting] == [[prediction("a")]] * 3
        assert desk.counts == [0, 2, 2]

    run_on(new_loop, test)


@on_each_loop
async def test_a_leader_that_gives_up_with_nobody_waiting_leaves_nothing() -> None:
    desk = Desk()
    leader = desk.ask("a")
    await turns()
    leader.cancel()
    await turns()
    assert await desk.now("a") == [prediction("a")]


@on_each_loop
async def test_a_new_leader_keeps_his_own_deadline() -> None:
    """What refuses him is what he runs: here it does so at once."""
    desk = Desk()
    leader, waiting, last = desk.ask("a"), desk.ask("a"), desk.ask("a")
    await turns()
    leader.cancel()
    await turns()
    desk.runs.refuse(1, DeadlineExceeded())
    with pytest.raises(DeadlineExceeded):
        await waiting
    await turns()
    desk.runs.come_back(2)
    assert (await last)[0] == [prediction("a")]


@on_each_loop
async def test_an_error_of_the_leader_is_his_own_and_the_others_do_not_take_turns() -> None:
    desk = Desk()
    leader, *waiting = [desk.ask("a") for _ in range(4)]
    await turns()
    desk.runs.come_back(0, [EngineFailed()])
    await turns()
    assert desk.runs.calls == [["a"]] * 4
    late = desk.ask("a")
    await turns()
    assert desk.runs.calls == [["a"]] * 4  # who comes now waits for one of them
    failures: list[TextOutcome] = [EngineFailed(), EngineFailed()]
    desk.runs.come_back(1)
    desk.runs.come_back(2, failures[:1])
    desk.runs.come_back(3, failures[1:])
    assert isinstance((await leader)[0][0], EngineFailed)
    assert [(await one)[0][0] for one in waiting] == [prediction("a"), *failures]
    assert (await late)[0] == [prediction("a")]


@on_each_loop
async def test_an_empty_text_is_refused_to_each() -> None:
    desk = Desk()
    asking = [desk.ask("") for _ in range(3)]
    await turns()
    desk.runs.come_back(0, [TextEmpty()])
    await turns()
    for number in (1, 2):
        desk.runs.come_back(number, [TextEmpty()])
    outcomes = [(await one)[0][0] for one in asking]
    assert [type(one) for one in outcomes] == [TextEmpty] * 3
    assert len({id(one) for one in outcomes}) == 3
    assert len(desk.cache) == 0


@on_each_loop
async def test_a_leader_whose_run_is_defective_leaves_nobody_waiting() -> None:
    desk = Desk()
    leader, waiting = desk.ask("a", "b"), desk.ask("a", "b")
    await turns()
    desk.runs.come_back(0, [prediction("a")])
    with pytest.raises(ValueError, match="zip"):
        await leader
    await turns()
    desk.runs.come_back(1)
    assert (await waiting)[0] == [prediction("a"), prediction("b")]


# Lists in flight.


@on_each_loop
async def test_one_text_does_not_wait_for_a_list() -> None:
    desk = Desk()
    large = desk.ask("a", "b", "c")
    await turns()
    small = desk.ask("b")
    await turns()
    assert desk.runs.calls == [["a", "b", "c"], ["b"]]
    another = desk.ask("b")
    await turns()
    assert len(desk.runs.calls) == 2  # the one who has less to run is waited for
    desk.runs.come_back(1)
    assert (await small)[0] == (await another)[0] == [prediction("b")]
    assert not large.done()
    desk.runs.come_back(0)
    assert (await large)[0] == [prediction("a"), prediction("b"), prediction("c")]


@on_each_loop
async def test_a_list_that_comes_back_first_does_not_end_the_flight_of_another() -> None:
    desk = Desk()
    large, small = desk.ask("a", "b"), desk.ask("b")
    await turns()
    desk.runs.come_back(0, [prediction("a"), EngineFailed()])
    await large
    late = desk.ask("b")
    await turns()
    assert desk.runs.calls == [["a", "b"], ["b"]]
    desk.runs.come_back(1)
    assert (await small)[0] == (await late)[0] == [prediction("b")]


@on_each_loop
async def test_of_two_who_run_a_text_the_one_with_less_to_run_is_waited_for() -> None:
    desk = Desk()
    failing, going = desk.ask("x"), desk.ask("y")
    single, listed = desk.ask("x"), desk.ask("x", "y")
    await turns()
    desk.runs.come_back(0, [EngineFailed()])
    await turns()
    going.cancel()
    await turns()
    assert desk.runs.calls == [["x"], ["y"], ["x"], ["x", "y"]]
    late = desk.ask("x")
    await turns()
    desk.runs.come_back(2)
    assert (await single)[0] == (await late)[0] == [prediction("x")]
    assert len(desk.runs.calls) == 4
    desk.runs.come_back(3)
    assert (await listed)[0] == [prediction("x"), prediction("y")]
    await failing


@on_each_loop
async def test_lists_that_overlap_run_what_nobody_runs_and_end_in_any_order() -> None:
    for order in itertools.permutations(range(3)):
        desk = Desk()
        asked = [["x"], ["y", "x"], ["x", "y", "z"]]
        asking = [desk.ask(*texts) for texts in asked]
        await turns()
        assert desk.runs.calls == [["x"], ["y"], ["z"]]
        for number in order:
            desk.runs.come_back(number)
            await turns()
        for texts, one in zip(asked, asking, strict=True):
            assert (await one)[0] == [prediction(text) for text in texts]
        assert desk.counts == [0, 3, 3]


@on_each_loop
async def test_timings_add_up_over_what_was_run_and_waited_for() -> None:
    desk = Desk()
    single, listed = desk.ask("x"), desk.ask("y", "x")
    await turns()
    desk.runs.come_back(1)
    await turns()
    assert not listed.done()
    desk.runs.come_back(0)
    await single
    timings = (await listed)[1]
    assert (timings.tokenize_s, timings.infer_s) == (0.25, 1.0)
    assert timings.queue_s > 0.5


async def test_so_many_may_wait_for_others_and_no_more() -> None:
    desk = Desk()
    desk.cache = Cache(10, desk.metrics, model="m", secret=b"", max_followers=3)
    leader = desk.ask("a", "b")
    await turns()
    two = desk.ask("a", "b")
    await turns()
    assert desk.runs.under_way() == [0]  # two of three wait for the leader
    too_many = desk.ask("a", "b")
    await turns()
    assert desk.runs.under_way() == [0, 1]  # not waited for: the queue is asked
    desk.runs.refuse(1, QueueFull())
    with pytest.raises(QueueFull):
        await too_many
    desk.runs.come_back(0)
    assert await leader == await leader
    assert len((await two)[0]) == 2
    again = desk.ask("c", "d")
    await turns()
    follows = desk.ask("c", "d")
    await turns()
    assert desk.runs.under_way() == [2]  # those who waited make room
    desk.runs.come_back(2)
    assert len((await again)[0]) == len((await follows)[0]) == 2
