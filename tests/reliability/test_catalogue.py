"""Every row of the catalogue is covered, by a test that names it or by a reason, and the table is fresh."""

import re

from tests.reliability.catalogue import (
    FOLDER,
    KINDS,
    ROWS,
    TABLE,
    TESTS,
    cover_by_tests,
    named_tests,
    page,
    reasons,
    rows_of,
)


def test_every_row_has_a_test_or_a_reason() -> None:
    covered = cover_by_tests().keys() | reasons().keys()
    assert sorted(ROWS.keys() - covered) == []


def test_tests_and_reasons_name_rows_that_there_are_in_two_digits() -> None:
    wrong = [
        name
        for _, name in named_tests()
        if not all(len(row) == 2 and int(row) in ROWS for row in rows_of(name))
    ]
    assert wrong == []
    assert sorted(reasons().keys() - ROWS.keys()) == []


def test_every_kind_has_three_cases_of_our_own_whose_tests_exist() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    sections = re.split(r"^### ([A-J])\. .*$", text, flags=re.MULTILINE)[1:]
    assert sections[::2] == list(KINDS)
    for kind, section in zip(sections[::2], sections[1::2], strict=True):
        cases = re.findall(r"^- (?:tried, holds|found, fixed|found, open): ", section, re.MULTILINE)
        assert len(cases) >= 3, kind
    written = {path.name: path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")}
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)
    assert named
    assert [test for file, test in named if f"def {test}(" not in written.get(file, "")] == []


def test_the_table_is_fresh() -> None:
    fresh = page(cover_by_tests(), reasons())
    assert TABLE.read_text(encoding="utf-8") == fresh, "run `python -m tests.reliability.catalogue`"
