"""Calibration error and temperature against figures worked out by hand, and a picture of them."""

from pathlib import Path

import numpy as np
import pytest

from service.classifier import activate
from service.core import FloatArray
from tests.training.tiny import write_rows
from training.calibrate import (
    Chances,
    calibration_error,
    calibration_sets,
    chances_of,
    fit_temperature,
    log_loss,
    reliability,
    without_temperature,
)
from training.curves import draw_reliability
from training.data import DataError, Example

LARGEST_PICTURE = 60_000


def sure_logits(labels: int, *, rows: int = 4000, factor: float) -> tuple[FloatArray, list[int]]:
    """Logits that would be honest, times `factor`: their labels are drawn from the honest probabilities."""
    dice = np.random.default_rng((labels, rows))
    honest = dice.normal(0, 2, (rows, labels)).astype(np.float32)
    chances = activate(honest, "softmax", temperature=1.0)
    drawn = (chances.cumsum(axis=1) < dice.random((rows, 1))).sum(axis=1)
    return (honest * factor).astype(np.float32), np.minimum(drawn, labels - 1).tolist()


def test_bins_are_of_one_width_closed_above_and_hold_the_predicted_label() -> None:
    """With five bins, 0.6 belongs to (0.4, 0.6] and 0.61 to the next."""
    chances = np.array([[0.6, 0.4], [0.39, 0.61], [0.05, 0.95], [1.0, 0.0]])
    bins = reliability(chances, [0, 0, 1, 1], bins=5)
    assert [one.rows for one in bins] == [0, 0, 1, 1, 2]
    assert bins[0].confidence is None
    assert (bins[2].accuracy, bins[3].accuracy, bins[4].accuracy) == (1.0, 0.0, 0.5)
    assert bins[4].confidence == pytest.approx(0.975)
    expected = (abs(1 - 0.6) + abs(0 - 0.61) + 2 * abs(0.5 - 0.975)) / 4
    assert calibration_error(bins) == pytest.approx(expected)


def test_fifteen_bins_are_what_is_reported() -> None:
    assert len(reliability(np.array([[0.5, 0.5]]), [0])) == 15


def test_answers_as_sure_as_they_are_right_have_no_error() -> None:
    chances = np.array([[0.75, 0.25]] * 4)
    assert calibration_error(reliability(chances, [0, 0, 0, 1])) == pytest.approx(0.0)
    assert calibration_error(reliability(chances, [1, 1, 1, 1])) == pytest.approx(0.75)


def test_a_probability_of_nothing_costs_much_but_not_everything() -> None:
    loss = log_loss(np.array([[1.0, 0.0], [0.5, 0.5]]), [1, 0])
    assert 300 < loss < 400
    assert log_loss(np.array([[0.5, 0.5]]), [0]) == pytest.approx(np.log(2))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_is_taken_out_again(temperature: float) -> None:
    logits = sure_logits(3, factor=2.0)[0]
    served = activate(logits, "softmax", temperature=temperature)
    plain = activate(logits, "softmax", temperature=1.0)
    np.testing.assert_allclose(without_temperature(served, temperature), plain, atol=1e-9)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("labels", [2, 3])
def test_the_temperature_that_made_answers_too_sure_is_found(labels: int, factor: float) -> None:
    logits, truth = sure_logits(labels, factor=factor)
    temperature = fit_temperature(logits, truth, "softmax")
    assert temperature == pytest.approx(factor, rel=0.08)

    def loss(value: float) -> float:
        return log_loss(activate(logits, "softmax", temperature=value), truth)

    assert loss(temperature) < min(loss(temperature * 1.002), loss(temperature / 1.002))
    before, after = (
        calibration_error(reliability(activate(logits, "softmax", temperature=value), truth))
        for value in (1.0, temperature)
    )
    assert after <= before + 0.01
    assert after < 0.03


def test_one_label_is_fitted_against_its_absence() -> None:
    pairs, truth = sure_logits(2, factor=2.0)
    alone = (pairs[:, 1:] - pairs[:, :1]).astype(np.float32)
    assert fit_temperature(alone, truth, "sigmoid") == pytest.approx(
        fit_temperature(pairs, truth, "softmax"), rel=1e-4
    )


def test_a_label_and_its_absence_are_two_columns() -> None:
    chances: Chances = np.array([[0.2], [0.9]])
    np.testing.assert_allclose(chances_of(chances), [[0.8, 0.2], [0.1, 0.9]])
    two = np.array([[0.5, 0.5]])
    assert chances_of(two) is two


def test_rows_that_no_temperature_fits_are_refused() -> None:
    logits = np.array([[2.0, -1.0]] * 200, dtype=np.float32)
    with pytest.raises(DataError, match="every answer is right"):
        fit_temperature(logits, [0] * 200, "softmax")
    with pytest.raises(DataError, match="labels are noise"):
        fit_temperature(logits, [0, 1] * 100, "softmax")
    with pytest.raises(DataError, match="too few"):
        fit_temperature(logits[:99], [0, 1, 1] * 33, "softmax")
    with pytest.raises(DataError, match="exclude each other"):
        fit_temperature(logits, [0] * 200, "sigmoid")


def test_only_dev_rows_choose_a_temperature(tmp_path: Path) -> None:
    dev = write_rows(tmp_path / "films" / "dev.tsv", [("good", 1)])
    write_rows(tmp_path / "films" / "train.tsv", [("bad", 0)])
    write_rows(tmp_path / "films" / "test.tsv", [("poor", 0)])
    books = tmp_path / "books" / "all.tsv"
    books.parent.mkdir()
    books.write_text("text\tlabel\tsplit\nfine\t1\tdev\ndull\t0\ttrain\nlong\t0\ttest\n", encoding="utf-8")
    expected = {"films/dev": [Example("good", 1)], "books/all": [Example("fine", 1)]}
    assert calibration_sets([dev, books], labels=2) == expected
    assert calibration_sets([dev.parent], labels=2) == {"films/dev": [Example("good", 1)]}


def test_a_file_without_dev_rows_is_refused(tmp_path: Path) -> None:
    test = write_rows(tmp_path / "films" / "test.tsv", [("good", 1)])
    with pytest.raises(DataError, match=f"{test}: no dev rows"):
        calibration_sets([test], labels=2)
    with pytest.raises(DataError, match="no dev rows"):
        calibration_sets([test.parent], labels=2)


def test_the_diagram_is_a_small_picture(tmp_path: Path) -> None:
    logits, truth = sure_logits(2, factor=3.0)
    path = tmp_path / "diagram.png"
    chances = activate(logits, "softmax", temperature=3.0)
    draw_reliability(chances, truth, path, temperature=3.0, title="films/test")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < LARGEST_PICTURE
