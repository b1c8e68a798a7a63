"""A GPU has other defaults, and what the operator gave stays."""

from dataclasses import replace
from pathlib import Path

import pytest

from service.devices import ON_CUDA, settings_for
from service.engines import Engine, EngineOptions, open_engine
from service.errors import StartupError
from service.loading import load
from service.settings import Settings
from service.store import Version
from tests.models import make_version
from tests.service.stand_ins import GatedEngine


def test_a_cpu_has_the_settings_as_they_are() -> None:
    settings = Settings(max_batch_tokens=64)
    assert settings_for("cpu", settings) is settings


def test_a_gpu_has_larger_batches_unless_they_were_given() -> None:
    plain, chosen = Settings(), settings_for("cuda", Settings(max_batch_tokens=64, lanes=5))
    assert (chosen.max_batch_tokens, chosen.lanes) == (64, 5)
    assert (chosen.max_batch_items, chosen.threads_per_lane) == (256, 1)
    assert plain.max_batch_items == 32


def test_the_defaults_of_a_gpu_are_settings_that_would_be_taken() -> None:
    assert settings_for("cuda", Settings()).model_dump() == Settings(**ON_CUDA).model_dump()


class OnCuda(GatedEngine):
    """A real engine that says it is on a GPU, where its numbers are wrong."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.device = "cuda"
        self.change = lambda logits: logits + 1


def test_auto_leaves_a_gpu_that_gives_other_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_version(tmp_path)
    opened: list[GatedEngine] = []

    def open_on(version: Version, options: EngineOptions) -> Engine:
        engine = open_engine(version, replace(options, device="cpu"))
        opened.append(GatedEngine(engine) if options.device == "cpu" else OnCuda(engine))
        return opened[-1]

    model = load(Settings(model_store=tmp_path), open_on, go_on=lambda: True)
    assert (model.description.device, model.settings.max_batch_items) == ("cpu", 32)
    assert [engine.closed.is_set() for engine in opened] == [True, False]
    assert [record.getMessage() for record in caplog.records].count("cuda is not used") == 1
    model.engine.close()
    with pytest.raises(StartupError, match="golden text"):
        load(Settings(model_store=tmp_path, device="cuda"), open_on, go_on=lambda: True)
    assert opened[-1].closed.is_set()
