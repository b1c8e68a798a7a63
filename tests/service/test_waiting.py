"""Which items make up a batch, and in what order groups have their turn."""

import random
from collections import Counter

import pytest

from service.settings import Settings
from service.waiting import Limits, WaitingRoom

Room = WaitingRoom[str, str]


def room_of(*lengths: int, limits: Limits | None = None) -> Room:
    """A group for each length, in this order; an item is named after its place and its length."""
    room: Room = WaitingRoom(limits or Limits())
    for place, length in enumerate(lengths):
        room.add(f"group {place}", [f"{place}:{length}"], [length])
    return room


def drain(room: Room, share: int = 1000) -> list[list[str]]:
    batches = []
    while room.items:
        batches.append(room.take(share))
    assert room.take(share) == []
    assert room.tokens == 0
    assert list(room.groups()) == []
    return batches


@pytest.mark.parametrize(
    "name", ["max_batch_items", "max_batch_tokens", "max_queue_items", "max_queue_tokens"]
)
def test_a_bound_that_is_not_given_is_that_of_a_service_without_settings(name: str) -> None:
    assert getattr(Limits(), name) == getattr(Settings.model_construct(), name)


def test_an_empty_room_has_no_batch() -> None:
    assert room_of().take(5) == []


def test_what_goes_before_a_new_group_counts_a_turn_of_each_group_for_each_of_its_items() -> None:
    assert room_of().tokens_before(5) == 0
    room = room_of(10, 10)
    room.add("of many", ["x"] * 98, [10] * 98)
    assert room.tokens == 1000
    assert room.tokens_before(1) == 30
    assert room.tokens_before(10) == 300
    assert room.tokens_before(100) == 1000


def test_nearest_in_length_on_both_sides() -> None:
    room = room_of(50, 10, 47, 99, 52, 51, limits=Limits(max_batch_items=4))
    assert drain(room) == [["0:50", "5:51", "4:52", "2:47"], ["1:10", "3:99"]]


def test_the_older_of_two_that_are_equally_near() -> None:
    assert room_of(50, 48, 52, 48, 52, limits=Limits(max_batch_items=4)).take(4) == [
        "0:50",
        "1:48",
        "2:52",
        "3:48",
    ]
    assert room_of(50, 52, 48, limits=Limits(max_batch_items=2)).take(2) == ["0:50", "1:52"]


def test_equal_lengths_go_in_order_of_arrival() -> None:
    assert drain(room_of(7, 7, 7, 7, limits=Limits(max_batch_items=3))) == [["0:7", "1:7", "2:7"], ["3:7"]]


def test_longer_ones_that_would_pass_the_tokens_are_left_out_for_shorter_ones() -> None:
    room = room_of(30, 35, 10, 11, limits=Limits(max_batch_tokens=100))
    assert drain(room) == [["0:30", "1:35"], ["2:10", "3:11"]]
    room = room_of(30, 60, 10, 9, 8, limits=Limits(max_batch_tokens=100))
    assert drain(room) == [["0:30", "2:10", "3:9"], ["1:60"], ["4:8"]]


def test_a_lone_item_over_the_tokens_still_goes() -> None:
    assert drain(room_of(500, 1, limits=Limits(max_batch_tokens=100))) == [["0:500"], ["1:1"]]


def test_padding_that_one_item_may_add_is_bounded_on_both_sides() -> None:
    limits = Limits(max_padding_tokens=4)
    assert room_of(50, 46, 45, limits=limits).take(9) == ["0:50", "1:46"]
    # A longer one pads all that are there: 52 costs 2 x 1 alone beside 50, and 2 x 3 beside three of them.
    assert room_of(50, 52, limits=limits).take(9) == ["0:50", "1:52"]
    assert room_of(50, 50, 50, 52, limits=limits).take(9) == ["0:50", "1:50", "2:50"]
    assert room_of(5, 500, limits=limits).take(9) == ["0:5"]


def test_a_share_bounds_the_batch() -> None:
    room = room_of(7, 7, 7, limits=Limits(max_batch_items=3))
    assert room.take(2) == ["0:7", "1:7"]


def test_each_cut_is_built_round_the_next_group() -> None:
    room: Room = WaitingRoom(Limits(max_batch_items=1))
    room.add("many", ["m0", "m1", "m2"], [5, 5, 5])
    room.add("few", ["f0", "f1"], [5, 5])
    room.add("one", ["o0"], [5])
    assert drain(room) == [["m0"], ["f0"], ["o0"], ["m1"], ["f1"], ["m2"]]


def test_what_goes_as_a_neighbour_does_not_lose_its_group_the_turn() -> None:
    room: Room = WaitingRoom(Limits(max_batch_items=2))
    room.add("a", ["a5", "a200"], [5, 200])
    room.add("b", ["b5", "b90"], [5, 90])
    assert drain(room) == [["a5", "b5"], ["b90", "a200"]]


def test_a_group_whose_items_have_all_gone_has_no_turn_any_more() -> None:
    room = room_of(5, 5, 80, limits=Limits(max_batch_items=2))
    room.take(2)
    assert list(room.groups()) == ["group 2"]


def test_removed_items_are_gone_at_once() -> None:
    room: Room = WaitingRoom(Limits())
    room.add("gone", ["g0", "g1"], [5, 6])
    room.add("stays", ["s0"], [5])
    room.remove("gone")
    room.remove("gone")
    room.remove("never was there")
    assert (room.items, room.tokens, list(room.groups())) == (1, 5, ["stays"])
    assert drain(room) == [["s0"]]


def test_what_must_go_alone_goes_first_and_can_be_removed() -> None:
    room = room_of(5, 5)
    room.add_alone("group 0", "again", 7)
    room.add_alone("new", "another", 8)
    room.add_alone("gone", "g", 9)
    assert (room.items, room.tokens) == (5, 34)
    room.remove("gone")
    assert drain(room) == [["again"], ["another"], ["0:5", "1:5"]]


@pytest.mark.parametrize(
    ("items", "tokens", "admitted"),
    [(1, 10, True), (2, 5, True), (3, 3, False), (1, 11, False), (0, 0, True)],
)
def test_bounds_of_the_queue(items: int, tokens: int, admitted: bool) -> None:
    room = room_of(40, 50, limits=Limits(max_queue_items=4, max_queue_tokens=100))
    assert room.admits(items, tokens) is admitted


def test_an_empty_room_admits_any_tokens() -> None:
    assert room_of(limits=Limits(max_queue_tokens=100)).admits(1, 101)


def test_any_order_of_events_keeps_count_and_limits() -> None:
    rng = random.Random(20240611)
    for _ in range(60):
        limits = Limits(
            max_batch_items=rng.randint(1, 9),
            max_batch_tokens=rng.randint(20, 200),
            max_padding_tokens=rng.choice([None, 0, 3, 30]),
        )
        room: WaitingRoom[int, tuple[int, int, int]] = WaitingRoom(limits)
        inside: dict[tuple[int, int, int], int] = {}
        taken: Counter[tuple[int, int, int]] = Counter()
        for step in range(200):
            event = rng.random()
            if event < 0.5:
                lengths = [rng.randint(1, 60) for _ in range(rng.randint(1, 12))]
                items = [(step, place, length) for place, length in enumerate(lengths)]
                room.add(step, items, lengths)
                inside |= dict(zip(items, lengths, strict=True))
            elif event < 0.6 and step:
                gone = rng.randrange(step)
                room.remove(gone)
                inside = {item: length for item, length in inside.items() if item[0] != gone}
            else:
                head = next(iter(room.groups()), None)
                batch = room.take(limits.max_batch_items)
                taken.update(batch)
                if head is not None:
                    oldest = min(item for item in inside if item[0] == head)
                    assert batch[0] == oldest, "built round the oldest item of the group whose turn it is"
                lengths = [inside.pop(item) for item in batch]
                assert len(batch) <= limits.max_batch_items
                assert len(batch) <= 1 or max(lengths) * len(batch) <= limits.max_batch_tokens
            assert (room.items, room.tokens) == (len(inside), sum(inside.values()))
            assert set(room.groups()) == {item[0] for item in inside}
        assert taken.total() == len(taken), "nothing goes twice"
