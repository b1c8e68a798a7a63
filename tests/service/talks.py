"""One connection to a server on a loop whose clock the test sets: no timer fires before it is told to."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from uvicorn.server import ServerState

from service.connections import BoundedConfig, BoundedConnection
from tests.server import SAFETY_S

TIMEOUT_S = 1_000.0  # far longer than any test takes
HEAD_LIMIT = 2_000
SMALL_BUFFER_BYTES = 8_192
MAX_CONNECTIONS = 8


class SetLoop(asyncio.SelectorEventLoop):
    """Its clock can be put forward."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s

    async def put_forward(self, by_s: float = TIMEOUT_S + 1) -> None:
        """By more than the timeouts, or so much, and let what is due then happen."""
        self.ahead_s += by_s
        await self.settle()

    async def settle(self) -> None:
        """Let happen what can."""
        for _ in range(10):
            await asyncio.sleep(0)


@dataclass
class Talk:
    """A connection, seen from its client."""

    loop: SetLoop
    client: socket.socket
    state: ServerState
    got: bytes = field(default=b"", repr=False)

    @property
    def unsent_bytes(self) -> int:
        """What the server itself holds back."""
        [served] = self.state.connections
        assert isinstance(served, BoundedConnection)
        return served.transport.get_write_buffer_size()

    async def send(self, data: bytes) -> None:
        await self.loop.sock_sendall(self.client, data)

    async def read(self, until: Callable[[], bool]) -> None:
        while not until():
            part = await self._some()
            assert part, f"hung up on after {len(self.got)} bytes"
            self.got += part

    async def read_to_the_end(self) -> bytes:
        with contextlib.suppress(ConnectionResetError):
            while part := await self._some():
                self.got += part
        return self.got

    async def _some(self) -> bytes:
        return await asyncio.wait_for(self.loop.sock_recv(self.client, SMALL_BUFFER_BYTES), SAFETY_S)


@contextlib.asynccontextmanager
async def talking(app: Any, *, keep_alive_s: int = 10**9) -> AsyncIterator[Talk]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SetLoop)
    config = BoundedConfig(
        app,
        read_timeout_s=TIMEOUT_S,
        max_head_bytes=HEAD_LIMIT,
        max_connections=MAX_CONNECTIONS,
        timeout_keep_alive=keep_alive_s,
        lifespan="off",
        log_config=None,
    )
    config.load()
    state = ServerState()
    with socket.socket() as listener, socket.socket() as client:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER_BYTES)
        listener.bind(("127.0.0.1", 0))
        server = await loop.create_server(
            lambda: BoundedConnection(config=config, server_state=state, app_state={}), sock=listener
        )
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.setblocking(False)
        await loop.sock_connect(client, listener.getsockname())
        try:
            yield Talk(loop, client, state)
        finally:
            for served in list(state.connections):
                assert isinstance(served, BoundedConnection)
                served.transport.abort()
            await loop.settle()
            server.close()
            await server.wait_closed()
            assert not state.connections
            assert not state.tasks


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await test()

    with asyncio.Runner(loop_factory=SetLoop) as runner:
        runner.run(bounded())


def start(size: int) -> dict[str, Any]:
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-length", b"%d" % size)],
    }
