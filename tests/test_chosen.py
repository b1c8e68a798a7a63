"""A yardstick that is told no version takes the one that is served."""

from pathlib import Path

import pytest

from load_tests.chosen import chosen_version
from service.errors import StartupError
from service.store import versions
from tests.models import make_version
from tests.server import ROOT


def test_without_a_folder_it_is_the_newest_of_the_repository() -> None:
    newest = versions(ROOT / "model_store", "sentiment")[-1]
    assert chosen_version().path == ROOT / "model_store/sentiment" / str(newest)


def test_a_folder_is_that_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        folder = make_version(tmp_path, version=number)
        assert chosen_version(folder).manifest.version == number
    monkeypatch.chdir(tmp_path / "sentiment")
    assert chosen_version(Path("1")).manifest.version == 1, "from where one stands"


@pytest.mark.parametrize("name", ["3", "newest"])
def test_a_folder_that_is_no_version_is_refused(tmp_path: Path, name: str) -> None:
    make_version(tmp_path)
    with pytest.raises(StartupError, match="is not there; there are 1"):
        chosen_version(tmp_path / "sentiment" / name)
