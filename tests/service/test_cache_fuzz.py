"""The cache in a storm: requests that come, go, are refused and fail by dice."""

import asyncio
import random
from collections.abc import Callable

import pytest

from service.errors import EngineFailed, QueueFull
from tests.service.by_hand import LOOPS, run_on, turns
from tests.service.test_cache import Answered, Desk, prediction

MOVES = 200
SEEDS = range(20)


class Storm:
    """One storm.

    Attributes:
        asked: the texts of each request.
        refused: how often something that ran was refused.
    """

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.desk = Desk(items=3)
        self.asked: dict[asyncio.Task[Answered], list[str]] = {}
        self.refused = 0

    def move(self) -> None:
        """Something happens."""
        moves: list[Callable[[], None]] = [self.come, self.go, self.refuse, self.come_back]
        self.dice.choices(moves, weights=[5, 1, 1, 3])[0]()

    def come(self) -> None:
        """A request comes."""
        texts = self.dice.choices("abcdefgh", k=self.dice.choice((1, 1, 1, 2, 5)))
        self.asked[self.desk.ask(*texts)] = texts

    def go(self) -> None:
        """A client goes, if his request has not ended."""
        if self.asked:
            self.dice.choice(list(self.asked)).cancel()

    def refuse(self) -> None:
        """What somebody runs is refused."""
        under_way = self.desk.runs.under_way()
        if under_way:
            self.desk.runs.refuse(self.dice.choice(under_way), QueueFull(retry_after_s=1))
            self.refused += 1

    def come_back(self) -> None:
        """What somebody runs comes back, now and then with an error."""
        under_way = self.desk.runs.under_way()
        if under_way:
            number = self.dice.choice(under_way)
            texts = self.desk.runs.calls[number]
            self.desk.runs.come_back(
                number, [EngineFailed() if self.dice.random() < 0.1 else prediction(text) for text in texts]
            )

    async def calm(self) -> None:
        """All that runs comes back, until every request has ended."""
        while not all(one.done() for one in self.asked):
            await turns()
            for number in self.desk.runs.under_way():
                self.desk.runs.come_back(number)


@pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("seed", SEEDS)
def test_each_gets_his_own_answer_and_nobody_waits_for_ever(new_loop: type, seed: int) -> None:
    async def test() -> None:
        storm = Storm(seed)
        for _ in range(MOVES):
            storm.move()
            await turns(storm.dice.randrange(3))
        await storm.calm()
        failed = 0
        for request, texts in storm.asked.items():
            if request.cancelled():
                continue
            if request.exception() is not None:
                assert isinstance(request.exception(), QueueFull)
                failed += 1
                continue
            outcomes = request.result()[0]
            assert len(outcomes) == len(texts)
            for text, outcome in zip(texts, outcomes, strict=True):
                assert isinstance(outcome, EngineFailed) or outcome == prediction(text)
        assert failed <= storm.refused, "somebody was refused for another"
        assert len(storm.desk.cache) <= 3

    run_on(new_loop, test)
