"""A tiny base, its data and one finished run, made once for all tests of training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.training.tiny import TRAIN_ROWS, make_base, tiny_config, write_data
from training.config import FitConfig
from training.train import fit


@dataclass(frozen=True)
class FinishedRun:
    """A run, its data, its choices and the metrics that it returned."""

    folder: Path
    data: Path
    config: FitConfig
    metrics: dict[str, Any]


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "tiny-bert")


@pytest.fixture(scope="session")
def finished_run(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("finished")
    data = write_data(folder / "data", train=TRAIN_ROWS)
    config = tiny_config(tiny_base, data, epochs=12, batch_items=8)
    return FinishedRun(folder / "run", data, config, fit(config, folder / "run", threads=1))
