"""Lines of one turn of the loop are written together; nothing is lost, late or out of order by it."""

import asyncio
import json
import logging
import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple, TextIO

import pytest

from service.logs import configure, gathered, log_event

logger = logging.getLogger("test")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    kept = root.handlers[:], root.level, logging.getLogger("uvicorn").level
    yield
    root.handlers, level, uvicorn_level = kept
    root.setLevel(level)
    logging.getLogger("uvicorn").setLevel(uvicorn_level)


class Writes(NamedTuple):
    ours: socket.socket
    stream: TextIO

    def begin(self) -> socket.socket:
        """In the test itself: pytest has a handler of its own there, which this removes."""
        configure("json", "info", stream=self.stream)
        return self.ours


@pytest.fixture
def written() -> Iterator[Writes]:
    """Logs go to a socket that keeps writes apart: each is received by itself."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs, os.fdopen(os.dup(theirs.fileno()), "w", encoding="utf-8") as stream:
        ours.settimeout(60)
        yield Writes(ours, stream)


def events(lines: bytes) -> list[str]:
    return [json.loads(line)["event"] for line in lines.splitlines()]


async def test_lines_of_one_turn_are_one_write_at_its_end(written: Writes) -> None:
    writes = written.begin()
    with gathered(asyncio.get_running_loop()):
        for number in range(3):
            log_event(logger, logging.INFO, f"{number}")
        writes.setblocking(False)
        with pytest.raises(BlockingIOError):
            writes.recv(65_536)
        await asyncio.sleep(0)
        assert events(writes.recv(65_536)) == ["0", "1", "2"]
        log_event(logger, logging.INFO, "last")
    assert events(writes.recv(65_536)) == ["last"]
    log_event(logger, logging.INFO, "after")
    assert events(writes.recv(65_536)) == ["after"]


async def test_what_is_urgent_or_from_elsewhere_is_written_at_once_and_in_order(
    written: Writes,
) -> None:
    writes = written.begin()
    with gathered(asyncio.get_running_loop()):
        log_event(logger, logging.INFO, "first")
        logging.getLogger("a library").error("second")
        thread = threading.Thread(target=log_event, args=(logger, logging.INFO, "third"))
        thread.start()
        thread.join()
        assert [events(writes.recv(65_536)) for _ in range(3)] == [["first"], ["second"], ["third"]]


async def test_a_long_turn_is_written_in_pieces_that_a_pipe_takes_whole(written: Writes) -> None:
    writes = written.begin()
    with gathered(asyncio.get_running_loop()):
        for number in range(40):
            log_event(logger, logging.INFO, f"{number}", filler="x" * 200)
        await asyncio.sleep(0)
    told: list[str] = []
    while len(told) < 40:
        piece = writes.recv(65_536)
        assert len(piece) <= select.PIPE_BUF
        told += events(piece)
    assert told == [f"{number}" for number in range(40)]


async def test_gathered_lines_that_nobody_reads_are_counted() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", encoding="utf-8") as stream:
        configure("json", "info", stream=stream)
        with gathered(asyncio.get_running_loop()):
            for number in range(20_000):
                log_event(logger, logging.INFO, f"{number}", filler="x" * 100)
                if number % 100 == 99:
                    await asyncio.sleep(0)
            os.set_blocking(reading, False)
            kept = b""
            with suppress(BlockingIOError):
                while True:
                    kept += os.read(reading, 1 << 20)
            log_event(logger, logging.INFO, "read again")
            await asyncio.sleep(0)
            lost, again = os.read(reading, 1 << 20).splitlines()
    os.close(reading)
    assert 0 < len(events(kept)) < 20_000
    assert json.loads(lost)["lines"] == 20_000 - len(events(kept))
    assert json.loads(again)["event"] == "read again"
