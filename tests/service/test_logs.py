"""One line an event, readable by a program or by a person, and never a user's text."""

import io
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from service.log_lines import Event, console_line, json_line
from service.logs import LogFormat, configure, log_event

MARKER = "xyzzy-secret-text"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    kept = root.handlers[:], root.level, logging.getLogger("uvicorn").level
    root.handlers = []
    yield
    root.handlers, level, uvicorn_level = kept
    root.setLevel(level)
    logging.getLogger("uvicorn").setLevel(uvicorn_level)


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def look_up() -> None:
    raise KeyError(MARKER)


def read() -> None:
    try:
        look_up()
    except KeyError as error:
        raise ValueError(f"cannot read {MARKER}") from error


def failure() -> Exception:
    """An exception with a cause, both of which quote a text."""
    with pytest.raises(ValueError, match=MARKER) as caught:
        read()
    return caught.value


def test_json_line_has_the_fields_in_order(stream: io.StringIO) -> None:
    configure("json", "info", stream=stream)
    log_event(logging.getLogger("service.test"), logging.INFO, "request", status=200, code=None, texts=3)
    raw = stream.getvalue()
    assert raw.count("\n") == 1
    line = json.loads(raw)
    assert list(line) == ["ts", "level", "logger", "event", "status", "texts"]
    assert line["level"] == "info"
    assert line["logger"] == "service.test"
    assert line["event"] == "request"
    assert line["status"] == 200
    assert datetime.fromisoformat(line["ts"]).utcoffset() is not None


def test_levels_below_are_left_out(stream: io.StringIO) -> None:
    configure("json", "warning", stream=stream)
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        log_event(logging.getLogger("service.test"), level, "event")
    assert [line["level"] for line in lines(stream)] == ["warning", "error"]


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_an_exception_is_its_type_and_places_and_never_its_message(
    stream: io.StringIO, log_format: LogFormat
) -> None:
    configure(log_format, "info", stream=stream)
    log_event(logging.getLogger("service.test"), logging.ERROR, "defect", exc_info=failure())
    try:
        read()
    except ValueError:
        logging.getLogger("library").exception("it failed")
    written = stream.getvalue()
    assert MARKER not in written
    for expected in ("ValueError", "KeyError", "service/test_logs.py", "look_up"):
        assert written.count(expected) >= 2


def test_the_chain_of_an_exception_is_told(stream: io.StringIO) -> None:
    configure("json", "info", stream=stream)
    log_event(logging.getLogger("service.test"), logging.ERROR, "defect", exc_info=failure())
    error = lines(stream)[0]["error"]
    assert [one["type"] for one in error] == ["ValueError", "KeyError"]
    assert all(one["frames"][0].startswith("service/test_logs.py:") for one in error)


def test_a_chain_that_bites_its_tail_ends(stream: io.StringIO) -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    configure("json", "info", stream=stream)
    log_event(logging.getLogger("service.test"), logging.ERROR, "defect", exc_info=first)
    assert len(lines(stream)[0]["error"]) == 2


def test_a_record_that_cannot_be_written_is_told_without_its_text(
    stream: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("json", "info", stream=stream)
    logging.getLogger("library").info("%d texts", MARKER)
    [line] = lines(stream)
    assert (line["event"], line["level"], line["of"]) == ("log line failed", "error", "library")
    assert line["error"][0]["type"] == "TypeError"
    assert MARKER not in stream.getvalue()
    assert capsys.readouterr().err == "", "standard error may wait"


@pytest.mark.parametrize("value", ["two\nlines", 'a "quoted" word', "\x1b[31m", "", "a b", "\ud800", "x=1"])
def test_one_line_whatever_a_field_holds(value: str) -> None:
    event = Event(0.0, logging.INFO, "service.test", "event", {"value": value})
    for line in (json_line(event).decode(), console_line(event).decode()):
        assert line.endswith("\n")
        assert line[:-1].isprintable()
    assert json.loads(json_line(event))["value"] == value


def test_console_line_is_for_a_person(stream: io.StringIO) -> None:
    configure("console", "info", stream=stream)
    log_event(logging.getLogger("service.test"), logging.INFO, "request", status=200, reason="not yet")
    assert stream.getvalue().split(" ", 1)[1] == 'INFO    request status=200 reason="not yet"\n'


def test_auto_is_console_on_a_terminal_and_json_elsewhere() -> None:
    for stream, is_json in ((Terminal(), False), (io.StringIO(), True)):
        configure("auto", "info", stream=stream)
        log_event(logging.getLogger("service.test"), logging.INFO, "event")
        assert stream.getvalue().startswith("{") is is_json


def test_uvicorn_says_only_what_is_wrong(stream: io.StringIO) -> None:
    configure("json", "info", stream=stream)
    logging.getLogger("uvicorn.error").info("Started server process [%d]", 1)
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.\n")
    assert [line["event"] for line in lines(stream)] == ["Invalid HTTP request received."]


def test_configured_twice_writes_once(stream: io.StringIO) -> None:
    configure("json", "info", stream=io.StringIO())
    configure("json", "info", stream=stream)
    log_event(logging.getLogger("service.test"), logging.INFO, "event")
    assert len(lines(stream)) == 1


# Where a line goes.


def test_a_line_is_one_write_and_nothing_waits_in_a_buffer() -> None:
    """Over a socket that keeps the bounds of each write."""
    sending, receiving = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    receiving.setblocking(False)
    with sending, receiving, os.fdopen(sending.fileno(), "w", closefd=False, encoding="utf-8") as stream:
        configure("json", "info", stream=stream)
        log_event(logging.getLogger("service.test"), logging.INFO, "ours", value="é" * 300)
        logging.getLogger("library").info("of a library")
        for expected in ("ours", "of a library"):
            written = receiving.recv(1 << 16)
            assert written.endswith(b"\n")
            assert json.loads(written)["event"] == expected
        with pytest.raises(BlockingIOError):
            receiving.recv(1)


def test_threads_and_libraries_write_whole_lines(tmp_path: Path) -> None:
    def write(number: int) -> None:
        for turn in range(200):
            log_event(logging.getLogger("service.test"), logging.INFO, "ours", number=number, turn=turn)
            logging.getLogger("library").info("theirs %d %d", number, turn)

    with (tmp_path / "log").open("w", encoding="utf-8") as stream:
        configure("json", "info", stream=stream)
        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen = [json.loads(line) for line in (tmp_path / "log").read_text(encoding="utf-8").splitlines()]
    ours = [(line["number"], line["turn"]) for line in seen if line["event"] == "ours"]
    assert sorted(ours) == [(number, turn) for number in range(4) for turn in range(200)]
    assert len({line["event"] for line in seen}) == 801


def test_a_log_goes_on_when_nobody_else_holds_its_stream(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        configure("json", "info", stream=io.TextIOWrapper(file, encoding="utf-8"))
        log_event(logging.getLogger("service.test"), logging.INFO, "event")
        assert json.loads((tmp_path / "log").read_text(encoding="utf-8"))["event"] == "event"


def test_what_was_printed_before_comes_before(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="utf-8") as stream:
        stream.write("printed\n")
        configure("json", "info", stream=stream)
        log_event(logging.getLogger("service.test"), logging.INFO, "event")
        first, second = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert first == "printed"
    assert json.loads(second)["event"] == "event"


def test_json_is_utf_8_and_a_terminal_has_its_own_encoding(tmp_path: Path) -> None:
    read: dict[LogFormat, bytes] = {}
    for log_format in ("json", "console"):
        with (tmp_path / log_format).open("w", encoding="latin-1") as stream:
            configure(log_format, "info", stream=stream)
            log_event(logging.getLogger("service.test"), logging.INFO, "event", value="café")
            read[log_format] = (tmp_path / log_format).read_bytes()
    assert json.loads(read["json"].decode())["value"] == "café"
    assert read["console"].decode("latin-1").endswith("value=café\n")


class Collecting(logging.Handler):
    """Somebody else's handler."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_handlers_of_others_get_a_record(stream: io.StringIO) -> None:
    other = Collecting()
    configure("json", "info", stream=stream)
    logging.getLogger().addHandler(other)
    error = failure()
    log_event(logging.getLogger("service.test"), logging.ERROR, "event", exc_info=error, status=500)
    [record] = other.records
    assert (record.getMessage(), record.levelno, record.name) == ("event", logging.ERROR, "service.test")
    assert record.exc_info == (type(error), error, error.__traceback__)
    assert [line["status"] for line in lines(stream)] == [500]


@pytest.mark.parametrize("ending", ["os._exit(0)", "sys.exit(0)"])
def test_no_line_is_lost_at_the_end(tmp_path: Path, ending: str) -> None:
    program = f"""
import logging, os, sys
from service.logs import configure, log_event
configure("json", "info")
for number in range(3):
    log_event(logging.getLogger("service.test"), logging.INFO, "ours", number=number)
logging.getLogger("library").warning("theirs")
{ending}
"""
    with (tmp_path / "log").open("wb") as stream:
        subprocess.run([sys.executable, "-c", program], stderr=stream, check=True)
    seen = [json.loads(line) for line in (tmp_path / "log").read_bytes().splitlines()]
    assert [line.get("number", line["event"]) for line in seen] == [0, 1, 2, "theirs"]
