"""Keeps the plan of the house true: who may import whom, what happens at import, how large things grow."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("service", "training", "encoder")

# One way down: a room imports only rooms of the floors below its own.
FLOORS: tuple[set[str], ...] = (
    {
        "core",
        "errors",
        "settings",
        "log_lines",
        "log_files",
        "quota",
        "catalogue",
        "manifest",
        "lanes",
        "load",
        "waiting",
        "words",
        "alarm",
    },
    {"answers", "store", "tokenizer", "schemas", "client", "logs", "tallies", "machine", "devices"}
    | {"tracing", "environment", "closing", "backlog", "head"},
    {"engines", "batcher", "exchange", "wire", "tuning", "span_maker", "unread", "listing"},
    {
        "engines.buckets",
        "engines.lone",
        "otlp",
        "engines.torchscript",
        "engines.openvino",
        "metrics",
        "body_limit",
        "access",
    },
    {"cache", "classifier", "middleware", "openapi", "engines.binding"},
    {"warmup", "connections", "yardstick", "engines.onnx", "results", "pulse"},
    {"calibration"},
    {"loading"},
    {"predictor"},
    {"life"},
    {"api"},
    {"app"},
    {"server"},
    {"cli"},
    {"start"},
    {"__main__"},
)
FLOOR_OF = {f"service.{room}": floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# What carries texts and numbers, and must never see a request, a response or a wire type.
INNER = {
    "core",
    "cache",
    "engines.openvino",
    "alarm",
    "load",
    "waiting",
    "lanes",
    "answers",
    "batcher",
    "tokenizer",
    "words",
    "engines",
    "engines.onnx",
}
INNER |= {
    "results",
    "pulse",
    "engines.buckets",
    "engines.binding",
    "engines.lone",
    "devices",
    "machine",
    "tuning",
    "yardstick",
    "calibration",
}
INNER |= {"tracing", "span_maker", "otlp"}
INNER |= {"engines.torchscript", "classifier", "warmup", "loading", "predictor"}
OUTER = {"fastapi", "starlette", "uvicorn", "service.schemas", "service.exchange", "service.wire"}

# Training measures what will be served, through these doors only.
# `training` may also use `encoder`, which knows neither of them.
DOORS = {"core", "errors", "store", "manifest", "engines", "tokenizer", "classifier", "warmup", "predictor"}


def sources() -> list[Path]:
    """Every Python file of the product."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> set[str]:
    """Every module that a file imports. `from service import api` counts as `service.api`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            if node.module in PACKAGES:
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
            else:
                found.add(node.module)
    return found


@pytest.fixture(params=sources(), ids=module_name)
def source(request: pytest.FixtureRequest) -> tuple[str, ast.Module, str]:
    path: Path = request.param
    text = path.read_text(encoding="utf-8")
    return module_name(path), ast.parse(text), text


def test_every_room_has_a_floor() -> None:
    rooms = {name for name in map(module_name, sources()) if name.startswith("service.")}
    assert rooms == set(FLOOR_OF)


def test_one_way_down(source: tuple[str, ast.Module, str]) -> None:
    name, tree, _ = source
    ours = {module for module in imports(tree) if module.split(".")[0] in {*PACKAGES, "tests"}}
    if name.startswith("service"):
        assert sorted(module for module in ours if FLOOR_OF.get(module, 99) >= FLOOR_OF.get(name, 0)) == []
    elif name.startswith("encoder"):
        assert {module for module in ours if not module.startswith("encoder.")} == set()
    else:
        doors = {f"service.{door}" for door in DOORS}
        others = {module for module in ours if module.split(".")[0] not in {"training", "encoder"}}
        assert others <= doors


def test_the_encoder_needs_torch_alone() -> None:
    paths = [path for path in sources() if module_name(path).startswith("encoder")]
    seen = {
        name.split(".")[0] for path in paths for name in imports(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert seen - set(sys.stdlib_module_names) == {"encoder", "torch"}


def test_inner_rooms_know_no_http() -> None:
    for path in sources():
        name = module_name(path)
        if name.removeprefix("service.") in INNER:
            seen = imports(ast.parse(path.read_text(encoding="utf-8")))
            assert not {module for module in seen if module in OUTER or module.split(".")[0] in OUTER}, name


def test_only_one_room_reads_the_environment(source: tuple[str, ast.Module, str]) -> None:
    name, tree, _ = source
    if not name.startswith("service") or name == "service.environment":
        return
    reads = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    ]
    assert reads == []


def test_first_docstring_says_what_it_knows_nothing_about(source: tuple[str, ast.Module, str]) -> None:
    name, tree, text = source
    if not text.strip():
        return
    docstring = ast.get_docstring(tree)
    assert docstring, f"{name} has no docstring"


def test_files_and_functions_stay_small(source: tuple[str, ast.Module, str]) -> None:
    name, tree, text = source
    assert text.count("\n") <= 300, f"{name} grew"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 60, f"{name}.{node.name} grew to {length} lines"
            positional = [
                a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in {"self", "cls"}
            ]
            assert len(positional) <= 4, f"{name}.{node.name} takes {positional}"


def test_nothing_happens_at_import(source: tuple[str, ast.Module, str]) -> None:
    """At module level: imports, definitions, constants. No call that stands alone, no loop, no `with`."""
    name, tree, _ = source
    for node in tree.body:
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant), f"{name}:{node.lineno} does something at import"
        elif isinstance(node, ast.If):
            test = ast.unparse(node.test)
            assert test in {"__name__ == '__main__'", "TYPE_CHECKING"}, (
                f"{name}:{node.lineno} decides at import"
            )
        else:
            assert not isinstance(node, ast.For | ast.While | ast.With | ast.Try), f"{name}:{node.lineno}"


def test_names_say_what_things_are() -> None:
    vague = {"utils", "util", "helpers", "helper", "manager", "common", "misc"}
    assert [path for path in sources() if path.stem in vague] == []


def test_serving_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, service.app, service.server, service.cli; print('\\n'.join(sys.modules))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    loaded = {module.split(".")[0] for module in out.split()}
    assert "service" in loaded
    assert loaded.isdisjoint(
        {"torch", "transformers", "onnxruntime", "onnx", "sklearn", "training", "encoder"}
    )
