"""The line in which items wait for a batch: its bounds, its order, and the choice of the next batch.

Any thread may call it: each method is whole before the next one begins. Knows nothing of futures, deadlines
or what an item is.
"""

import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

G = TypeVar("G", bound=Hashable)
I = TypeVar("I")  # noqa: E741 - the item


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the queue and of one batch.

    Attributes:
        max_batch_items: items in one call of the function.
        max_batch_tokens: longest × count of one call; a lone larger item still goes.
        max_queue_items, max_queue_tokens: what may wait; beyond it a submission is refused at once. An empty
            queue admits any tokens, so that no submission of `max_queue_items` or less is refused for ever.
        linger_s: how long a free lane waits for company, counted from the oldest arrival.
        max_padding_tokens: padding that one more item may add to a batch; None for no bound. Where padding
            costs as much as tokens do, a good bound is a third of what a call costs beside its tokens.
    """

    max_batch_items: int = 32
    max_batch_tokens: int = 512
    max_queue_items: int = 1024
    max_queue_tokens: int = 131_072
    linger_s: float = 0.0
    max_padding_tokens: int | None = None


@dataclass(eq=False, slots=True)
class _Place(Generic[G, I]):
    """Where one item stands; `number` is the order of arrival over all groups."""

    item: I
    length: int
    number: int
    party: "_Party[G, I]"
    alone: bool = False
    waiting: bool = True


@dataclass(eq=False, slots=True)
class _Party(Generic[G, I]):
    """The places of one group in order of arrival; those before `first` wait no more."""

    group: G
    places: list[_Place[G, I]] = field(default_factory=list)
    first: int = 0
    waiting: int = 0

    def oldest(self) -> _Place[G, I]:
        while not self.places[self.first].waiting:
            self.first += 1
        return self.places[self.first]


class WaitingRoom(Generic[G, I]):
    """Items of several groups (one group is one request), kept so that a batch is picked quickly.

    Each length has a line of its own, in order of arrival, and the lengths are sorted: the neighbours of an
    item in length are found by walking outwards. A step costs the same however many items wait, and an item
    that leaves is really gone: nothing piles up while no batch is picked.

    Attributes:
        items, tokens: what waits.
    """

    def __init__(self, limits: Limits) -> None:
        self.items = 0
        self.tokens = 0
        self._limits = limits
        self._lock = threading.Lock()
        self._numbers = 0
        self._parties: OrderedDict[G, _Party[G, I]] = OrderedDict()  # the first one has the next turn
        self._lines: dict[int, OrderedDict[_Place[G, I], None]] = {}
        self._lengths: list[int] = []  # the keys of _lines, sorted
        self._alone: OrderedDict[_Place[G, I], None] = OrderedDict()

    def groups(self) -> list[G]:
        """The groups of which something waits, the next turn first."""
        with self._lock:
            return list(self._parties)

    def admits(self, items: int, tokens: int) -> bool:
        """Whether so much more may wait."""
        limits = self._limits
        with self._lock:
            return self.items == 0 or (
                self.items + items <= limits.max_queue_items
                and self.tokens + tokens <= limits.max_queue_tokens
            )

    def tokens_before(self, items: int) -> float:
        """About how many tokens are run before a new group of so many items has had its turns.

        Of each group that waits not more than `items` items have a turn before that, so that one group of
        hundreds does not count in full against a single item.
        """
        with self._lock:
            if not self.items:
                return 0.0
            return self.tokens * min(1.0, len(self._parties) * items / self.items)

    def fills_a_batch(self) -> bool:
        """Whether enough waits for a batch that nothing could be added to."""
        limits = self._limits
        with self._lock:
            full = self.items >= limits.max_batch_items or self.tokens >= limits.max_batch_tokens
            return full or bool(self._alone)

    def add(self, group: G, items: Sequence[I], lengths: Sequence[int]) -> None:
        """The items of a group join the line; a new group has its turn after those that wait."""
        with self._lock:
            for item, length in zip(items, lengths, strict=True):
                place = self._enter(group, item, length)
                line = self._lines.get(length)
                if line is None:
                    line = self._lines[length] = OrderedDict()
                    insort(self._lengths, length)
                line[place] = None

    def add_alone(self, group: G, item: I, length: int) -> None:
        """An item that goes before all others, in a batch of its own."""
        with self._lock:
            place = self._enter(group, item, length)
            place.alone = True
            self._alone[place] = None

    def remove(self, group: G) -> None:
        """Nothing of this group waits any longer; an unknown group is no error."""
        with self._lock:
            party = self._parties.get(group)
            if party is not None:
                for place in party.places[party.first :]:
                    if place.waiting:
                        self._leave(place)

    def take(self, share: int) -> list[I]:
        """The next batch, of at most `share` items; it leaves the line.

        It is built round the oldest item of the group whose turn it is, which goes whatever its length. The
        rest are the waiting items nearest to it in length (the older of two that are equally near), within
        the limits.
        """
        with self._lock:
            if self._alone:
                place = next(iter(self._alone))
                self._leave(place)
                return [place.item]
            if not self._parties:
                return []
            party = next(iter(self._parties.values()))
            anchor = party.oldest()
            self._leave(anchor)
            if party.waiting:
                self._parties.move_to_end(party.group)
            return [anchor.item, *self._neighbours(anchor.length, min(share, self._limits.max_batch_items))]

    def _neighbours(self, length: int, max_items: int) -> list[I]:
        taken: list[I] = []
        count, longest = 1, length
        above = bisect_left(self._lengths, length)
        below = above - 1
        look_up = look_down = True
        while count < max_items:
            look_up = look_up and above < len(self._lengths)
            look_down = look_down and below >= 0
            if not (look_up or look_down):
                break
            up = look_up and (not look_down or self._prefers(length, below, above))
            near = self._lengths[above if up else below]
            if not self._joins(near, count, longest):
                # Farther on this side is dearer still, and a fuller batch does not make it cheaper.
                look_up, look_down = look_up and not up, look_down and up
                continue
            place = next(iter(self._lines[near]))
            taken.append(place.item)
            count, longest = count + 1, max(longest, near)
            if self._leave(place) and not up:
                below, above = below - 1, above - 1
        return taken

    def _joins(self, length: int, count: int, longest: int) -> bool:
        """Whether an item of this length may join so many items of which the longest is so long."""
        padded = max(longest, length) * (count + 1)
        padding = padded - longest * count - length
        limits = self._limits
        return padded <= limits.max_batch_tokens and (
            limits.max_padding_tokens is None or padding <= limits.max_padding_tokens
        )

    def _prefers(self, length: int, below: int, above: int) -> bool:
        """Whether the line above is to give the next item, rather than the one below."""
        low, high = self._lengths[below], self._lengths[above]
        if high - length != length - low:
            return high - length < length - low
        return next(iter(self._lines[high])).number < next(iter(self._lines[low])).number

    def _enter(self, group: G, item: I, length: int) -> _Place[G, I]:
        party = self._parties.get(group)
        if party is None:
            party = self._parties[group] = _Party(group)
        self._numbers += 1
        place = _Place(item, length, self._numbers, party)
        party.places.append(place)
        party.waiting += 1
        self.items += 1
        self.tokens += length
        return place

    def _leave(self, place: _Place[G, I]) -> bool:
        """Take a place out of the line; True when its line is empty and gone."""
        party = place.party
        place.waiting = False
        party.waiting -= 1
        self.items -= 1
        self.tokens -= place.length
        if not party.waiting:
            del self._parties[party.group]
            party.places.clear()  # each names the party: a ring that only a full collection would free
        if place.alone:
            del self._alone[place]
            return False
        line = self._lines[place.length]
        del line[place]
        if line:
            return False
        del self._lines[place.length]
        del self._lengths[bisect_left(self._lengths, place.length)]
        return True
