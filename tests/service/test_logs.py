"""One line an event, readable by a program or by a person, and never a user's text."""

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from service.logs import ConsoleFormatter, JsonFormatter, LogFormat, configure, log_event

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


@pytest.mark.parametrize("value", ["two\nlines", 'a "quoted" word', "\x1b[31m", "", "a b", "\ud800", "x=1"])
def test_one_line_whatever_a_field_holds(value: str) -> None:
    for formatter in (JsonFormatter(), ConsoleFormatter()):
        record = logging.LogRecord("service.test", logging.INFO, "", 0, "event", None, None)
        record.fields = {"value": value}
        line = formatter.format(record)
        assert line.isprintable()
        if isinstance(formatter, JsonFormatter):
            assert json.loads(line)["value"] == value


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
