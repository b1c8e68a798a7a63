"""The files that a log goes to: a plain one, or one whose reader may stop, which is written without waiting.

Knows nothing of events, lines or loggers: it is given bytes.
"""

import contextlib
import fcntl
import io
import os
import select
import socket
import stat
import threading
import weakref
from collections.abc import Callable
from typing import TextIO, TypeGuard

_PIPE_BYTES = 1 << 20  # seconds of a busy log, for a reader that is late
_STANDARD_ERROR = 2
_MEMORY = 1  # the major number of /dev/null, /dev/full and their like, which never wait
_MULTIPLEXER = os.makedev(5, 2)  # /dev/ptmx: who opens it gets another terminal
_END_S = 1.0


def may_wait(stream: TextIO | None) -> TypeGuard[TextIO]:
    """Whether a write may wait for a reader: to a terminal or another device, a pipe or a socket."""
    try:
        file = os.fstat(stream.fileno()) if stream is not None else None
    except (OSError, ValueError):  # a stream in memory has no number
        return False
    if file is None:
        return False
    if stat.S_ISCHR(file.st_mode):
        return os.major(file.st_rdev) != _MEMORY
    return stat.S_ISFIFO(file.st_mode) or stat.S_ISSOCK(file.st_mode)


class Outlet:
    """A file that may wait, written without waiting.

    A terminal or a pipe is opened anew for that: to ask it of the descriptor at hand would ask it for all who
    share it, a shell among them. Where that cannot be (another user's terminal, no /proc), a thread waits in
    our place behind a pipe of its own; a pipe is written when there is room, and a socket is asked each time.
    """

    def __init__(self, shared: int) -> None:
        _enlarge(shared)
        kind = os.fstat(shared).st_mode
        self._shared = shared
        self._relay: threading.Thread | None = None
        self._socket: socket.socket | None = None
        number = _opened_anew(shared)
        self._is_anew = number is not None
        if number is None and stat.S_ISCHR(kind):
            number, self._relay = _relayed(shared)
        self._number = os.dup(shared) if number is None else number
        if stat.S_ISSOCK(kind):
            self._socket = socket.socket(fileno=self._number)
        self._room = select.poll()
        self._room.register(self._number, select.POLLOUT)
        ending = (os.close, self._number) if self._socket is None else (self._socket.close,)
        self._end = weakref.finalize(self, *ending)
        self._end.atexit = False  # logging's own end comes later, and may have something to say

    def send(self, data: bytes) -> int:
        """How many bytes of it went in: all, unless there is little room.

        Raises:
            BlockingIOError: there is no room.
            OSError: nobody will read it any more.
        """
        if not self._room.poll(0):
            raise BlockingIOError
        return self._socket.send(data, socket.MSG_DONTWAIT) if self._socket else os.write(self._number, data)

    def become_standard_error(self) -> None:
        """From here on nobody's writes to standard error wait, if it is this file and could be opened anew.

        Python itself and libraries write there past every logger. Other processes keep what they have.
        """
        if self._is_anew and self._shared == _STANDARD_ERROR:
            os.dup2(self._number, _STANDARD_ERROR)

    def close(self) -> None:
        """The last call; what a thread still has is written, if it is read soon."""
        if self._end.alive:
            self._room.unregister(self._number)
            self._end()
        if self._relay is not None:
            self._relay.join(_END_S)


def through(stream: TextIO | None) -> Callable[[bytes], object]:
    """Writes a line as text, in the encoding of the stream."""

    def write(line: bytes) -> None:
        if stream is not None:
            stream.write(line.decode())
            stream.flush()

    return write


def past_buffers(stream: TextIO | None) -> Callable[[bytes], object]:
    """Writes a line to the file below the stream, where there is one: no encoder, no buffer, no flush."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if stream is None or not isinstance(raw, io.FileIO):
        return through(stream)
    with contextlib.suppress(OSError):
        stream.flush()  # what stands in its buffer was said before
    file, rest = raw, b""

    def write(line: bytes) -> None:
        nonlocal rest
        # A disk that is full takes a part of a line: what is left of it goes before all else.
        begun, line = len(rest), rest + line
        sent = 0
        try:
            while sent < len(line):
                written = file.write(line[sent:])
                if written is None:
                    raise BlockingIOError("no room for the line")
                sent += written
        finally:
            rest = b"" if sent == begun else line[sent : begun if sent < begun else None]

    return write


def _opened_anew(number: int) -> int | None:
    if os.fstat(number).st_rdev == _MULTIPLEXER:
        return None
    try:
        return os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None


def _enlarge(number: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not a pipe, or a system whose pipes have one size
        fcntl.fcntl(number, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _relayed(number: int) -> tuple[int, threading.Thread]:
    """A pipe that does not wait, and the thread that hands on what comes, until the pipe is closed."""
    reading, writing = os.pipe()
    _enlarge(writing)
    os.set_blocking(writing, False)
    target = os.dup(number)

    def hand_on() -> None:
        with contextlib.suppress(OSError):
            while part := os.read(reading, _PIPE_BYTES):
                while part:
                    part = part[os.write(target, part) :]
        os.close(reading)
        os.close(target)

    thread = threading.Thread(target=hand_on, name="log", daemon=True)
    thread.start()
    return writing, thread
