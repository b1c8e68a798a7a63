"""Numbers that are counted often, and the families of them that a scrape reads.

A count is an addition to a Python number: the client library's own counters take a lock for each and look
through their buckets one by one, which cost a request more than its log line. Each family is a collector in
the library's registry, and the page stays the library's.

One thread counts. Who counts from several holds the lock that was given to the family: a scrape holds it,
too, so that it sees the sum of a histogram that belongs to its buckets. Knows nothing of what is counted.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from math import inf
from time import time

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from service.catalogue import MetricDescription


class Number:
    """One series of a counter or a gauge. Add to its value, or set it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0


class Histogram:
    """One series of a histogram: how many values fell into each bucket, and their sum.

    Attributes:
        exemplars: the last value that came with a trace, of the buckets that had one, by their number.
    """

    __slots__ = ("_bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one: above every bound
        self.sum: float = 0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float) -> None:
        """Count a value. One that equals a bound belongs below it: `le` is "less or equal"."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def observe_traced(self, value: float, trace_id: str) -> None:
        """Count a value that a trace shows how it came about."""
        self.observe(value)
        number = bisect_left(self._bounds, value)
        self.exemplars[number] = Exemplar({"trace_id": trace_id}, value, time())


class Numbers(Collector):
    """Every series of a counter or a gauge. One without labels stands at 0 from the start."""

    def __init__(self, one: MetricDescription, lock: AbstractContextManager[object]) -> None:
        self._one = one
        self._lock = lock
        self._series: dict[tuple[str, ...], Number] = {}
        if not one.labels:
            self.series()

    def series(self, *values: str) -> Number:
        """The series with these values of the labels, in their order; at 0 when it is new."""
        _check(values, self._one)
        with self._lock:
            return self._series.setdefault(values, Number())

    def collect(self) -> Iterator[Metric]:
        """The family, as the library writes it on the page."""
        make = CounterMetricFamily if self._one.type == "counter" else GaugeMetricFamily
        family = make(self._one.name, self._one.help, labels=self._one.labels)
        with self._lock:
            seen = [(values, number.value) for values, number in self._series.items()]
        for values, value in seen:
            family.add_metric(values, value)
        yield family


class Histograms(Collector):
    """Every series of a histogram, with the same buckets for all: up to each bound, and up to infinity."""

    def __init__(
        self, one: MetricDescription, bounds: Sequence[float], lock: AbstractContextManager[object]
    ) -> None:
        self._one = one
        self._bounds = tuple(bounds)
        self._names = [floatToGoString(bound) for bound in (*bounds, inf)]  # type: ignore[no-untyped-call]
        self._lock = lock
        self._series: dict[tuple[str, ...], Histogram] = {}
        if not one.labels:
            self.series()

    def series(self, *values: str) -> Histogram:
        """The series with these values of the labels, in their order; empty when it is new."""
        _check(values, self._one)
        with self._lock:
            return self._series.setdefault(values, Histogram(self._bounds))

    def collect(self) -> Iterator[Metric]:
        """The family, as the library writes it on the page: each bucket holds those below it, too."""
        family = HistogramMetricFamily(self._one.name, self._one.help, labels=self._one.labels)
        with self._lock:
            seen = [
                (values, tuple(one.counts), one.sum, one.exemplars.copy())
                for values, one in self._series.items()
            ]
        for values, counts, total, exemplars in seen:
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = [
                (name, count, exemplars[number]) if number in exemplars else (name, count)
                for number, (name, count) in enumerate(zip(self._names, accumulate(counts), strict=True))
            ]
            family.add_metric(values, buckets, total)
        yield family


def _check(values: tuple[str, ...], one: MetricDescription) -> None:
    if len(values) != len(one.labels):
        raise ValueError(f"{one.name} has the labels {one.labels}, not {len(values)} of them")
