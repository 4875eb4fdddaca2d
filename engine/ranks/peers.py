"""Heartbeats between ranks that exchange results from different hosts, beside those with rank 0: of
a network that fails between two of them alone, nobody else would know.

Ranks find each other by the store of rank 0's process. Of two, the one with the higher number
connects.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from baton.errors import StartupError
from engine.ranks.link import LOADED, PEER_SILENT, Link
from engine.ranks.nodes import GREETING_S, is_same, read_line, send_line
from engine.ranks.rank_spec import RankSpec

#: Deadline for the others to be there, in seconds. They have joined their groups before.
_JOIN_S = 60.0
_TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Address:
    """Where a rank awaits others. token: they send it, with their number."""

    host: str
    port: int
    token: str

    def encode(self) -> str:
        return f"{self.host} {self.port} {self.token}"

    @classmethod
    def decode(cls, text: str) -> _Address:
        host, port, token = text.split()
        return cls(host, int(port), token)


def watch_peers(spec: RankSpec, link: Link) -> list[Link]:
    """Exchange heartbeats with the ranks of other hosts that this one, not rank 0, exchanges
    results with; rank 0 hears by `link` of one that is silent. Raises StartupError."""
    tensor, context = spec.degrees.groups_of(spec.rank)
    peers = {*tensor, *context, *spec.pipeline} - {0, spec.rank}
    host, port = spec.store
    if not peers or not port:
        return []

    def on_silent(peer: int, silent_s: float) -> None:
        with suppress(OSError):  # rank 0 is gone
            link.send(PEER_SILENT, f"hears nothing of rank {peer} for {silent_s:g} s".encode())

    timeout = timedelta(seconds=_JOIN_S)
    try:
        store = PrefixStore("peers", TCPStore(host, port, is_master=False, timeout=timeout))
        return link_to(store, spec.rank, spec.host, peers, on_silent)
    except (RuntimeError, OSError) as error:  # torch raises no narrower type
        raise StartupError(
            f"{spec.name} found no way to ranks {sorted(peers)} within {_JOIN_S:g} s: {error}; let "
            "the hosts of a worker reach each other on all ports"
        ) from error


def link_to(
    store: Store,
    rank: int,
    host: str,
    peers: Iterable[int],
    on_silent: Callable[[int, float], None],
) -> list[Link]:
    """Links, started, to those of the peers that are on other hosts than `host`. on_silent: called
    with a peer's rank and seconds of silence. Raises OSError, RuntimeError."""
    token = secrets.token_hex(_TOKEN_BYTES)
    connections: dict[int, socket.socket] = {}
    with socket.create_server((host, 0)) as listener:
        store.set(str(rank), _Address(host, listener.getsockname()[1], token).encode())
        found = {peer: _Address.decode(store.get(str(peer)).decode()) for peer in peers}
        far = {peer: address for peer, address in found.items() if address.host != host}
        for peer, address in far.items():
            if peer < rank:
                connections[peer] = _connect(address, rank)
        deadline = time.monotonic() + _JOIN_S
        while len(connections) < len(far):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"of ranks {sorted(far)}, {sorted(connections)} are there")
            listener.settimeout(left_s)
            connection, _ = listener.accept()
            peer = _greeted(connection, token)
            if peer in far and peer not in connections:
                connections[peer] = connection
            else:
                connection.close()
    links = [
        # A peer that ends has closed its link to rank 0, too.
        Link(connection, f"rank {peer}", lambda: None, partial(on_silent, peer))
        for peer, connection in connections.items()
    ]
    for link in links:
        link.start()
        link.send(LOADED)
    return links


def _connect(address: _Address, rank: int) -> socket.socket:
    connection = socket.create_connection((address.host, address.port), GREETING_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    send_line(connection, {"token": address.token, "rank": str(rank)})
    return connection


def _greeted(connection: socket.socket, token: str) -> int:
    """The rank that has connected; -1 for a stranger."""
    with suppress(OSError, ValueError, KeyError):
        hello = read_line(connection)
        if is_same(hello["token"], token):
            return int(hello["rank"])
    return -1
