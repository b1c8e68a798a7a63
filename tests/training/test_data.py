"""Labelled files: what is read, what is refused with file and line, and which rows train."""

import gzip
import hashlib
from pathlib import Path

import pytest

from tests.training.tiny import write_rows
from training.data import (
    NO_LABEL,
    Corpus,
    DataError,
    Example,
    add_unlabelled,
    find_files,
    load_corpus,
    read_rows,
    role_of_name,
    set_name,
    texts_of,
)

GOOD_GZIP = gzip.compress(b"text\tlabel\n" + b"a fine film\t1\n" * 500)


def test_a_plain_and_a_compressed_file_give_the_same_rows(tmp_path: Path) -> None:
    content = "label\tstars\tsentence\n1\t9\t\"Wow\", I said; 'fine' \n0\t1\té ö 漢\r\n".encode()
    (tmp_path / "a.tsv").write_bytes(content)
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(content))
    expected = [(Example("\"Wow\", I said; 'fine'", 1), None), (Example("é ö 漢", 0), None)]
    assert read_rows(tmp_path / "a.tsv", labels=2) == expected
    assert read_rows(tmp_path / "a.tsv.gz", labels=2) == expected


def test_a_line_ends_at_a_newline_only(tmp_path: Path) -> None:
    """U+2028, U+0085 and form feed are line ends to `str.splitlines`, but stand inside real reviews."""
    path = write_rows(tmp_path / "a.tsv", [("one\u2028two\x85three\x0cfour", 1)])
    assert read_rows(path, labels=2) == [(Example("one\u2028two\x85three\x0cfour", 1), None)]


def test_a_byte_order_mark_is_not_part_of_the_header(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"\xef\xbb\xbftext\tlabel\nfine\t1\n")
    assert read_rows(path, labels=2) == [(Example("fine", 1), None)]


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b"", None, "empty"),
        (b"text\tlabel\n", None, "no row"),
        (b"body\tlabel\nfine\t1\n", 1, "'text' or 'sentence'"),
        (b"text\tstars\nfine\t1\n", 1, "'label'"),
        (b"text\tlabel\nfine\t1\nbad\n", 3, "1 fields, the header has 2"),
        (b"text\tlabel\nfine\t1\na\tb\t1\n", 3, "3 fields, the header has 2"),
        (b"text\tlabel\n\nfine\t1\n", 2, "1 fields"),
        (b"text\tlabel\nfine\tpositive\n", 2, "whole number"),
        (b"text\tlabel\nfine\t1.0\n", 2, "whole number"),
        (b"text\tlabel\nfine\t\n", 2, "whole number"),
        ("text\tlabel\nfine\t¹\n".encode(), 2, "whole number"),
        (b"text\tlabel\nfine\t1\ngood\t2\n", 3, "label 2 is outside 0 to 1"),
        (b"text\tlabel\nfine\t-1\n", 2, "label -1 is outside 0 to 1"),
        (b"text\tlabel\n \t1\n", 2, "text is empty"),
        (b"text\tlabel\nfine\t1\nca\xe9f\t1\n", 3, "not UTF-8"),
        (b"te\xffxt\tlabel\nfine\t1\n", 1, "not UTF-8"),
        (b"text\tlabel\tsplit\nfine\t1\tholdout\n", 2, "'split'"),
    ],
)
def test_what_does_not_fit_is_refused_with_file_and_line(
    tmp_path: Path, content: bytes, line: int | None, reason: str
) -> None:
    path = tmp_path / "train.tsv"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_rows(path, labels=2)
    where = f"{path}: " if line is None else f"{path}:{line}: "
    assert str(caught.value).startswith(where)
    assert reason in str(caught.value)
    assert "fine" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (GOOD_GZIP[:-20], "ends too early"),
        (GOOD_GZIP[:10] + b"\xff" * 8 + GOOD_GZIP[18:], "not a sound gzip file"),
        (GOOD_GZIP[:-8] + b"\x00" * 8, "not a sound gzip file"),
        (b"text\tlabel\nfine\t1\n", "not a sound gzip file"),
    ],
    ids=["cut", "damaged", "wrong checksum", "not compressed"],
)
def test_a_damaged_compressed_file_is_refused_with_file_and_line(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "train.tsv.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^{path}:\d+: .*{reason}"):
        read_rows(path, labels=2)


def test_more_labels_may_be_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.tsv", [("fine", 2)])
    assert read_rows(path, labels=3) == [(Example("fine", 2), None)]


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("train.tsv.gz", "train"),
        ("orig_train.tsv", "train"),
        ("train_semeval1316.tsv.gz", "train"),
        ("dev.tsv", "dev"),
        ("val.tsv", "dev"),
        ("validation.tsv", "dev"),
        ("test_subset1000.tsv.gz", "test"),
        ("new_test.tsv", "test"),
        ("train_test.tsv", "test"),
        ("all.tsv", None),
        ("latest.tsv", None),
        ("restrained.tsv", None),
    ],
)
def test_the_words_of_a_name_say_what_a_file_is_for(name: str, role: str | None) -> None:
    assert role_of_name(name) == role


def test_a_folder_gives_its_train_dev_and_test_files_and_no_other(tmp_path: Path) -> None:
    for name in ("train.tsv", "dev.tsv.gz", "test.tsv", "all.tsv", "exclude_train_ids.tsv", "train.csv"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in find_files([tmp_path])] == ["dev.tsv.gz", "test.tsv", "train.tsv"]


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.tsv", [("fine", 1)])
    assert find_files([tmp_path, path, tmp_path / ".." / tmp_path.name / "train.tsv"]) == [path]


@pytest.mark.parametrize("name", ["missing.tsv", "missing_folder", "notes.txt", "."])
def test_what_is_no_data_is_refused_with_its_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").write_text("text\tlabel\n", encoding="utf-8")
    with pytest.raises(DataError, match=f"^{tmp_path / name}: "):
        find_files([tmp_path / name])


def test_rows_go_where_their_file_belongs(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.tsv", [("a", 1)])
    write_rows(tmp_path / "dev.tsv", [("b", 0)])
    test = write_rows(tmp_path / "test.tsv.gz", [("c", 1), ("d", 0)])
    other = write_rows(tmp_path / "other" / "all.tsv", [("e", 1)])
    corpus = load_corpus([tmp_path, other], labels=2)
    assert corpus.train == [Example("a", 1), Example("e", 1)]
    assert corpus.dev == [Example("b", 0)]
    assert corpus.test == [Example("c", 1), Example("d", 0)]
    kept = {file.name: file for file in corpus.files}
    assert kept[f"{tmp_path.name}/test.tsv.gz"].rows == {"train": 0, "dev": 0, "test": 2}
    assert kept[f"{tmp_path.name}/test.tsv.gz"].sha256 == hashlib.sha256(test.read_bytes()).hexdigest()


def test_the_column_split_goes_before_the_name(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text("text\tlabel\tsplit\na\t1\ttrain\nb\t0\tdev\nc\t1\tval\nd\t0\ttest\n", encoding="utf-8")
    corpus = load_corpus([path], labels=2)
    assert [row.text for row in corpus.train] == ["a"]
    assert [row.text for row in corpus.dev] == ["b", "c"]
    assert [row.text for row in corpus.test] == ["d"]


def test_a_test_file_is_never_trained_on_even_when_it_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "orig_test.tsv", [("a", 1)])
    corpus = load_corpus([path], labels=2)
    assert corpus.train == []
    assert corpus.test == [Example("a", 1)]


def test_named_dev_files_judge_instead_of_those_found(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.tsv", [("a", 1)])
    write_rows(tmp_path / "dev.tsv", [("b", 0)])
    chosen = write_rows(tmp_path / "train_held_out.tsv", [("c", 1)])
    corpus = load_corpus([tmp_path], labels=2, dev_paths=[chosen])
    assert corpus.train == [Example("a", 1)]
    assert corpus.dev == [Example("c", 1)]
    assert corpus.test == [Example("b", 0)]


def test_a_set_is_named_by_its_folder_and_file() -> None:
    assert set_name(Path("data/sst2/dev.tsv")) == "sst2/dev"
    assert set_name(Path("data/imdb/test.tsv.gz")) == "imdb/test"


def test_texts_are_read_whether_they_have_a_label_or_not(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("text\tsource\n a good film \tx\nbad\ty\n", encoding="utf-8")
    labelled = write_rows(tmp_path / "b.tsv", [("a good film", 1), ("bad", 0)], header="sentence\tlabel")
    assert texts_of(tmp_path / "a.tsv") == texts_of(labelled) == ["a good film", "bad"]


def test_texts_without_a_label_are_rows_of_their_own_kind(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "more" / "unlabelled.tsv", [("good", 7)])
    corpus = Corpus()
    add_unlabelled(corpus, path)
    assert corpus.unlabelled == [Example("good", NO_LABEL)]
    assert corpus.files[0].name == "more/unlabelled.tsv"
    assert corpus.files[0].rows == {"train": 0, "dev": 0, "test": 0, "unlabelled": 1}


@pytest.mark.parametrize("content", ["text\tsource\n \tx\n", "words\tsource\ngood\tx\n"])
def test_a_row_without_a_text_is_told_with_its_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "unlabelled.tsv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"unlabelled\.tsv:2: no text"):
        texts_of(path)
