"""A worker's KV channel: its tickets and its sender, of one rank or of several."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from baton.config import WorkerOptions
from baton.types import NumericsRule, WorkerIdentity
from engine.interface import DeviceLost, Engine
from engine.kv.kv_ranks import KvRanks
from kv_transfer.kv_secret import KvSecret
from kv_transfer.rank_port import PortConfig, RankPort
from kv_transfer.remote_port import RemotePort
from kv_transfer.send_connection import SendDone
from kv_transfer.sender import KvSender
from kv_transfer.ticket import OwnerRank, TicketEvent
from kv_transfer.ticket_group import SenderGroup, TicketGroup, Tickets
from kv_transfer.ticket_table import LateTickets, TicketMint

#: Takes what the channel reports. Called in any thread.
Submit = Callable[[TicketEvent | SendDone | DeviceLost], None]


class KvChannel:
    """tickets, sender: of all ranks. transports: that rank 0 listens on."""

    def __init__(self, config: PortConfig, engine: Engine, submit: Submit) -> None:
        """Opens the ports of all ranks. Raises ConfigError, StartupError."""
        self.tickets: Tickets
        self.sender: KvSender
        self.late_tickets: LateTickets | None = None
        with ExitStack() as undo:
            if ranks := engine.kv_ranks:
                self.transports = self._open_ranks(config, engine, ranks, submit, undo)
            else:
                port = RankPort(config, engine.kv, submit, submit, submit)
                undo.callback(port.close)
                self.tickets = self.late_tickets = port.tickets
                self.sender = port.sender
                self.transports = port.transports
            self._closing = undo.pop_all()

    def close(self) -> None:
        """Blocks until connections and their threads have ended."""
        self._closing.close()

    def _open_ranks(
        self, config: PortConfig, engine: Engine, ranks: KvRanks, submit: Submit, undo: ExitStack
    ) -> tuple[str, ...]:
        """Open a port at each rank. Returns the transports of rank 0."""
        config = replace(config, ranks=ranks.parts)
        port = RankPort(
            *(config, ranks.pool),
            lambda event: tickets.on_rank_event(0, event),
            lambda done: sender.on_rank_done(done),  # noqa: PLW0108, it is made below
            submit,
        )
        undo.callback(port.close)
        others = [
            RemotePort(rank, link, engine.kv, submit, ranks.num_commands)
            for rank, link in enumerate(ranks.links, start=1)
        ]
        endpoints = [port.endpoints]
        for other in others:
            endpoints.append(other.open(config, engine.spec.layout))
            undo.callback(other.close)
        owners = tuple(map(OwnerRank, ranks.parts, endpoints))
        mint = TicketMint(config.identity, engine.spec.layout, (), config.rules, owners)
        tickets = TicketGroup(mint, (port.tickets, *others), submit)
        sender = SenderGroup((port.sender, *others), submit)
        for other in others:
            other.serve(tickets, sender)
        self.tickets, self.sender = tickets, sender
        return port.transports


def port_config(
    options: WorkerOptions,
    identity: WorkerIdentity,
    wire_dtype: str,
    kv_secret: KvSecret | None,
    numerics: NumericsRule,
) -> PortConfig:
    """Settings of a worker's KV ports, with a tickets' secret of this boot."""
    return PortConfig(
        identity=identity,
        transport=options.kv_transport,
        host=options.kv_host,
        port=options.kv_port,
        advertise_address=options.kv_advertise_address or "",
        tls=options.tls,
        peer_names=tuple(options.ssl_peer_names),
        wire_dtype=wire_dtype,
        numerics=numerics,
        num_connections=options.kv_num_lanes,
        kv_secret_key=kv_secret.key.hex() if kv_secret else "",
        lease_s=options.ticket_lease_s,
        offer_s=options.ticket_offer_s,
        ticket_secret=secrets.token_hex(32),
    )
