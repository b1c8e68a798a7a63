"""Counted without the client library, and on the page as if it had been counted by it."""

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client import Histogram as LibraryHistogram
from prometheus_client.openmetrics import exposition as openmetrics

from service.catalogue import CATALOGUE, MetricDescription
from service.tallies import Histograms, Numbers

_BY_LABEL = MetricDescription("made_up_total", "counter", "A counter.", ("kind", "route"))
_SPREAD = MetricDescription("made_up_seconds", "histogram", "A histogram.")


def page(registry: CollectorRegistry, write: Callable[[CollectorRegistry], bytes]) -> list[str]:
    """The lines of the page, without the times of creation, which only the library keeps."""
    return [line for line in write(registry).decode().splitlines() if "_created" not in line]


def amounts(one: MetricDescription) -> list[float]:
    """Numbers to count: for a histogram each bound itself, both sides of it, and what is above all bounds."""
    dice = random.Random(one.name)
    drawn: list[float] = [0, 1, 2.5, 1e-9, 12_345_678, *(dice.expovariate(1) for _ in range(20))]
    return [*drawn, *one.buckets, *(bound * 1.0001 for bound in one.buckets), 1e9]


@pytest.mark.parametrize("write", [generate_latest, openmetrics.generate_latest], ids=["text", "openmetrics"])
@pytest.mark.parametrize("one", CATALOGUE, ids=lambda one: one.name)
def test_a_family_is_written_as_the_librarys_own(one: MetricDescription, write: Any) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    library: Counter | Gauge | LibraryHistogram
    family: Numbers | Histograms
    if one.type == "histogram":
        library = LibraryHistogram(one.name, one.help, one.labels, registry=theirs, buckets=one.buckets)
        family = Histograms(one, one.buckets, threading.Lock())
    else:
        library = (Counter if one.type == "counter" else Gauge)(
            one.name, one.help, one.labels, registry=theirs
        )
        family = Numbers(one, threading.Lock())
    ours.register(family)
    assert page(ours, write) == page(theirs, write), "before anything is counted"

    for turn in ["a", 'é "quoted"', "back\\slash\nfeed"] if one.labels else [""]:
        values = tuple(f"{turn}{label}" for label in one.labels)
        child: Any = library.labels(*values) if values else library
        series: Any = family.series(*values)
        for amount in amounts(one):
            if one.type == "histogram":
                child.observe(amount)
                series.observe(amount)
            else:
                child.inc(amount)
                series.value += amount
    assert page(ours, write) == page(theirs, write)
    assert len(page(ours, write)) > 2


def test_the_same_labels_are_the_same_series() -> None:
    counts = Numbers(_BY_LABEL, threading.Lock())
    assert counts.series("a", "b") is counts.series("a", "b")
    assert counts.series("a", "b") is not counts.series("b", "a")
    spreads = Histograms(_SPREAD, (1.0,), threading.Lock())
    assert spreads.series() is spreads.series()


@pytest.mark.parametrize("values", [(), ("a",), ("a", "b", "c")])
def test_too_few_or_too_many_labels_are_refused(values: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="made_up_total has the labels"):
        Numbers(_BY_LABEL, threading.Lock()).series(*values)
    if values:
        with pytest.raises(ValueError, match="made_up_seconds has the labels"):
            Histograms(_SPREAD, (1.0,), threading.Lock()).series(*values)


@pytest.mark.parametrize("is_histogram", [False, True], ids=["number", "histogram"])
def test_a_scrape_waits_for_who_counts_under_the_lock(is_histogram: bool) -> None:
    lock = threading.Lock()
    family = Histograms(_SPREAD, (1.0,), lock) if is_histogram else Numbers(_BY_LABEL, lock)
    families: list[object] = []
    scrape = threading.Thread(target=lambda: families.extend(family.collect()))
    with lock:
        scrape.start()
        scrape.join(0.05)  # the time runs out when all is well
        assert families == []
    scrape.join()
    assert len(families) == 1


def test_a_trace_stands_in_the_bucket_of_its_value_as_the_librarys() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    bounds = (0.5, 1.0, 2.0, 4.0)
    library = LibraryHistogram(_SPREAD.name, _SPREAD.help, registry=theirs, buckets=bounds)
    family = Histograms(_SPREAD, bounds, threading.Lock())
    ours.register(family)
    for number, value in enumerate((0.1, 1.0, 1.5, 2.0, 9.0)):
        library.observe(value, {"trace_id": str(number)})
        family.series().observe_traced(value, str(number))
    pages = [
        [line.rsplit(" ", 1)[0] if " # " in line else line for line in page(one, openmetrics.generate_latest)]
        for one in (ours, theirs)
    ]
    assert pages[0] == pages[1], "but for the times"
    assert sum(" # " in line for line in pages[0]) == 4, "the last one of each bucket"
    assert not any(" # " in line for line in page(ours, generate_latest))
