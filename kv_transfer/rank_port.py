"""The KV port of a rank: its tickets, endpoints and sender, over its own pool. A worker with a
single rank has one."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from baton.kv_transports import listened_on
from baton.rpc.tls import TlsFiles
from baton.types import ANY_NUMERICS, NumericsRule, WorkerIdentity
from engine.kv.interface import KvPool
from engine.kv.part import KvPart
from kv_transfer.device_memory import OnDeviceLost, device_memory_of
from kv_transfer.handshake import ReceiverConfig, SenderConfig
from kv_transfer.kv_secret import KvSecret
from kv_transfer.send_connection import SendDone
from kv_transfer.sender import Sender
from kv_transfer.ticket import TicketEvent
from kv_transfer.ticket_table import TicketRules
from kv_transfer.transport.base import TransportConfig
from kv_transfer.transport.connector import make_connector
from kv_transfer.transport.listeners import open_receiver


@dataclass(frozen=True, slots=True)
class PortConfig:
    """Settings of a KV port; equal for all ranks of a worker except `rank`.

    ranks: parts of the model that the ranks hold; empty if there is one rank.
    transport: --kv-transport. host, port, advertise_address, tls, peer_names: see TransportConfig.
    wire_dtype, numerics: see ReceiverConfig. num_connections: see Sender.
    kv_secret_key: see KvSecret.key; empty without a secret. lease_s, offer_s, ticket_secret: see
    TicketRules. Both secrets in hexadecimal digits.
    """

    identity: WorkerIdentity
    ranks: tuple[KvPart, ...] = ()
    rank: int = 0
    transport: str = "auto"
    host: str = "127.0.0.1"
    port: int = 0
    advertise_address: str = ""
    tls: TlsFiles | None = None
    peer_names: tuple[str, ...] = ()
    wire_dtype: str = "auto"
    numerics: NumericsRule = ANY_NUMERICS
    num_connections: int = 1
    kv_secret_key: str = field(default="", repr=False)
    lease_s: float = 30.0
    offer_s: float = 10.0
    ticket_secret: str = field(default="", repr=False)

    @property
    def part(self) -> KvPart | None:
        """What the rank holds; None for all."""
        return self.ranks[self.rank] if self.ranks else None

    @property
    def rules(self) -> TicketRules:
        return TicketRules(self.lease_s, self.offer_s, bytes.fromhex(self.ticket_secret))

    @property
    def kv_secret(self) -> KvSecret | None:
        key = bytes.fromhex(self.kv_secret_key)
        return KvSecret.of_key(key) if key else None


class RankPort:
    """See PortConfig. Thread-safe; `close` waits for the end of connections and threads."""

    def __init__(
        self,
        config: PortConfig,
        pool: KvPool,
        on_ticket: Callable[[TicketEvent], None],
        on_sent: Callable[[SendDone], None],
        on_device_lost: OnDeviceLost,
    ) -> None:
        """pool: with the layout of the rank's part. Raises ConfigError."""
        memory = device_memory_of(pool)
        self.transports = listened_on(config.transport, has_device=memory is not None)
        with ExitStack() as undo:
            receiver = open_receiver(
                ReceiverConfig(
                    config.identity,
                    pool,
                    wire_dtype=config.wire_dtype,
                    secret=config.kv_secret,
                    rule=config.numerics,
                    on_device_lost=on_device_lost,
                    part=config.part,
                ),
                on_ticket,
                time.monotonic,
                transports=self.transports,
                listen=TransportConfig(
                    host=config.host,
                    port=config.port,
                    advertise_address=config.advertise_address,
                    tls=config.tls,
                    peer_names=config.peer_names,
                ),
                rules=config.rules,
            )
            undo.callback(receiver.close)
            connect = make_connector(
                config.transport, tls=config.tls, peer_names=config.peer_names, memory=memory
            )
            self.sender = Sender(
                SenderConfig(
                    config.identity,
                    pool,
                    connect,
                    time.monotonic,
                    secret=config.kv_secret,
                    rule=config.numerics,
                    on_device_lost=on_device_lost,
                    ranks=config.ranks,
                    rank=config.rank,
                ),
                on_sent,
                num_connections=config.num_connections,
            )
            undo.callback(self.sender.close)
            self.tickets, self.endpoints = receiver.tickets, receiver.endpoints
            self._closing = undo.pop_all()

    def close(self) -> None:
        self._closing.close()
