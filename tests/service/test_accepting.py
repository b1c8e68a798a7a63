"""New connections do not wait for as many turns of the loop as there are others before them."""

import socket
import threading
from contextlib import ExitStack
from pathlib import Path

from tests.models import make_version
from tests.server import SAFETY_S, eventually, local_server

CONNECTIONS = 48


def test_many_new_connections_are_taken_in_few_turns(tmp_path: Path) -> None:
    make_version(tmp_path)
    with local_server(model_store=tmp_path) as server, ExitStack() as clients:
        held, go_on = threading.Event(), threading.Event()
        taken: list[int] = []

        def hold() -> None:
            held.set()
            assert go_on.wait(SAFETY_S)
            turn()

        def turn() -> None:
            taken.append(len(server.server.server_state.connections))
            if taken[-1] < CONNECTIONS:
                server.loop.call_soon(turn)

        server.loop.call_soon_threadsafe(hold)
        assert held.wait(SAFETY_S)
        for _ in range(CONNECTIONS):  # the system completes them while the loop stands still
            clients.enter_context(socket.create_connection(server.address))
        go_on.set()
        eventually(lambda: bool(taken) and taken[-1] == CONNECTIONS, "all are taken")
    assert taken[0] == 0
    assert len(taken) <= CONNECTIONS / 4, "one a turn would take as many turns as there are connections"


def test_every_listener_is_closed_at_the_end(tmp_path: Path) -> None:
    make_version(tmp_path)
    with local_server(model_store=tmp_path) as server:
        address = server.address
        socket.create_connection(address).close()
    with socket.socket() as probe:
        assert probe.connect_ex(address) != 0
