"""API keys: what a key is, how the file is read again, and who is let in over a socket."""

import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from service import closing
from service.access import (
    MAX_FILE_BYTES,
    MAX_KEY_CHARS,
    MAX_KEYS,
    Access,
    KeyFile,
    Keys,
    digests_of,
    open_keys,
)
from service.app import create_app
from service.errors import StartupError
from service.schemas import Problem
from service.settings import Settings
from tests.models import make_version
from tests.reliability.wire import connect, request, to_the_end
from tests.server import JSON, SAFETY_S, LocalServer, eventually, local_server

FIRST, SECOND, THIRD = "first-key-0123456789", "second.key_0123456789", "third+key/0123456789=="
CLOSED = ("/models", "/docs", "/openapi.json", "/nothing")
ALWAYS_OPEN = ("/health/live", "/health/ready")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def write(path: Path, *lines: str) -> Path:
    """As a rotation should: whole at once."""
    new = path.with_suffix(".new")
    new.write_text("\n".join(lines))
    return new.replace(path)


def accepted(file: KeyFile) -> list[str]:
    keys = Keys((), file)
    return [key for key in (FIRST, SECOND, THIRD) if keys.accept(key.encode())]


# --- what a key is


@pytest.mark.parametrize("key", ["k" * 16, "k" * MAX_KEY_CHARS, "!#$%&'()*+-./:;<=>?@[]^_`{|}~", THIRD])
def test_visible_ascii_is_a_key(key: str) -> None:
    assert Keys(digests_of([key], "here")).accept(key.encode())


@pytest.mark.parametrize(
    "key",
    [
        "",
        "k" * 15,
        "k" * (MAX_KEY_CHARS + 1),
        "secret key 0123456789",
        "secret-kéy-0123456789",
        "secret\n" * 4,
    ],
)
def test_anything_else_is_refused_and_not_told(key: str) -> None:
    with pytest.raises(StartupError, match=r"here: key 2 must be 16 to 256") as refusal:
        digests_of([FIRST, key], "here")
    assert "secret" not in str(refusal.value)


def test_keys_are_counted_once_each_and_bounded() -> None:
    assert len(digests_of([FIRST, SECOND, FIRST], "here")) == 2
    assert len(digests_of([f"key-number-{n:08}" for n in range(MAX_KEYS)], "here")) == MAX_KEYS
    for keys in ([], [f"key-number-{n:08}" for n in range(MAX_KEYS + 1)]):
        with pytest.raises(StartupError, match=f"holds {len(keys)} keys"):
            digests_of(keys, "here")


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"f",
        FIRST[:-1].encode(),
        FIRST.encode() + b"x",
        FIRST.upper().encode(),
        b"\xff" * 20,
        b"k" * 60_000,
    ],
)
def test_what_is_no_key_is_not_accepted(given: bytes) -> None:
    assert not Keys(digests_of([FIRST, SECOND], "here")).accept(given)


# --- the file


def test_blank_lines_and_comments_are_no_keys(tmp_path: Path) -> None:
    lines = ("\ufeff# Ümläut", "", f"  {FIRST}\r", "\t# " + SECOND, THIRD)
    assert accepted(KeyFile(write(tmp_path / "keys", *lines))) == [FIRST, THIRD]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "holds 0 keys"),
        (b"# " + FIRST.encode(), "holds 0 keys"),
        (b"short", "key 1 must be"),
        (FIRST.encode() + b" # of Ann", "key 1 must be"),
        (b"\xff\xfe" * 20, "is not UTF-8"),
        (b"#" * (MAX_FILE_BYTES + 1), f"is over {MAX_FILE_BYTES} bytes"),
    ],
)
def test_a_file_that_holds_no_keys_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(StartupError, match=reason) as refusal:
        KeyFile(path)
    assert "VALENCE_API_KEYS_FILE" in str(refusal.value)
    assert FIRST not in str(refusal.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, reason in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "directory"),
        (pipe, "no regular file"),
    ):
        with pytest.raises(StartupError, match=reason):
            KeyFile(path)


def test_a_file_is_read_again_when_it_is_another(tmp_path: Path) -> None:
    clock = Clock()
    path = write(tmp_path / "keys", FIRST)
    file = KeyFile(path, clock=clock)
    write(path, SECOND, THIRD)
    clock.now_s += 0.9
    assert accepted(file) == [FIRST], "not yet"
    clock.now_s += 0.1
    assert accepted(file) == [SECOND, THIRD]


def test_a_write_in_place_of_the_same_size_is_seen(tmp_path: Path) -> None:
    clock = Clock()
    path = write(tmp_path / "keys", FIRST)
    file = KeyFile(path, clock=clock)
    facts = path.stat()
    path.write_text(FIRST[::-1])
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    clock.now_s += 1
    assert accepted(file) == []
    assert Keys((), file).accept(FIRST[::-1].encode())


def test_a_write_that_hides_its_size_and_its_time_is_seen(tmp_path: Path) -> None:
    """An old file is told apart by the time of the change itself, which nobody can set."""
    clock = Clock()
    path = write(tmp_path / "keys", FIRST)
    os.utime(path, ns=(0, 0))
    file = KeyFile(path, clock=clock)
    path.write_text(FIRST[::-1])
    os.utime(path, ns=(0, 0))
    clock.now_s += 1
    assert accepted(file) == []


@pytest.mark.parametrize(("age_s", "is_read_again"), [(1, True), (3, False)])
def test_a_file_is_read_again_while_its_clock_may_hide_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: int, is_read_again: bool
) -> None:
    """Some file systems count in seconds. A file that rests is told by its times, and costs no reading."""
    real, now_ns = os.fstat, time.time_ns()
    then_ns = now_ns - age_s * 1_000_000_000

    def coarse(number: int) -> object:
        facts = real(number)
        same = ("st_mode", "st_dev", "st_ino", "st_size")
        return SimpleNamespace(
            st_mtime_ns=then_ns, st_ctime_ns=then_ns, **{name: getattr(facts, name) for name in same}
        )

    monkeypatch.setattr(os, "fstat", coarse)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    clock = Clock()
    path = write(tmp_path / "keys", FIRST)
    file = KeyFile(path, clock=clock)
    path.write_text(FIRST[::-1])
    clock.now_s += 1
    assert Keys((), file).accept(FIRST[::-1].encode()) == is_read_again


def test_of_a_huge_file_only_the_beginning_is_read(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # holes: it takes no room
    with pytest.raises(StartupError, match="is over"):
        KeyFile(path)


def test_a_secret_that_kubernetes_swaps_is_seen(tmp_path: Path) -> None:
    """keys -> ..data/keys, and ..data is a link that is replaced."""
    clock = Clock()
    for name, key in (("..one", FIRST), ("..two", SECOND)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "keys", key)
    data, path = tmp_path / "..data", tmp_path / "keys"
    data.symlink_to("..one")
    path.symlink_to("..data/keys")
    file = KeyFile(path, clock=clock)
    assert accepted(file) == [FIRST]
    (tmp_path / "..tmp").symlink_to("..two")
    (tmp_path / "..tmp").replace(data)
    clock.now_s += 1
    assert accepted(file) == [SECOND]


def test_a_file_that_cannot_be_used_later_changes_nothing_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    path = write(tmp_path / "keys", FIRST)
    file = KeyFile(path, clock=clock)

    def look() -> list[str]:
        clock.now_s += 1
        before = len(caplog.records)
        assert accepted(file) == ([SECOND] if path.exists() and SECOND in path.read_text() else [FIRST])
        return [record.message for record in caplog.records[before:]]

    path.unlink()
    assert look() == ["API keys not replaced"]
    assert look() == []
    write(path, FIRST)
    assert look() == []
    path.unlink()
    assert look() == ["API keys not replaced"], "the same reason, but it went well in between"
    path.write_text("")
    assert look() == ["API keys not replaced"], "another reason"
    assert look() == []
    write(path, FIRST)
    assert look() == [], "nothing was replaced"
    path.unlink()
    assert look() == ["API keys not replaced"], "it went well in between"
    write(path, SECOND)
    assert look() == ["API keys replaced"]


# --- who is let in


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    make_version(folder)
    return folder


@pytest.fixture(scope="module")
def server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    path = write(tmp_path_factory.mktemp("keys") / "keys", "# of Ann", THIRD)
    with local_server(model_store=store, api_keys=f"{FIRST}, {SECOND}", api_keys_file=path) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LocalServer) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def assert_unauthorized(response: httpx.Response) -> None:
    assert response.status_code == 401, response.text
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["content-type"] == Problem.media_type
    assert Problem.model_validate_json(response.content).code == "unauthorized"


def exchanged(server: LocalServer, sent: bytes) -> bytes:
    """All that comes back on a connection of its own."""
    answer = b""
    with socket.create_connection(server.address) as connection:
        connection.sendall(sent)
        while part := connection.recv(65536):
            answer += part
    return answer


def ask(client: httpx.Client, headers: Sequence[tuple[bytes, bytes]] | dict[str, str]) -> httpx.Response:
    return client.post("/predict", json={"inputs": "good"}, headers=headers)


@pytest.mark.parametrize("key", [FIRST, SECOND, THIRD])
def test_each_key_opens_by_either_header(client: httpx.Client, key: str) -> None:
    for headers in (
        bearer(key),
        {"authorization": f"bEARER   {key}"},
        {"x-api-key": key},
        {"authorization": "Basic Zm9vOmJhcg==", "x-api-key": key},
        {"x-api-key": "wrong", **bearer(key)},
    ):
        assert ask(client, headers).status_code == 200
        for path in ("/models", "/docs", "/openapi.json"):
            assert client.get(path, headers=headers).status_code == 200
        assert client.get("/nothing", headers=headers).status_code == 404
        assert client.get("/predict", headers=headers).status_code == 405


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", FIRST.encode())],
        [(b"authorization", b"Basic " + FIRST.encode())],
        [(b"authorization", b"Bearer " + FIRST[:-1].encode())],
        [(b"authorization", b"Bearer " + FIRST.encode() + b"," + SECOND.encode())],
        [(b"authorization", b"Bearer " + FIRST.encode() + b" " + SECOND.encode())],
        [(b"authorization", b"Bearer wrong"), (b"authorization", b"Bearer " + FIRST.encode())],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"Bearer " + FIRST.encode())],
        [(b"x-api-key", FIRST.upper().encode())],
        [(b"x-api-key", b"\xff\xfe\x80" * 7)],
        [(b"x-api-key", "schlüssel-0123456789".encode())],
        [(b"authorization", b"Bearer \xc3\x28" + b"\xa0" * 20)],
        [(b"x-api-key", b"k" * 60_000)],
        [(b"authorization", b"Bearer " + b"k" * 60_000)],
        [(b"x-api-key", b"wrong")] * 1_000,
        [(b"x-api-key", FIRST.encode()), (b"x-api-key", b"wrong")],
        [(b"authorization", b"Bearer " + FIRST.encode())] * 2,
    ],
    ids=lambda headers: f"{len(headers)} {str(headers[:1])[:50]}",
)
def test_all_else_is_refused_in_one_way(client: httpx.Client, headers: list[tuple[bytes, bytes]]) -> None:
    with_id = [(b"x-request-id", b"same"), *headers]
    refused = ask(client, with_id)
    assert_unauthorized(refused)
    none = ask(client, [(b"x-request-id", b"same")])
    for one in (refused, none):
        del one.headers["date"]
    assert (refused.content, refused.headers) == (none.content, none.headers)


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "DELETE"])
def test_every_other_path_is_closed(client: httpx.Client, method: str, path: str) -> None:
    response = client.request(method, path, headers={"x-api-key": "wrong"})
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize(
    "target",
    [
        b"/health/live/",
        b"//health/live",
        b"/health/live/../../models",
        b"/metrics%2f..%2fmodels",
        b"/HEALTH",
        b"/models?/metrics",
        b"/predict%00",
        b"/%70redict",
        b"http://x/models",
        b"http://metrics/models",
        b"*",
    ],
)
def test_no_spelling_of_a_path_gets_round(server: LocalServer, target: bytes) -> None:
    head = b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    assert exchanged(server, head % target).startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 400 "))


def test_probes_and_metrics_are_open(client: httpx.Client) -> None:
    for path in (*ALWAYS_OPEN, "/health", "/metrics"):
        assert client.get(path).status_code == 200


def test_metrics_and_details_can_be_closed(store: Path) -> None:
    with (
        local_server(model_store=store, api_keys=FIRST, open_metrics=False) as server,
        server.client() as client,
    ):
        for path in ("/health", "/metrics"):
            assert_unauthorized(client.get(path))
            assert client.get(path, headers=bearer(FIRST)).status_code == 200
        for path in ALWAYS_OPEN:
            assert client.get(path).status_code == 200
        assert client.get("/openapi.json", headers=bearer(FIRST)).json()["paths"]["/metrics"]["get"][
            "responses"
        ]["401"]


def test_without_keys_all_is_open(store: Path) -> None:
    with local_server(model_store=store, open_metrics=False) as server, server.client() as client:
        assert ask(client, {}).status_code == 200
        for path in ("/health", "/metrics", "/models", "/docs"):
            assert client.get(path).status_code == 200
        document = client.get("/openapi.json").json()
        assert "security" not in document
        assert "securitySchemes" not in document["components"]
        assert all(
            "401" not in one["responses"] for path in document["paths"].values() for one in path.values()
        )


def test_refusals_are_counted(server: LocalServer, client: httpx.Client) -> None:
    def counted() -> tuple[float, float, float]:
        return (
            server.metric("valence_http_requests_total", route="/predict", status="401"),
            server.metric("valence_http_requests_total", route="other", status="401"),
            server.metric("valence_refusals_total", reason="unauthorized"),
        )

    predict, other, refused = counted()
    assert_unauthorized(ask(client, {}))
    assert_unauthorized(client.get("/nothing", headers=bearer("wrong")))
    assert counted() == (predict + 1, other + 1, refused + 2)


def test_the_body_of_who_is_refused_is_not_read(server: LocalServer) -> None:
    """Who asks first is not told to go on, and who sends nothing has his answer all the same."""
    head = "POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    for more in (
        "content-length: 1000000\r\nexpect: 100-continue\r\n",
        "content-length: 3000000\r\n",  # over the limit
        "content-length: 3000000\r\nexpect: 100-continue\r\n",
        "transfer-encoding: chunked\r\n",
    ):
        answer = exchanged(server, f"{head}{more}\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 401 "), more
        assert answer.count(b"HTTP/1.1 ") == 1


def test_who_is_refused_with_a_body_over_the_limit_gets_to_read_why(
    server: LocalServer, client: httpx.Client
) -> None:
    """What he sends is dropped for a while; then his connection ends."""
    size = server.life.settings.max_body_bytes + 1
    for path in ("/predict", "/nothing"):
        refused = client.post(path, content=b"x" * size)
        assert_unauthorized(refused)
        assert refused.headers["connection"] == "close"
    let_in = client.post("/predict", content=b"x" * size, headers={**bearer(FIRST), **JSON})
    assert (let_in.status_code, let_in.json()["code"]) == (413, "body_too_large")


def test_who_is_refused_while_he_sends_gets_to_read_why(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when he wants his connection closed, as `urllib` does; he is not reset when he sends on."""
    monkeypatch.setattr(closing, "LINGER_S", SAFETY_S)
    body = b"x" * 20_000
    with connect(server.address) as connection:
        connection.sendall(request(body, b"connection: close")[:-1])
        assert to_the_end(connection).startswith(b"HTTP/1.1 401 ")
        for _ in range(10):
            connection.sendall(body)


def test_the_next_request_of_who_was_refused_is_answered(client: httpx.Client) -> None:
    for _ in range(3):
        assert_unauthorized(client.post("/predict", content=b"x" * 1_000_000))
        assert ask(client, bearer(FIRST)).status_code == 200


def test_keys_are_rotated_without_a_restart(store: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "keys", FIRST)
    with local_server(model_store=store, api_keys_file=path) as server, server.client() as client:
        assert ask(client, bearer(FIRST)).status_code == 200
        assert ask(client, bearer(SECOND)).status_code == 401
        write(path, FIRST, SECOND)
        eventually(lambda: ask(client, bearer(SECOND)).status_code == 200, "the new key is taken")
        assert ask(client, bearer(FIRST)).status_code == 200
        write(path, SECOND)
        eventually(lambda: ask(client, bearer(FIRST)).status_code == 401, "the old key is no more")
        path.unlink()
        assert ask(client, bearer(SECOND)).status_code == 200


# --- wiring and document


def test_keys_that_cannot_be_had_stop_the_start(tmp_path: Path) -> None:
    for settings in (
        Settings(api_keys_file=tmp_path / "none"),
        Settings(api_keys_file=tmp_path / "none", api_keys=FIRST),  # type: ignore[arg-type]
        Settings(api_keys=" , "),  # type: ignore[arg-type]
        Settings(api_keys="short"),  # type: ignore[arg-type]
        Settings(api_keys=f"{FIRST},"),  # type: ignore[arg-type]
    ):
        with pytest.raises(StartupError):
            create_app(settings)


def test_the_layer_is_the_innermost_and_is_there_with_keys_alone() -> None:
    """Within `Errors`, which answers for it, and `BodyLimit`, which sees to the body that is not read."""
    assert open_keys(Settings()) is None
    without: list[object] = [layer.cls for layer in create_app(Settings()).user_middleware]
    with_keys = create_app(Settings(api_keys=FIRST))  # type: ignore[arg-type]
    assert [layer.cls for layer in with_keys.user_middleware] == [*without, Access]


def test_the_document_declares_the_keys(client: httpx.Client) -> None:
    document = client.get("/openapi.json", headers=bearer(FIRST)).json()
    schemes = document["components"]["securitySchemes"]
    assert {name for one in document["security"] for name in one} == set(schemes)
    assert {(one["type"], one.get("scheme"), one.get("name")) for one in schemes.values()} == {
        ("http", "bearer", None),
        ("apiKey", None, "X-API-Key"),
    }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            closed = path in {"/predict", "/models"}
            assert ("401" in operation["responses"]) is closed
            assert operation.get("security") == (None if closed else [])
    answer = document["paths"]["/predict"]["post"]["responses"]["401"]
    example = answer["content"][Problem.media_type]["examples"]["unauthorized"]["value"]
    Problem.model_validate_json(json.dumps(example))
    assert {name.lower() for name in answer["headers"]} == {"www-authenticate", "x-request-id"}
    page = client.get("/docs", headers=bearer(FIRST)).text
    assert page.count("X-API-Key: $KEY") == page.count("<pre>curl ") > 0
