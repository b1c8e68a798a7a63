"""B. Clients that go away: what they leave behind."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.reliability.gates import hold, in_flight, predict
from tests.reliability.wire import connect, hang_up, request, to_the_end
from tests.server import SAFETY_S, eventually, local_server
from tests.service.stand_ins import Opener

THREE = b'{"inputs": ["loved", "sad film", "an outstanding movie"]}'


def test_the_rest_of_a_request_that_has_begun_is_not_run(store: Path, pool: ThreadPoolExecutor) -> None:
    """One text of three is in the engine when the client goes: the other two never get there."""
    opener = Opener()
    with (
        local_server(open_engine=opener, model_store=store, lanes=1, max_batch_items=1) as server,
        server.client() as client,
    ):
        opener.engine.gate.clear()
        calls = len(opener.engine.calls)
        connection = connect(server.address)
        connection.sendall(request(THREE))
        eventually(lambda: len(opener.engine.calls) == calls + 1, "the first text runs")
        neighbour = pool.submit(predict, client)
        eventually(lambda: in_flight(server) == 2, "both are in flight")
        hang_up([connection])
        eventually(lambda: in_flight(server) == 1, "the client is missed")
        opener.engine.gate.set()
        assert neighbour.result(SAFETY_S).status_code == 200
        assert len(opener.engine.calls) == calls + 2, "the first text, and the neighbour's"
        assert b"valence_queue_items 0.0" in client.get("/metrics").content
        assert server.metric("valence_refusals_total", reason="client_gone") == 1


def test_a_client_that_closes_its_side_is_gone(store: Path, pool: ThreadPoolExecutor) -> None:
    """TCP does not tell "I have said all" from "I have left": such a request is given up and counted."""
    opener = Opener()
    with (
        local_server(open_engine=opener, model_store=store, lanes=1) as server,
        server.client() as client,
    ):
        held = hold(opener, client, pool)
        with connect(server.address) as connection:
            connection.sendall(request())
            eventually(lambda: in_flight(server) == 2, "both are in flight")
            connection.shutdown(socket.SHUT_WR)
            assert to_the_end(connection) == b""
        eventually(lambda: in_flight(server) == 1, "the client is missed")
        opener.engine.gate.set()
        assert held.result(SAFETY_S).status_code == 200


@pytest.mark.parametrize("head", [b"content-length: 100", b"transfer-encoding: chunked"])
def test_r14_half_a_body_and_a_reset_leave_nothing(store: Path, head: bytes) -> None:
    with local_server(model_store=store) as server, server.client() as client:
        connections = [connect(server.address) for _ in range(20)]
        for connection in connections:
            connection.sendall(request(b"", head, length=False) + b"5\r\n{")
        eventually(lambda: in_flight(server) == 20, "the heads were read")
        hang_up(connections)
        eventually(lambda: in_flight(server) == 0, "all are gone")
        assert predict(client).status_code == 200
        gone = server.metric("valence_http_requests_total", route="/predict", status="499")
        assert gone == 20
        assert server.metric("valence_http_requests_total", route="/predict", status="500") == 0
