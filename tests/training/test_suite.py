"""The suite's sets are read from folders like the real ones, and what is wrong with a file is told."""

import gzip
import os
import shutil
from pathlib import Path

import pytest

from training.data import DataError
from training.suite import SUITE, read_suite

NAMES = [
    "sst2/dev",
    "sst2/test",
    "imdb/test",
    "imdb_cad/paired_test",
    "blitzer/books dev",
    "blitzer/dvd dev",
    "blitzer/electronics dev",
    "blitzer/kitchen",
    "cr/all",
    "movie_reviews/all",
]


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = content.encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def write_suite(folder: Path) -> Path:
    """Small files with the names and columns of the real ones."""
    for one in SUITE:
        write(
            folder / one.file, "text\tlabel\tsplit\tpair_id\na good film\t1\tdev\t7\na bad film\t0\tdev\t7\n"
        )
        if one.quick is not None:
            write(folder / one.quick, "text\tlabel\na good film\t1\n")
    return folder


def test_every_set_is_read_under_its_name(tmp_path: Path) -> None:
    sets = read_suite(write_suite(tmp_path))
    assert list(sets) == NAMES
    assert all([example.label for example in one.examples] == [1, 0] for one in sets.values())
    paired = {name: one.pairs for name, one in sets.items() if one.pairs is not None}
    assert paired == {"imdb_cad/paired_test": ["7", "7"]}


def test_what_is_quick_has_a_name_of_its_own(tmp_path: Path) -> None:
    sets = read_suite(write_suite(tmp_path), quick=True)
    assert "imdb/test" not in sets
    assert len(sets["imdb/test_subset1000"].examples) == 1


def test_rows_that_train_are_not_measured(tmp_path: Path) -> None:
    write_suite(tmp_path)
    write(tmp_path / "blitzer/books.tsv.gz", "text\tlabel\tsplit\nfine\t1\ttrain\ndull\t0\tdev\n")
    write(tmp_path / "blitzer/kitchen.tsv.gz", "text\tlabel\tsplit\nfine\t1\ttrain\ndull\t0\tdev\n")
    sets = read_suite(tmp_path)
    assert [example.text for example in sets["blitzer/books dev"].examples] == ["dull"]
    assert len(sets["blitzer/kitchen"].examples) == 2


def test_an_empty_text_is_left_out_and_counted(tmp_path: Path) -> None:
    write_suite(tmp_path)
    write(tmp_path / "cr/all.tsv.gz", "text\tlabel\nfine\t1\n \t0\n\t1\n")
    one = read_suite(tmp_path)["cr/all"]
    assert (len(one.examples), one.left_out) == (1, 2)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("cr/all.tsv.gz", "text\tlabel\nfine\t2\n", "all.tsv.gz:2: the label is neither 0 nor 1"),
        ("cr/all.tsv.gz", "words\tlabel\nfine\t1\n", "no column 'text'"),
        ("cr/all.tsv.gz", "text\tlabel\n\t1\n", "no rows to measure"),
        ("blitzer/dvd.tsv.gz", "text\tlabel\nfine\t1\n", "no column 'split'"),
        ("imdb_cad/paired_test.tsv.gz", "text\tlabel\nfine\t1\n", "no column 'pair_id'"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, file: str, content: str, reason: str) -> None:
    write_suite(tmp_path)
    write(tmp_path / file, content)
    with pytest.raises(DataError, match=reason):
        read_suite(tmp_path)


def test_a_set_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write_suite(tmp_path)
    shutil.rmtree(tmp_path / "sst2")
    with pytest.raises(DataError, match=r"dev\.tsv"):
        read_suite(tmp_path)


@pytest.mark.skipif(
    "VALENCE_DATA" not in os.environ, reason="VALENCE_DATA, the folder of data sets, is not set"
)
def test_the_real_files_have_the_rows_that_are_known() -> None:
    sets = read_suite(Path(os.environ["VALENCE_DATA"]), quick=True)
    counts = {name: len(one.examples) for name, one in sets.items()}
    assert counts["sst2/test"] == 1821
    assert (counts["cr/all"], sets["cr/all"].left_out) == (3771, 4)
    assert len(set(sets["imdb_cad/paired_test"].pairs or ())) == 488
