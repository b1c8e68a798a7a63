"""Structured logs: one event a line, as JSON or for a terminal, through the standard library's logging.

Never holds a user's text: an exception is written as its type and the places it came through, without its
message, since a message may quote what it could not handle. Knows nothing of requests or settings.

The standard library is enough: the libraries below us log through it anyway, and a formatter of our own costs
less a line than structlog's chain.
"""

import contextlib
import fcntl
import json
import logging
import os
import select
import stat
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO, TypeGuard

import orjson

LogFormat = Literal["auto", "console", "json"]

_FIELDS = "fields"
_FOLDERS_SHOWN = 2
_PIPE_BYTES = 1 << 20  # seconds of a busy log, for a reader that is late


def configure(log_format: LogFormat, level: str, *, stream: TextIO | None = None) -> None:
    """Send every log of the process to `stream` (standard error when None), in one format.

    Args:
        log_format: "auto" takes console on a terminal, else JSON.
        level: the least level that is written: debug, info, warning or error.
        stream: where the lines go; standard output is left to the answers of commands.
    """
    stream = sys.stderr if stream is None else stream
    if log_format == "auto":
        # Python has no standard error when it was closed before the start.
        log_format = "console" if stream is not None and stream.isatty() else "json"
    handler = PipeHandler(stream) if _is_pipe(stream) else logging.StreamHandler(stream)
    handler.setFormatter(ConsoleFormatter() if log_format == "console" else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # What no line shows need not be found out for each: the thread, the process, the place of the call.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # Its start and stop lines say what ours say better; its warnings are wanted.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))


class PipeHandler(logging.StreamHandler[TextIO]):
    """Writes to a pipe or a socket, and leaves a line out rather than wait for a reader that has stopped.

    The loop itself writes the log: without this, a full pipe would hold every request, health and SIGTERM.
    When it is read again, one line says how many were lost.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        with contextlib.suppress(OSError):  # a socket has another size, which is ample
            fcntl.fcntl(stream.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._lost = 0
        self._room = select.poll()
        self._room.register(stream.fileno(), select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        if self._lost and self._room.poll(0):
            told = logging.LogRecord(__name__, logging.WARNING, "", 0, "log lines lost", None, None)
            setattr(told, _FIELDS, {"lines": self._lost})
            self._lost = 0
            super().emit(told)
        if self._room.poll(0):
            super().emit(record)
        else:
            self._lost += 1

    def format(self, record: logging.LogRecord) -> str:
        """A pipe that can be written takes this many bytes without waiting; only a long trace has more."""
        line = super().format(record)
        error = _error_of(record)
        if len(line) < select.PIPE_BUF or error is None:
            return line
        record.exc_info = None
        setattr(record, _FIELDS, {**_fields_of(record), "error": type(error).__qualname__})
        return super().format(record)


def _is_pipe(stream: TextIO | None) -> TypeGuard[TextIO]:
    try:
        mode = os.fstat(stream.fileno()).st_mode if stream is not None else 0
    except (OSError, ValueError):  # a stream in memory has no number
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def log_event(
    logger: logging.Logger,
    level: int,
    event: str,
    /,
    exc_info: BaseException | None = None,
    **fields: object,
) -> None:
    """Write one event, with an exception if there is one. A field that is None is left out."""
    if not logger.isEnabledFor(level):
        return
    # Past `Logger.log`, which looks for the place of the call: no line shows it.
    record = logging.LogRecord(logger.name, level, "", 0, event, None, None)
    if exc_info is not None:
        record.exc_info = (type(exc_info), exc_info, exc_info.__traceback__)
    setattr(record, _FIELDS, fields)
    logger.handle(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts, level, logger, event, then the fields of the event."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage().strip(),
            **_fields_of(record),
        }
        error = _error_of(record)
        if error is not None:
            line["error"] = _describe(error)
        return _json(line)


class ConsoleFormatter(logging.Formatter):
    """For a person: time, level, event, then name=value; the places of an exception on lines of their own."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
        parts = [time, f"{record.levelname:<7}", _one_line(record.getMessage().strip())]
        parts += [f"{name}={_one_word(value)}" for name, value in _fields_of(record).items()]
        error = _error_of(record)
        if error is not None:
            parts += [f"\n    {one['type']} at {' < '.join(one['frames'])}" for one in _describe(error)]
        return " ".join(parts)


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, _FIELDS, {})
    return {name: value for name, value in fields.items() if value is not None}


def _json(value: object) -> str:
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_UTC_Z).decode()
    except (
        TypeError
    ):  # a lone surrogate, as in a file name that is not UTF-8: orjson refuses it, json escapes it
        return json.dumps(value, default=str)


def _one_line(text: str) -> str:
    return text if text.isprintable() else _json(text)


def _one_word(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and text and not any(character in text for character in ' "=')
    return text if plain else _json(text)


def _error_of(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if record.exc_info else None


def _describe(error: BaseException) -> list[dict[str, Any]]:
    """The exception and what it was raised from: the type and the places of each, and no message."""
    chain: list[dict[str, Any]] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        chain.append({"type": type(current).__qualname__, "frames": _frames(current.__traceback__)})
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return chain


def _frames(tb: TracebackType | None) -> list[str]:
    """The places, the innermost first."""
    places = traceback.StackSummary.extract(traceback.walk_tb(tb), lookup_lines=False)
    return [
        f"{'/'.join(Path(place.filename).parts[-_FOLDERS_SHOWN:])}:{place.lineno} {place.name}"
        for place in reversed(places)
    ]
