"""Runs the application under uvicorn: listens at once, owns the signals, drains, stops within bounds.

Knows nothing of routes or models; the life of the service says when it is ready or cannot start.
"""

import asyncio
import errno
import gc
import logging
import math
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from service import engines
from service.app import create_app, life_of
from service.connections import RESERVED_CONNECTIONS, BoundedConfig
from service.errors import StartupError
from service.lanes import LANE
from service.life import Life
from service.listing import LISTING
from service.loading import LOADING, OpenEngine
from service.logs import gathered, log_event
from service.metrics import service_version
from service.settings import Settings

EXIT_OK = 0
EXIT_FAILED = 1
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_ABANDON_S = 2.0
_OTHER_FILES = 128
_LEAST_FILES = 50
_ACCEPTED_A_TURN = 16
_BACKLOG = 2048

logger = logging.getLogger(__name__)


def serve(settings: Settings, *, open_engine: OpenEngine = engines.open_engine) -> int:
    """Serve until a signal ends it. Ends the process itself when a lane or the store does not come back.

    Returns:
        The exit code: 0 after a signal, 1 when the service could not start.

    Raises:
        StartupError: the address cannot be listened on, or too few files may be open.
    """
    settings = settings.model_copy(update={"max_connections": allow_connections(settings.max_connections)})
    sockets = listen(settings.host, settings.port)
    url = url_of(sockets[0])
    log_event(logger, logging.INFO, f"listening on {url}", version=service_version())
    app = create_app(settings, open_engine=open_engine)
    server = Server(make_config(app, settings), life_of(app), url=url)
    server.run(sockets)
    log_event(logger, logging.INFO, "stopped", exit_code=server.exit_code)
    if any(thread.name.startswith((LANE, LOADING, LISTING)) for thread in threading.enumerate()):
        # The interpreter's own end would pull the engine away under the call, which aborts the process.
        logging.shutdown()
        os._exit(server.exit_code)
    return server.exit_code


def make_config(app: Any, settings: Settings) -> BoundedConfig:
    """How uvicorn is to serve the application."""
    return BoundedConfig(
        app,
        read_timeout_s=settings.request_timeout_s,
        max_head_bytes=settings.max_head_bytes,
        max_connections=settings.max_connections,
        loop="uvloop",
        ws="none",
        lifespan="on",
        interface="asgi3",
        workers=1,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # neither the client's address nor the scheme is used
        backlog=_BACKLOG,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=math.ceil(settings.stop_timeout_s + _ABANDON_S),
    )


class Server(uvicorn.Server):
    """uvicorn's server, with its start and its end told by the life of the service.

    Attributes:
        exit_code: what the process should end with.
    """

    def __init__(self, config: BoundedConfig, life: Life, *, url: str) -> None:
        super().__init__(config)
        self.exit_code = EXIT_OK
        self._life = life
        self._url = url
        self._drain_timer: asyncio.TimerHandle | None = None
        self._abandoning: asyncio.Task[None] | None = None
        self._listening: list[socket.socket] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """In place of uvicorn's own, which stops at once and ends the process by the signal again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        heard = stop_signals()
        for number in heard:
            loop.add_signal_handler(number, self.ask_to_stop)
        try:
            yield
        finally:
            for number in heard:
                loop.remove_signal_handler(number)
                # What is left takes a moment. The signal itself would end it with a code of its own.
                signal.signal(number, lambda _number, _frame: os._exit(self.exit_code))

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `should_exit`."""
        with gathered(asyncio.get_running_loop()):
            await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve at once; what the life of the service becomes is told later."""
        asyncio.get_running_loop().set_exception_handler(_log_unhandled)
        # uvloop takes one new connection a turn from each listener. With one listener those who come, health
        # checks among them, wait for as many turns as there are connections before them, and turns are long
        # when there is much to do.
        own = sockets or []
        self._listening = [*own, *(one.dup() for one in own for _ in range(_ACCEPTED_A_TURN - 1))]
        await super().startup(self._listening)
        self._life.started.add_done_callback(self._tell_start)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what was accepted, within the stop timeout; what is left then is refused."""
        loop, stop_timeout_s = asyncio.get_running_loop(), self._life.settings.stop_timeout_s
        timers = [
            loop.call_later(stop_timeout_s, self._abandon),
            loop.call_later(stop_timeout_s + _ABANDON_S / 2, self._hang_up),
        ]
        await super().shutdown(self._listening or sockets)
        if self.force_exit:
            # uvicorn leaves both out, and what goes on would end with a trace.
            self._hang_up()
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=_ABANDON_S)
            await self.lifespan.shutdown()
        for timer in timers:
            timer.cancel()

    def ask_to_stop(self) -> None:
        """What a signal does: the first one drains, and each further one cuts short what goes on."""
        if self._abandoning is not None:
            self.force_exit = True
        elif self.should_exit:
            self._abandon()
        elif self._life.is_draining() or not self._life.started.done():
            self._stop()
        else:
            delay_s = self._life.settings.drain_delay_s
            log_event(logger, logging.INFO, "draining", drain_delay_s=delay_s)
            self._life.drain()
            self._drain_timer = asyncio.get_running_loop().call_later(delay_s, self._stop)

    def _stop(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        log_event(logger, logging.INFO, "stopping", stop_timeout_s=self._life.settings.stop_timeout_s)
        self._life.stop_taking()
        self.should_exit = True

    def _abandon(self) -> None:
        if self._abandoning is None:
            self._abandoning = asyncio.get_running_loop().create_task(self._life.abandon())

    def _hang_up(self) -> None:
        """Nothing more is said: what still waits for its client, or for its end, is told that he went."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def _tell_start(self, started: "asyncio.Future[str | None]") -> None:
        if started.cancelled():
            return
        if started.result() is not None:
            self.exit_code = EXIT_FAILED
            self.should_exit = True
            return
        # What is there now stays: the collector need not look through it again and again.
        gc.collect()
        gc.freeze()
        log_event(logger, logging.INFO, f"ready on {self._url}")


def stop_signals() -> list[signal.Signals]:
    """Those that end the service: not the end of the terminal, when `nohup` said to ignore it."""
    return [
        one
        for one in SIGNALS
        if one is not signal.SIGHUP or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    ]


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address of the host, all on one port.

    Raises:
        StartupError: an address is taken, or there is no such host.
    """
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                # Port 0: the later addresses take the port that the first was given.
                sockets.append(_bind(family, address[0], sockets[0].getsockname()[1] if sockets else port))
            except OSError as error:
                # "localhost" names an IPv6 address on machines that have none.
                if error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                    raise
                missing = error
        if not sockets and missing is not None:
            raise missing
        # From here on a connection waits to be taken: whoever reads the address in the log is not refused.
        for one in sockets:
            one.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        for one in sockets:
            one.close()
        reason = error.strerror if isinstance(error, OSError) else "not the name of a host"
        raise StartupError(f"cannot listen on {host}:{port}: {reason}") from error
    return sockets


def _bind(family: int, host: str | int, port: int) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind((host, port))
    except OSError:
        one.close()
        raise
    return one


def url_of(listening: socket.socket) -> str:
    """The address of a listening socket as a URL."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def allow_connections(wanted: int) -> int:
    """Raise the soft limit on open files to what the connections need, as far as the hard one lets us.

    Returns:
        How many connections can be served in full: fewer than wanted where the hard limit is low. Without a
        file for it, a connection would be closed before anybody sees that it asks for health.

    Raises:
        StartupError: there are too few even to listen and to read a model.
    """
    others = RESERVED_CONNECTIONS + _OTHER_FILES
    files = wanted + others
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return wanted
    allowed = files if hard == resource.RLIM_INFINITY else min(files, hard)
    if allowed < _LEAST_FILES:
        raise StartupError(
            f"only {allowed} open files are allowed (ulimit -n); at least {_LEAST_FILES} are needed"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    possible = max(1, allowed - others)
    if allowed < files:
        log_event(
            logger,
            logging.WARNING,
            "few open files are allowed",
            allowed=allowed,
            wanted=files,
            max_connections=possible,
            max_connections_set=wanted,
        )
    return possible


def _log_unhandled(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """asyncio's own handler would write the message of the exception, which may quote a text."""
    log_event(logger, logging.ERROR, "unhandled", what=context["message"], exc_info=context.get("exception"))
