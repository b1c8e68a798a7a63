"""Structured logs: one event a line, through the standard library's logging.

Never holds a user's text: `log_lines` leaves it out. Knows nothing of requests or settings.

The standard library is enough: the libraries below us log through it anyway. Our own events go past its
records and its tree of loggers straight to the one handler that writes, and share its lock with the others.
"""

import asyncio
import contextlib
import logging
import select
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Literal, TextIO

from service.log_files import Outlet, may_wait, past_buffers, through
from service.log_lines import Event, console_line, event_of, json_line, record_of

LogFormat = Literal["auto", "console", "json"]


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
    handler = LossyHandler(stream, log_format) if may_wait(stream) else LineHandler(stream, log_format)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # What no line shows need not be found out for each: the thread, the process, the place of the call.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # Its start and stop lines say what ours say better; its warnings are wanted.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))


def log_event(
    logger: logging.Logger,
    level: int,
    event: str,
    /,
    exc_info: BaseException | None = None,
    **fields: object,
) -> None:
    """Write one event, with an exception if there is one. A field that is None is left out.

    It goes straight to the handler that `configure` set. Where somebody else has set handlers, it becomes a
    record for them, as any other.
    """
    if not logger.isEnabledFor(level):
        return
    told = Event(time.time(), level, logger.name, event, fields, exc_info)
    handlers = logging.root.handlers
    if len(handlers) == 1 and isinstance(handlers[0], LineHandler):
        handlers[0].tell(told)
    else:
        logger.handle(record_of(told))


@contextlib.contextmanager
def gathered(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """As long as it lasts, the lines of one turn of the loop are written together, at its end.

    A write wakes the reader, and costs as much as all else that a line takes. Warnings and worse are written
    at once, and so is all that other threads say. What is written to standard error without a logger does not
    wait for a reader either, from here to the end of the process: see `Outlet.become_standard_error`.
    """
    handlers = [one for one in logging.root.handlers if isinstance(one, LineHandler)]
    for handler in handlers:
        handler.gather(loop)
    try:
        yield
    finally:
        for handler in handlers:
            handler.gather(None)


class LineHandler(logging.Handler):
    """Writes each event as a line of its own: a whole line in one write, several of one turn in one."""

    def __init__(self, stream: TextIO | None, log_format: Literal["console", "json"]) -> None:
        super().__init__()
        self._stream = stream  # kept: a stream that nobody holds closes the file below it
        self._line_of = console_line if log_format == "console" else json_line
        # A person's terminal has an encoding; JSON is UTF-8.
        self._write = through(stream) if log_format == "console" else past_buffers(stream)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._gathered: list[bytes] = []

    def gather(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Called on this loop, or with None when it is about to end: see `gathered`."""
        self.flush()
        self._loop, self._thread = loop, threading.get_ident()

    def flush(self) -> None:
        """Write what was gathered."""
        with self.lock or contextlib.nullcontext():
            lines, self._gathered = self._gathered, []
            try:
                for piece in _pieces(lines):
                    self.write(piece)
            except Exception:  # noqa: BLE001
                self.handleError(record_of(Event(time.time(), logging.INFO, __name__, "lines", {})))

    def write(self, lines: Sequence[bytes]) -> None:
        """Write lines, of which there is more than one only if they are short, under the lock."""
        self._write(b"".join(lines))

    def tell(self, event: Event) -> None:
        """Write an event that has no record. Like `handle`, it takes the lock and never raises."""
        self.acquire()
        try:
            if self._loop is not None and self._is_patient(event):
                if not self._gathered:
                    self._loop.call_soon(self.flush)
                self._gathered.append(self._line_of(event))
            else:
                self.put(event)
        except Exception:  # noqa: BLE001 - a log that cannot be written is no reason to fail
            self.handleError(record_of(event))
        finally:
            self.release()

    def emit(self, record: logging.LogRecord) -> None:
        """Write the event of a record: a library's, or one that somebody else's handlers see, too."""
        try:
            self.put(event_of(record))
        except Exception:  # noqa: BLE001
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Tell it in the log. On standard error, as is usual, it would quote a text, and may wait."""
        fields: dict[str, object] = {"of": record.name}
        with contextlib.suppress(Exception):
            told = Event(time.time(), logging.ERROR, __name__, "log line failed", fields, sys.exception())
            self.write([self._line_of(told)])

    def _is_patient(self, event: Event) -> bool:
        return event.level < logging.WARNING and threading.get_ident() == self._thread

    def put(self, event: Event) -> None:
        """Write an event, behind those that were gathered, under the lock."""
        if self._gathered:
            self.flush()
        self.write([self._line_of(event)])


class LossyHandler(LineHandler):
    """Leaves a line out rather than wait for a reader that has stopped: of a terminal, a pipe or a socket.

    The loop itself writes the log: without this, a full pipe or Ctrl-S would hold every request, health and
    SIGTERM. When it is read again, a line that was cut is finished, and another says how many were lost.
    """

    def __init__(self, stream: TextIO, log_format: Literal["console", "json"]) -> None:
        super().__init__(stream, log_format)
        if log_format == "console":
            self._line_of = lambda event: (
                console_line(event).decode().encode(stream.encoding, "backslashreplace")
            )
        self._outlet = Outlet(stream.fileno())
        self._lost = 0
        self._rest = b""

    def gather(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """As its base; and what else is written to standard error must not hold the loop either."""
        super().gather(loop)
        if loop is not None:
            self._outlet.become_standard_error()

    def close(self) -> None:
        """Nothing is written after this."""
        super().close()
        self._outlet.close()

    def put(self, event: Event) -> None:
        """Write an event, an exception by its type alone if its places are too long to be taken whole."""
        line = self._line_of(event)
        # A pipe that can be written takes this many bytes without waiting; only a long trace has more.
        if len(line) > select.PIPE_BUF and event.error is not None:
            fields = {**event.fields, "error": type(event.error).__qualname__}
            event = event._replace(fields=fields, error=None)
        super().put(event)

    def write(self, lines: Sequence[bytes]) -> None:
        """Write lines if there is room, and first, if any were lost, how many."""
        if self._lost:
            fields: dict[str, object] = {"lines": self._lost}
            told = Event(time.time(), logging.WARNING, __name__, "log lines lost", fields)
            if self._has_taken(self._line_of(told)):
                self._lost = 0
        if self._lost or not self._has_taken(b"".join(lines)):
            self._lost += len(lines)

    def _has_taken(self, line: bytes) -> bool:
        """Whether it is written, or begun: the rest of it goes before all else."""
        try:
            if self._rest:
                self._rest = self._rest[self._outlet.send(self._rest) :]
            if self._rest:
                return False
            self._rest = line[self._outlet.send(line) :]
        except BlockingIOError:
            return False
        return True


def _pieces(lines: Sequence[bytes]) -> Iterator[list[bytes]]:
    """The lines in runs that a pipe takes whole, as long as a single one is no longer than that."""
    piece: list[bytes] = []
    size = 0
    for line in lines:
        if piece and size + len(line) > select.PIPE_BUF:
            yield piece
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    if piece:
        yield piece
