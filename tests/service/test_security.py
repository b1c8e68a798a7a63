"""What a hostile client meets: bounds that are settings, headers of pages, no key in any output; the page."""

import ast
import base64
import contextlib
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import httpx
import pytest

from service.cli import EXIT_FAILED, EXIT_USAGE
from service.connections import BoundedConnection
from service.settings import Settings
from tests.models import make_version
from tests.server import ROOT, SAFETY_S, LocalServer, eventually, local_server, serving
from tests.service.test_cli import valence

KEY, FILE_KEY, WRONG = "hunter2-secret-of-env", "hunter2-secret-of-file", "hunter2-secret-guess"
SECRET = "hunter2"  # noqa: S105 - what no output may hold
GET = b"GET /health/live HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
PAGE = ROOT / "docs/security.md"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    make_version(folder)
    return folder


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[LocalServer]:
    with local_server(model_store=store) as running:
        yield running


def received(connection: socket.socket) -> bytes:
    """All that comes until the server hangs up."""
    found = b""
    connection.settimeout(SAFETY_S)
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            found += part
    return found


# --- keys are in no output


def test_no_key_is_in_any_output(store: Path, tmp_path: Path) -> None:
    """Of a process that logs all there is: its answers, its metrics and its log."""
    path = tmp_path / "keys"
    path.write_text(FILE_KEY)
    shown = []
    with (
        serving(model_store=store, api_keys=KEY, api_keys_file=path, log_level="debug") as server,
        httpx.Client(base_url=server.url, timeout=SAFETY_S, trust_env=False) as client,
    ):
        for key in (KEY, FILE_KEY, WRONG):
            for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}):
                for method, route in (
                    ("POST", "/predict"),
                    ("GET", "/models"),
                    ("GET", "/docs"),
                    ("GET", f"/{key}"),
                ):
                    response = client.request(method, route, headers=headers, json={"inputs": "good"})
                    shown.append(response.text + str(response.headers))
                    assert (response.status_code == 401) is (key == WRONG)
        path.write_text(f"{FILE_KEY}\n{SECRET} no key")
        eventually(
            lambda: (
                client.get("/models", headers={"x-api-key": WRONG}).status_code == 401
                and bool(server.events("API keys not replaced"))
            ),
            "the file was read again",
        )
        shown.append(client.get("/metrics").text)
        log = json.dumps(server.lines)
    assert '"code": "unauthorized"' in log
    assert SECRET not in log
    assert SECRET not in "".join(shown)


def test_no_key_is_in_the_settings_or_what_is_said_of_them(store: Path, tmp_path: Path) -> None:
    given = Settings(api_keys=KEY)  # type: ignore[arg-type]
    for shown in (repr(given), str(given), str(given.model_dump()), given.model_dump_json()):
        assert SECRET not in shown
    for command in ("settings", "models"):
        ran = valence(command, api_keys=KEY, model_store=store)
        assert (ran.returncode, SECRET in ran.stdout + ran.stderr) == (0, False)
    path = tmp_path / "keys"
    path.write_text(f"{SECRET} is no key")
    for settings in ({"api_keys": SECRET}, {"api_keys_file": path}, {"api_keys_file": tmp_path / "none"}):
        ran = valence("serve", model_store=store, port=0, **settings)
        assert ran.returncode == EXIT_FAILED
        last = ran.stderr.splitlines()[-1]
        assert re.match(r"valence: VALENCE_API_KEYS(_FILE)?: (key 1 must be|cannot read)", last)
        assert SECRET not in ran.stderr


@pytest.mark.parametrize(
    "name",
    ["VALENCE_API_KEY", "VALENCE_APIKEYS", "VALENCE_KEYS", "VALENCE_API_KEY_FILE", "VALENCE_API_KYES"],
)
def test_a_mistyped_name_of_the_keys_stops_the_start(store: Path, name: str) -> None:
    """Any other mistyped setting is a warning; this one would leave the service open."""
    ran = valence("serve", model_store=store, port=0, extra={name: KEY})
    assert ran.returncode == EXIT_USAGE
    assert ran.stderr.startswith(f"valence: {name} is not a setting; is VALENCE_API_KEYS")
    assert SECRET not in ran.stderr


# --- what browsers are told


def test_every_answer_says_that_its_type_is_meant(server: LocalServer) -> None:
    with server.client() as client:
        for path in ("/docs", "/openapi.json", "/metrics", "/health", "/models", "/nothing", "/predict"):
            assert client.get(path).headers["x-content-type-options"] == "nosniff"
        assert client.post("/predict", json={"inputs": "good"}).headers["x-content-type-options"] == "nosniff"


def test_the_page_may_do_nothing_but_show(server: LocalServer) -> None:
    with server.client() as client:
        page = client.get("/docs")
    directives = dict(one.strip().split(" ", 1) for one in page.headers["content-security-policy"].split(";"))
    assert set(directives) == {"default-src", "style-src", "base-uri", "form-action", "frame-ancestors"}
    style = directives.pop("style-src")
    assert set(directives.values()) == {"'none'"}
    assert page.headers["referrer-policy"] == "no-referrer"
    styles = re.findall(r"<style>(.*?)</style>", page.text, re.DOTALL)
    assert [
        f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in styles
    ] == [style]
    assert "style=" not in page.text, "only what has that hash may be a style"


# --- bounds


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "in pieces"])
@pytest.mark.parametrize(
    "part", [b"x-big: %b", b"GET /%b HTTP/1.1\r\nhost: x", b"a: b%b"], ids=["header", "path", "many"]
)
def test_a_head_over_its_limit_is_refused(store: Path, part: bytes, at_once: bool) -> None:
    limit = 2_000
    with local_server(model_store=store, max_head_bytes=limit) as server:
        for size, status in ((limit - 200, (b"200", b"404")), (limit + 10, (b"431",))):
            if part.startswith(b"GET"):
                head = part % (b"x" * size) + b"\r\n"
            elif part.startswith(b"a:"):
                head = GET + part % b"" + (b"\r\na: b" * (size // 6)) + b"\r\n"
            else:
                head = GET + part % (b"x" * size) + b"\r\n"
            head += b"connection: close\r\n\r\n"
            with socket.create_connection(server.address) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    for start in range(0, len(head), len(head) if at_once else 500):
                        connection.sendall(head[start : start + (len(head) if at_once else 500)])
                answer = received(connection)
            assert answer.split(b" ", 2)[1] in status
        with server.client() as client:
            long_body = client.post("/predict", json={"inputs": "good " * limit})
            assert long_body.status_code == 200, "a body behind the head, in one piece with it, is none of it"


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize(("over", "status"), [(0, b"200"), (1, b"431")])
def test_the_limit_of_a_head_is_exact(store: Path, pieces: int, over: int, status: bytes) -> None:
    """From the method to the empty line, both included."""
    limit = 2_000
    start = b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-big: "
    head = start + b"x" * (limit - len(start) - 4 + over) + b"\r\n\r\n"
    assert len(head) == limit + over
    with (
        local_server(model_store=store, max_head_bytes=limit) as server,
        socket.create_connection(server.address) as connection,
    ):
        cut = len(head) // pieces
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(head[:cut])
            connection.sendall(head[cut:])
        assert received(connection).split(b" ", 2)[1] == status


def test_an_upgrade_asked_for_in_http_1_0_is_answered_in_http_1_0(store: Path) -> None:
    """Such a client reads until the connection ends; an idle one would be kept longer than we wait."""
    head = b"GET /health/live HTTP/1.0\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    with local_server(model_store=store) as server, socket.create_connection(server.address) as connection:
        connection.sendall(head)
        assert b'{"status":"live"}' in received(connection)


def test_many_who_ask_to_upgrade_in_one_piece_are_all_answered(store: Path) -> None:
    """Each is read again without its wish: by a loop, as a stack would end after some hundreds."""
    one = b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"
    last = b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with local_server(model_store=store) as server, socket.create_connection(server.address) as connection:
        sending = threading.Thread(target=connection.sendall, args=(one * 2_000 + last,))
        sending.start()
        answered = received(connection)
        sending.join()
    assert answered.count(b"HTTP/1.1 200 OK") == 2_001


@pytest.mark.parametrize(
    ("start", "endless"),
    [
        (b"", b"GET /" + b"x" * 10_000),
        (GET + b"x-slow: ", b"x" * 10_000),
        (GET, b"a: b\r\n" * 2_000),
        (POST + b"content-length: 10000\r\n\r\n", b"x" * 10_000),
        (POST + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 2_000),
    ],
    ids=["request line", "header", "headers", "body", "chunks"],
)
def test_a_client_that_sends_a_byte_at_a_time_is_hung_up_on(
    store: Path, start: bytes, endless: bytes
) -> None:
    """Each byte is a sign of life, and none gives it more time."""
    with local_server(model_store=store, request_timeout_s=0.5) as server:
        with socket.create_connection(server.address) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(0.02)  # the pace; the server decides when it is over
            answer = b""
            connection.sendall(start)
            for position in range(len(endless)):
                try:
                    connection.sendall(endless[position : position + 1])
                    answer = connection.recv(65536)
                except TimeoutError:
                    continue
                except (BrokenPipeError, ConnectionResetError):
                    pass
                break
        assert answer.startswith(b"HTTP/1.1 408 ")
        eventually(lambda: not server.server.server_state.connections, "the connection is gone")
        with server.client() as client:
            assert client.post("/predict", json={"inputs": "good"}).status_code == 200


METRICS = b"GET /metrics HTTP/1.1\r\nhost: x\r\n"


@contextlib.contextmanager
def deaf(server: LocalServer) -> Iterator[socket.socket]:
    """A client that reads nothing, and has little room for what comes."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.address)
        eventually(lambda: len(server.server.server_state.connections) == 1, "the connection is there")
        yield connection


def unsent_bytes(server: LocalServer, served: BoundedConnection) -> int:
    """What the server itself holds back, once it has written all it could."""
    size: Future[int] = Future()
    server.loop.call_soon_threadsafe(lambda: size.set_result(served.transport.get_write_buffer_size()))
    return size.result(SAFETY_S)


def answered(server: LocalServer) -> float:
    return server.metric("valence_http_requests_total", route="/metrics", status="200")


def test_a_client_that_does_not_read_is_hung_up_on(store: Path) -> None:
    """It asks for far more than the buffers on the way hold."""
    with local_server(model_store=store, request_timeout_s=0.5) as server, deaf(server) as connection:
        connection.sendall((METRICS + b"\r\n") * 1_000)
        eventually(lambda: not server.server.server_state.connections, "the connection is gone")
        eventually(lambda: not server.server.server_state.tasks, "nothing waits for it")
        assert 0 < answered(server) < 1_000
        with server.client() as client:
            assert client.get("/health/live").status_code == 200


@pytest.mark.parametrize("end", [b"", METRICS + b"connection: close\r\n\r\n"], ids=["kept", "closing"])
def test_a_last_answer_that_is_not_read_holds_nothing(store: Path, end: bytes) -> None:
    """The server is through with it, and a little that has no room on the way is all that keeps it."""
    with (
        local_server(model_store=store, request_timeout_s=0.5, keep_alive_s=1) as server,
        deaf(server) as connection,
    ):
        [served] = server.server.server_state.connections
        assert isinstance(served, BoundedConnection)
        asked = 0
        while not unsent_bytes(server, served):
            connection.sendall(METRICS + b"\r\n")
            asked += 1
            eventually(lambda: answered(server) == asked, "answered")  # noqa: B023 - called at once
        connection.sendall(end)
        eventually(lambda: not server.server.server_state.connections, "the connection is gone")
        eventually(lambda: not server.server.server_state.tasks, "nothing waits for it")
        assert answered(server) == asked + bool(end)


# --- the page


def test_the_tests_that_the_page_names_exist() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 20
    for file, test in named:
        [path] = (ROOT / "tests").rglob(file)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert test in {re.sub(r"^test_([rp]\d+_)+", "test_", one) for one in tests}, f"{file}::{test}"


def test_the_page_names_every_limit() -> None:
    text = PAGE.read_text(encoding="utf-8")
    limits = {f"VALENCE_{name.upper()}" for name in Settings.model_fields if name.startswith("max_")}
    others = {
        "VALENCE_REQUEST_TIMEOUT_S",
        "VALENCE_KEEP_ALIVE_S",
        "VALENCE_API_KEYS",
        "VALENCE_API_KEYS_FILE",
    }
    of_batches = {"VALENCE_MAX_BATCH_ITEMS", "VALENCE_MAX_BATCH_TOKENS", "VALENCE_MAX_PADDING_TOKENS"}
    assert sorted(name for name in (limits | others) - of_batches if f"`{name}`" not in text) == []
