"""The examples of README.md answer what the page says, with the version that is served."""

import re
from collections.abc import Iterator

import pytest

from scripts.readme_examples import README, renewed
from tests.server import ROOT, Server, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(model_store=ROOT / "model_store") as running:
        yield running


@pytest.fixture(scope="module")
def page() -> str:
    return README.read_text(encoding="utf-8")


def test_the_page_tells_what_is_answered(server: Server, page: str) -> None:
    assert renewed(page, server.url) == page, "an answer is another now: make docs"


@pytest.mark.parametrize(
    ("now", "once"),
    [
        ('"version":"', '"version":"9'),
        ('"label":"positive","score":0.', '"label":"positive","score":0.1'),
        ("\npositive 0.", "\npositive 0.1"),
        ("\nnegative ", "\npositive "),
        ("](model_store/sentiment/", "](model_store/sentiment/9"),
    ],
)
def test_what_was_answered_once_is_renewed(server: Server, page: str, now: str, once: str) -> None:
    fresh = renewed(page, server.url)
    stale = fresh.replace(now, once, 1)
    assert stale != fresh
    made = renewed(stale, server.url)
    assert made != stale
    assert renewed(made, server.url) == made
    assert made.count(once) < stale.count(once)


def test_a_score_that_is_rounded_otherwise_stays(server: Server, page: str) -> None:
    fresh = renewed(page, server.url)
    rounded = re.sub(r"\b0\.\d{4,}", lambda number: f"{float(number[0]):.2f}", fresh)
    assert rounded != fresh
    assert renewed(rounded, server.url) == rounded


def test_a_page_without_examples_is_refused(server: Server) -> None:
    with pytest.raises(RuntimeError, match="not where it was"):
        renewed((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), server.url)
