"""A log that goes to a pipe, a terminal or a socket whose reader is late never waits for him."""

import contextlib
import io
import json
import logging
import os
import pty
import re
import select
import socket
import subprocess
import sys
import threading
import tty
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import pytest

from service.logs import LogFormat, configure, log_event

MARKER = "xyzzy-secret-text"
SAFETY_S = 60

logger = logging.getLogger("service.test")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    kept = root.handlers[:], root.level, logging.getLogger("uvicorn").level
    root.handlers = []
    yield
    root.handlers, level, uvicorn_level = kept
    root.setLevel(level)
    logging.getLogger("uvicorn").setLevel(uvicorn_level)


# A pipe.


@pytest.fixture
def pipe() -> Iterator[tuple[int, io.TextIOWrapper]]:
    """The end to read, which does not wait, and a stream at the other end."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with os.fdopen(writing, "w", encoding="utf-8") as stream:
        yield reading, stream
    os.close(reading)


def fill(stream: io.TextIOWrapper) -> None:
    """Until nothing more goes in."""
    os.set_blocking(stream.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(stream.fileno(), b"x" * 4096)
    os.set_blocking(stream.fileno(), True)


def received(reading: int) -> bytes:
    """All that is there to read."""
    read = bytearray()
    with contextlib.suppress(BlockingIOError):
        while True:
            read += os.read(reading, 1 << 20)
    return bytes(read)


def parsed(read: bytes) -> list[dict[str, Any]]:
    """The lines; what the pipe was filled with is left out."""
    return [json.loads(line) for line in read.lstrip(b"x").splitlines()]


def drain(reading: int) -> list[dict[str, Any]]:
    return parsed(received(reading))


@pytest.mark.parametrize("waits", [True, False], ids=["a pipe that waits", "one that does not"])
def test_lines_that_nobody_reads_are_left_out_and_told(
    pipe: tuple[int, io.TextIOWrapper], waits: bool
) -> None:
    reading, stream = pipe
    configure("json", "info", stream=stream)
    fill(stream)
    os.set_blocking(stream.fileno(), waits)
    log_event(logging.getLogger("service.test"), logging.INFO, "ours")
    logging.getLogger("library").info("theirs")
    assert drain(reading) == []
    log_event(logging.getLogger("service.test"), logging.INFO, "read again", status=200)
    log_event(logging.getLogger("service.test"), logging.INFO, "and on")
    lost, again, on = drain(reading)
    assert (lost["event"], lost["level"], lost["lines"]) == ("log lines lost", "warning", 2)
    assert (again["event"], again["status"]) == ("read again", 200)
    assert on["event"] == "and on"


def test_a_line_that_went_in_half_is_finished_first(
    pipe: tuple[int, io.TextIOWrapper], capsys: pytest.CaptureFixture[str]
) -> None:
    """There was room when the line began, and too little for the whole of it."""
    reading, stream = pipe
    configure("json", "info", stream=stream)
    fill(stream)
    os.read(reading, select.PIPE_BUF)
    long = "y" * 2 * select.PIPE_BUF
    assert in_time(lambda: logging.getLogger("library").info(long))
    log_event(logging.getLogger("service.test"), logging.INFO, "lost")
    read = received(reading)
    log_event(logging.getLogger("service.test"), logging.INFO, "read again")
    read += received(reading)
    assert [(line["event"], line.get("lines")) for line in parsed(read)] == [
        (long, None),
        ("log lines lost", 1),
        ("read again", None),
    ]
    assert capsys.readouterr().err == "", "the log's own failures are not told on a stream that waits"


def test_a_long_trace_is_cut_to_what_a_pipe_takes_at_once(pipe: tuple[int, io.TextIOWrapper]) -> None:
    def fall(depth: int) -> None:
        if depth == 0:
            raise ValueError(MARKER)
        fall(depth - 1)

    reading, stream = pipe
    configure("json", "info", stream=stream)
    with pytest.raises(ValueError, match=MARKER) as caught:
        fall(200)
    log_event(logging.getLogger("service.test"), logging.ERROR, "defect", exc_info=caught.value, status=500)
    [line] = drain(reading)
    assert (line["error"], line["status"]) == ("ValueError", 500)
    assert len(json.dumps(line)) < select.PIPE_BUF


# A terminal, and a socket.


@pytest.fixture
def opened() -> Iterator[Callable[[int], TextIO]]:
    """Opens a stream over a descriptor, and closes it when nobody can be waiting in it any more."""
    with contextlib.ExitStack() as stack:
        yield lambda number: stack.enter_context(os.fdopen(os.dup(number), "w", encoding="utf-8"))


@pytest.fixture
def terminal(opened: Callable[[int], TextIO]) -> Iterator[tuple[int, int]]:
    """The end of a person and that of programs. To close the first frees whoever waits at the second."""
    person, programs = pty.openpty()
    tty.setraw(programs)
    yield person, programs
    os.close(person)
    os.close(programs)


def in_time(act: Callable[[], object]) -> bool:
    """Whether it comes back."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(SAFETY_S)
    return not thread.is_alive()


def say(count: int) -> None:
    for number in range(count):
        log_event(logger, logging.INFO, "ours", number=number)


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_terminal_that_nobody_reads_holds_nobody(
    opened: Callable[[int], TextIO], terminal: tuple[int, int], log_format: LogFormat
) -> None:
    person, programs = terminal
    configure(log_format, "info", stream=opened(programs))
    assert in_time(lambda: say(5_000))
    assert os.get_blocking(programs), "the shell has this descriptor, too"
    os.set_blocking(person, False)
    read = received(person)
    assert in_time(lambda: log_event(logger, logging.WARNING, "read again"))
    read += received(person)
    assert b"read again" in read.splitlines()[-1]
    whole = (
        rb'.*"number":(\d+)}|.*"lines":(\d+)}' if log_format == "json" else rb".* number=(\d+)|.* lines=(\d+)"
    )
    matches = [re.fullmatch(whole, line) for line in read.splitlines()[:-1]]
    found = [match.groups() for match in matches if match is not None]
    assert len(found) == len(matches), "no line is cut"
    kept = [int(number) for number, _ in found if number]
    assert kept == sorted(kept)
    assert sum(int(lost) for _, lost in found if lost) == 5_000 - len(kept) > 0


def test_a_terminal_that_cannot_be_opened_anew_holds_nobody(
    opened: Callable[[int], TextIO], terminal: tuple[int, int]
) -> None:
    """Such as the other side of one: to open it makes another. A thread waits in our place."""
    programs, person = terminal
    read = bytearray()
    over = threading.Event()

    def listen() -> None:
        while b"the end" not in read:
            read.extend(os.read(person, 1 << 16))
        over.set()

    configure("json", "info", stream=opened(programs))
    assert in_time(lambda: say(20_000))
    reader = threading.Thread(target=listen, daemon=True)
    reader.start()
    while not over.wait(0.01):
        log_event(logger, logging.INFO, "the end")
    reader.join(SAFETY_S)
    lines = [json.loads(line) for line in read.splitlines()[: -1 if read[-1:] != b"\n" else None]]
    kept = [line["number"] for line in lines if line["event"] == "ours"]
    lost = [line["lines"] for line in lines if line["event"] == "log lines lost"]
    assert kept == sorted(kept)
    assert sum(lost) >= 20_000 - len(kept) > 0


def test_what_was_handed_on_is_written_before_the_end(terminal: tuple[int, int]) -> None:
    programs, person = terminal
    program = """
import logging
from service.logs import configure, log_event
configure("json", "info")
for number in range(20):
    log_event(logging.getLogger("service.test"), logging.INFO, "ours", number=number)
"""
    subprocess.run([sys.executable, "-c", program], stderr=programs, check=True, timeout=SAFETY_S)
    os.set_blocking(person, False)
    assert [line["number"] for line in drain(person)] == list(range(20))


def test_a_socket_that_nobody_reads_holds_nobody_however_long_the_line(
    opened: Callable[[int], TextIO],
) -> None:
    ours, theirs = socket.socketpair()
    with theirs, ours:
        configure("json", "info", stream=opened(theirs.fileno()))
        assert in_time(lambda: logger.info("y" * (1 << 22)))
        assert in_time(lambda: say(10))
        ours.setblocking(False)
        read = b""
        while b"again" not in read:
            log_event(logger, logging.INFO, "again")
            read += received(ours.fileno())
    long, lost, *_ = parsed(read)
    assert long["event"] == "y" * (1 << 22)
    assert lost["lines"] >= 10


def test_what_is_written_past_every_logger_does_not_wait_either(terminal: tuple[int, int]) -> None:
    """By Python itself, or by a library in C, on a terminal that nobody reads."""
    program = """
import asyncio, logging, os, sys, warnings
from service.logs import configure, gathered, log_event
class Failing:
    def __del__(self): raise ValueError
async def main():
    with gathered(asyncio.get_running_loop()):
        for number in range(2_000):
            log_event(logging.getLogger("service.test"), logging.INFO, "ours", number=number)
            await asyncio.sleep(0)
            warnings.warn(f"{number}")
            Failing()
            try:
                os.write(2, b"a library")
            except BlockingIOError:
                pass
configure("console", "info")
asyncio.run(main())
print("it ends")
sys.stdout.flush()
os._exit(0)
"""
    _, programs = terminal
    ended = subprocess.run(
        [sys.executable, "-c", program], stderr=programs, stdout=subprocess.PIPE, timeout=SAFETY_S, check=True
    )
    assert ended.stdout == b"it ends\n"
    assert os.get_blocking(programs), "the shell has this descriptor, too"


# A file.


def test_a_line_that_a_full_disk_cut_is_finished_when_there_is_room() -> None:
    """A limit on the size of a file stands for the disk: of the line that crosses it, it takes a part."""
    code = """
import os, resource, sys, tempfile
from service.log_files import past_buffers

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

with tempfile.NamedTemporaryFile("w+") as stream:
    write = past_buffers(stream)
    limit(25)
    for number in range(4):
        try:
            write(b"line %d is here\\n" % number)
        except OSError as error:
            print(error.strerror)
    limit(resource.RLIM_INFINITY)
    write(b"line 4 is here\\n")
    print(open(stream.name).read(), end="")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [
        *["File too large"] * 3,
        "line 0 is here",
        "line 1 is here",
        "line 4 is here",
    ]
