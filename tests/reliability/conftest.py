"""What these tests share: a store with a tiny real version, and threads that ask."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.models import make_version


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nobody changes it."""
    folder = tmp_path_factory.mktemp("store")
    make_version(folder)
    return folder


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as made:
        yield made
