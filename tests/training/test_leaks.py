"""Texts that stand twice are found whatever their case, width and spacing, and are counted."""

from training.data import Corpus, Example
from training.leaks import Overlap, TrainedTexts, clean_train, normalised, overlap


def test_texts_are_compared_without_case_width_and_spacing() -> None:
    assert normalised("  A \u00a0Fine  ﬁlm\u3000Ａ ") == normalised("a fine film a")
    assert normalised("a fine film") != normalised("a fine film .")


def test_repeats_contradictions_and_leaks_do_not_train_and_are_counted() -> None:
    corpus = Corpus(
        train=[
            Example("a fine film", 1),
            Example("A  fine film", 1),
            Example("so so", 0),
            Example("So so", 1),
            Example("seen in dev", 1),
            Example("Seen in test", 0),
            Example("seen in test", 0),
            Example("in both", 0),
            Example("dull", 0),
        ],
        dev=[Example("Seen in dev", 1), Example("in both", 0)],
        test=[Example("seen in  test", 0), Example("in both", 0)],
    )
    kept, counts = clean_train(corpus)
    assert kept == [Example("a fine film", 1), Example("dull", 0)]
    assert (counts.rows_read, counts.rows_kept) == (9, 2)
    assert (counts.duplicates, counts.contradictory) == (1, 2)
    assert (counts.also_in_dev, counts.also_in_test) == (2, 3)


def test_overlaps_are_counted_as_they_are_and_normalised() -> None:
    rows = [Example("A fine film", 1), Example("a  FINE film", 0), Example("dull", 0)]
    assert overlap(rows, TrainedTexts.of(["A fine film", "other"])) == Overlap(exact=1, normalised=2)
