"""How sure a classifier is against how often it is right, and the temperature that makes the two agree.

Bins, calibration error and temperature scaling are those of Guo et al. 2017, "On Calibration of Modern Neural
Networks". Knows nothing of models, files or versions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from service.classifier import Activation, activate
from service.core import FloatArray
from training.data import DataError, Example, find_files, read_rows, role_of_name, set_name

BINS = 15
TEMPERATURES = (0.05, 20.0)
"""A temperature beyond these is none that rows ask for: they are all right, or their labels are noise."""
# A bisection halves the error each time, so that nothing of it is left in the eight digits that are kept.
STEPS = 60
LEAST_ROWS = 100

Chances = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bin:
    """Rows whose confidence lies above `low` and not above `high`; both means are None without a row."""

    low: float
    high: float
    rows: int
    confidence: float | None
    accuracy: float | None


def chances_of(scores: Chances) -> Chances:
    """float64[n, labels], two columns or more: one label alone is set against its absence."""
    return np.hstack([1 - scores, scores]) if scores.shape[1] == 1 else scores


def reliability(chances: Chances, labels: Sequence[int], *, bins: int = BINS) -> list[Bin]:
    """The rows in `bins` bins of one width, by the probability of the predicted label, their confidence."""
    confidence = chances.max(axis=1)
    right = chances.argmax(axis=1) == np.asarray(labels)
    edges = np.linspace(0, 1, bins + 1)
    # Bin m is ((m - 1) / M, m / M], as in the paper.
    places = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, bins - 1)
    found = []
    for place in range(bins):
        inside = places == place
        rows = int(inside.sum())
        found.append(
            Bin(
                low=float(edges[place]),
                high=float(edges[place + 1]),
                rows=rows,
                confidence=float(confidence[inside].mean()) if rows else None,
                accuracy=float(right[inside].mean()) if rows else None,
            )
        )
    return found


def calibration_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error: the mean of |accuracy - confidence| of the bins, weighted by their rows."""
    total = sum(one.rows for one in bins)
    gaps = [
        one.rows * abs(one.accuracy - one.confidence)
        for one in bins
        if one.accuracy is not None and one.confidence is not None
    ]
    return sum(gaps) / total


def log_loss(chances: Chances, labels: Sequence[int]) -> float:
    """Mean negative logarithm (natural) of the probability of the true label.

    A probability that is too small for a float counts as the smallest one.
    """
    own = chances[np.arange(len(labels)), np.asarray(labels)]
    return float(-np.log(np.maximum(own, np.finfo(np.float64).tiny)).mean())


def without_temperature(chances: Chances, temperature: float) -> Chances:
    """The probabilities that the same logits give at temperature 1, of probabilities that sum to 1."""
    if temperature == 1.0:
        return chances
    powers = chances**temperature
    shares: Chances = powers / powers.sum(axis=1, keepdims=True)
    return shares


def fit_temperature(logits: FloatArray, labels: Sequence[int], activation: Activation) -> float:
    """The temperature at which the log loss of the rows is least.

    In the inverse temperature b the loss is convex, and its slope is the mean of E_p[z] - z_label with
    p = softmax(b z): the root of a rising function, found by bisection.

    Args:
        logits: float32[n, labels]; with sigmoid one label, set against its absence.

    Raises:
        DataError: fewer than 100 rows, several labels with sigmoid, or rows that no temperature fits, since
            every answer is right or the labels are noise.
    """
    if activation == "sigmoid" and logits.shape[1] > 1:
        raise DataError("a temperature is fitted to labels that exclude each other, these do not")
    if len(labels) < LEAST_ROWS:
        raise DataError(f"{len(labels)} rows are too few to fit a temperature, {LEAST_ROWS} are not")
    values = logits.astype(np.float64)
    pairs = np.hstack([np.zeros_like(values), values]) if values.shape[1] == 1 else values
    truth = pairs[np.arange(len(pairs)), np.asarray(labels)]

    def slope(temperature: float) -> float:
        chances = activate(pairs.astype(np.float32), "softmax", temperature=temperature)
        return float(((chances * pairs).sum(axis=1) - truth).mean())

    cold, hot = TEMPERATURES
    # The slope is taken by the inverse, which falls where the temperature rises.
    if not slope(cold) > 0 > slope(hot):
        raise DataError("no temperature fits these rows: every answer is right, or the labels are noise")
    for _ in range(STEPS):
        middle = (cold * hot) ** 0.5
        cold, hot = (middle, hot) if slope(middle) > 0 else (cold, middle)
    return float(f"{cold:.8g}")


def calibration_sets(paths: Sequence[Path], *, labels: int) -> dict[str, list[Example]]:
    """The dev rows of the files, by the name of the set: rows that train or test never choose a temperature.

    Raises DataError, also for a file without a dev row.
    """
    named = {path.resolve() for path in paths}
    sets = {}
    for file in find_files(paths):
        by_name = role_of_name(file.name)
        rows = [example for example, split in read_rows(file, labels=labels) if (split or by_name) == "dev"]
        if rows:
            sets[set_name(file)] = rows
        elif file.resolve() in named:
            raise DataError(f"{file}: no dev rows, on which a temperature is fitted")
    if not sets:
        raise DataError(f"{', '.join(map(str, paths))}: no dev rows, on which a temperature is fitted")
    return sets
