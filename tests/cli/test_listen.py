"""The listening socket, and what accepted ones inherit from it."""

import socket
from pathlib import Path

from router.cli.listening import listen
from router.config.load import Overrides, load

EXAMPLE = Path(__file__).parents[2] / "pools.yaml"


def test_an_accepted_connection_is_given_up_by_the_kernel_where_its_client_is_gone_without_a_word() -> None:
    config = load(EXAMPLE, overrides=Overrides(host="127.0.0.1", port=0))

    with listen(config) as listener:
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            asks = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle_s = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            untaken_ms = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    assert (asks, idle_s, untaken_ms) == (1, 60, 300_000)
