"""The wiring: the order of the layers, what two applications share, what an import brings in."""

import subprocess
import sys
from pathlib import Path

from service.app import create_app, layers, life_of
from service.body_limit import BodyLimit
from service.middleware import Connections, Errors, Exchanges
from service.settings import Settings
from tests.models import make_version
from tests.server import ROOT, environment, local_server


def test_the_order_of_the_layers() -> None:
    """The log and the metrics see every answer; what ends connections sees every error."""
    order: list[object] = [layer.cls for layer in layers(life_of(create_app(Settings())))]
    assert order == [Exchanges, Connections, BodyLimit, Errors]


def test_two_applications_share_nothing(tmp_path: Path) -> None:
    make_version(tmp_path)
    with local_server(model_store=tmp_path) as first, local_server(model_store=tmp_path) as second:
        with first.client() as client:
            assert client.post("/predict", json={"inputs": "good"}).status_code == 200
        labels = {"route": "/predict", "status": "200"}
        assert first.metric("valence_http_requests_total", **labels) == 1
        assert second.metric("valence_http_requests_total", **labels) == 0


def test_an_application_is_made_without_a_model_or_a_loop() -> None:
    app = create_app(Settings(model_store=Path("nowhere")))
    assert life_of(app).unready_reason() is not None


def loaded_by(module: str) -> set[str]:
    """The packages that an import brings in."""
    code = f"import sys, {module}; print(*sys.modules)"
    names = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=environment(), text=True)
    return {name.partition(".")[0] for name in names.split()}


def test_an_import_brings_in_no_engine() -> None:
    loaded = loaded_by("service.server")
    assert {"service", "fastapi", "uvicorn"} <= loaded
    assert loaded.isdisjoint({"torch", "transformers", "onnxruntime", "openvino", "sklearn", "requests"})


def test_commands_that_need_no_http_do_not_load_it() -> None:
    loaded = loaded_by("service.cli")
    assert "service" in loaded
    assert loaded.isdisjoint({"fastapi", "starlette", "uvicorn", "onnxruntime"})
