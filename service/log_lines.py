"""What a line of the log looks like: as JSON, or for a person.

An exception is written as its type and the places it came through, without its message, since a message may
quote what it could not handle. Knows nothing of loggers or of where a line goes.
"""

import json
import logging
import traceback
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import orjson

_FIELDS = "fields"
_FOLDERS_SHOWN = 2


class Event(NamedTuple):
    """What one line tells. `created_s` is the time since the epoch; a field that is None is left out."""

    created_s: float
    level: int
    logger: str
    text: str
    fields: dict[str, object]
    error: BaseException | None = None


def event_of(record: logging.LogRecord) -> Event:
    """What a record of logging tells, with the fields that `record_of` gave it."""
    return Event(
        record.created,
        record.levelno,
        record.name,
        record.getMessage(),
        getattr(record, _FIELDS, {}),
        record.exc_info[1] if record.exc_info else None,
    )


def record_of(event: Event) -> logging.LogRecord:
    """The same for handlers of others, which know records alone."""
    record = logging.LogRecord(event.logger, event.level, "", 0, event.text, None, None)
    if event.error is not None:
        record.exc_info = (type(event.error), event.error, event.error.__traceback__)
    setattr(record, _FIELDS, event.fields)
    return record


def json_line(event: Event) -> bytes:
    """One JSON object, in UTF-8, and a line feed: ts, level, logger, event, then the fields of the event."""
    line: dict[str, object] = {
        "ts": datetime.fromtimestamp(event.created_s, UTC),
        "level": logging.getLevelName(event.level).lower(),
        "logger": event.logger,
        "event": event.text.strip(),
        **{name: value for name, value in event.fields.items() if value is not None},
    }
    if event.error is not None:
        line["error"] = _describe(event.error)
    return _json(line, orjson.OPT_UTC_Z | orjson.OPT_APPEND_NEWLINE)


def console_line(event: Event) -> bytes:
    """For a person: time, level, event, then name=value; the places of an exception on lines of their own."""
    time_of_day = datetime.fromtimestamp(event.created_s, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
    parts = [time_of_day, f"{logging.getLevelName(event.level):<7}", _one_line(event.text.strip())]
    parts += [f"{name}={_one_word(value)}" for name, value in event.fields.items() if value is not None]
    if event.error is not None:
        parts += [f"\n    {one['type']} at {' < '.join(one['frames'])}" for one in _describe(event.error)]
    return f"{' '.join(parts)}\n".encode(errors="backslashreplace")


def _json(value: object, option: int = 0) -> bytes:
    try:
        return orjson.dumps(value, default=str, option=option)
    except TypeError:
        # A lone surrogate, as in a file name that is not UTF-8: orjson refuses it, json escapes it.
        end = "\n" if option & orjson.OPT_APPEND_NEWLINE else ""
        return (json.dumps(value, default=str) + end).encode()


def _one_line(text: str) -> str:
    return text if text.isprintable() else _json(text).decode()


def _one_word(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and text and not any(character in text for character in ' "=')
    return text if plain else _json(text).decode()


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
