"""Heartbeats and pulses between ranks that exchange results from different hosts, beside those with
rank 0: of a network that fails between two of them alone, nobody else would know.

Ranks find each other by the store of rank 0's process. Of two, the one with the higher number
connects, once for a Link and once for a Pulse.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import product

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from baton.errors import StartupError
from engine.ranks.link import LOADED, PEER_SILENT, Link
from engine.ranks.nodes import GREETING_S, Channel, is_same, read_line, send_line
from engine.ranks.pulse import Pulse, start_pulse
from engine.ranks.rank_spec import RankSpec

#: Deadline for the others to be there, in seconds. They have joined their groups before.
_JOIN_S = 60.0
_TOKEN_BYTES = 16
_CHANNELS: tuple[Channel, ...] = ("link", "pulse")


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


@dataclass(frozen=True, slots=True)
class Peers:
    """links: to ranks of other hosts, started. pulses: this rank's connections for its own pulses
    and theirs; pulse: the process that sends its own, None without peers."""

    links: Sequence[Link] = ()
    pulses: Sequence[socket.socket] = ()
    pulse: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End all. Idempotent."""
        for link in self.links:
            link.close()
        if self.pulse is not None:
            self.pulse.kill()
            self.pulse.wait()
        for connection in self.pulses:
            connection.close()


def watch_peers(spec: RankSpec, link: Link) -> Peers:
    """Exchange heartbeats with the ranks of other hosts that this one, not rank 0, exchanges
    results with; rank 0 hears by `link` of one that is silent. Raises StartupError."""
    tensor, context = spec.degrees.groups_of(spec.rank)
    peers = {*tensor, *context, *spec.pipeline} - {0, spec.rank}
    host, port = spec.store
    if not peers or not port:
        return Peers()

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
) -> Peers:
    """Those of the peers that are on other hosts than `host`. on_silent: called with a peer's rank
    and seconds of silence. Raises OSError, RuntimeError."""
    token = secrets.token_hex(_TOKEN_BYTES)
    connections: dict[tuple[int, Channel], socket.socket] = {}
    with socket.create_server((host, 0)) as listener:
        store.set(str(rank), _Address(host, listener.getsockname()[1], token).encode())
        found = {peer: _Address.decode(store.get(str(peer)).decode()) for peer in peers}
        far = {peer: address for peer, address in found.items() if address.host != host}
        wanted = set(product(far, _CHANNELS))
        for peer, channel in wanted:
            if peer < rank:
                connections[peer, channel] = _connect(far[peer], rank, channel)
        deadline = time.monotonic() + _JOIN_S
        while missing := wanted - connections.keys():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                there = sorted(far.keys() - {peer for peer, _ in missing})
                raise TimeoutError(f"of ranks {sorted(far)}, {there} are there")
            listener.settimeout(left_s)
            connection, _ = listener.accept()
            key = _greeted(connection, token)
            if key in missing:
                connections[key] = connection
            else:
                connection.close()
    pulses = {peer: connections[peer, "pulse"] for peer in far}
    links = [
        # A peer that ends has closed its link to rank 0, too.
        Link(
            connections[peer, "link"],
            f"rank {peer}",
            lambda: None,
            partial(on_silent, peer),
            Pulse(pulses[peer]).is_running,
        )
        for peer in far
    ]
    own = tuple(pulses.values())
    pulse = start_pulse(os.getpid(), own) if own else None
    for link in links:
        link.start()
        link.send(LOADED)
    return Peers(links, own, pulse)


def _connect(address: _Address, rank: int, channel: Channel) -> socket.socket:
    connection = socket.create_connection((address.host, address.port), GREETING_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    send_line(connection, {"token": address.token, "rank": str(rank), "channel": channel})
    return connection


def _greeted(connection: socket.socket, token: str) -> tuple[int, Channel] | None:
    """The rank that has connected, and for what; None for a stranger."""
    with suppress(OSError, ValueError, KeyError):
        hello = read_line(connection)
        if is_same(hello["token"], token):
            return int(hello["rank"]), "pulse" if hello["channel"] == "pulse" else "link"
    return None
