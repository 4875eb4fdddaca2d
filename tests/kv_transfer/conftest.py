"""Rigs of one sender and one receiver, over any transport, in one process."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from baton.kv_transports import kv_transport
from baton.rpc.tls import TlsFiles
from baton.types import (
    ANY_NUMERICS,
    KvLayout,
    NumericsRule,
    Sample,
    Sampling,
    SequenceSpec,
    WorkerIdentity,
)
from engine.kv.range import KvRange
from engine.kv.tensors.array import ArrayKvPool
from engine.kv.tensors.grouped import GroupedKvPool
from kv_transfer.device_memory import device_memory_of
from kv_transfer.handshake import ReceiverConfig, SenderConfig
from kv_transfer.kv_secret import KvSecret
from kv_transfer.send_connection import Finish, Send
from kv_transfer.sender import SendDone, Sender
from kv_transfer.ticket import OfferedTicket, TicketEvent
from kv_transfer.transport.base import TransportConfig
from kv_transfer.transport.connection import Connector
from kv_transfer.transport.connector import make_connector
from kv_transfer.transport.listeners import RunningReceiver, open_receiver
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.device_double import DeviceArrayPool

#: A wait that ends only when something is broken.
PATIENCE_S = 30.0


def layout_of(block_size: int, **changes: object) -> KvLayout:
    fields: dict[str, object] = {
        "fingerprint": "m",
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_dim": 4,
        "dtype": "int64",
        "block_size": block_size,
    }
    return KvLayout(**(fields | changes))  # type: ignore[arg-type]


@dataclass
class Rig:
    """A receiver `d0` and a sender `p0`; both ends' events arrive in queues."""

    source: ArrayKvPool
    target: ArrayKvPool
    running: RunningReceiver
    sender: Sender
    events: queue.SimpleQueue[TicketEvent]
    dones: queue.SimpleQueue[SendDone]
    hub: LoopbackHub
    num_requests: Iterator[int] = field(default_factory=itertools.count)

    def offer(
        self, block_ids: tuple[int, ...], num_cached_tokens: int, num_tokens: int
    ) -> OfferedTicket:
        spec = SequenceSpec(f"r{next(self.num_requests)}", tuple(range(num_tokens)), Sampling())
        return self.running.tickets.offer(spec, block_ids, num_cached_tokens, num_tokens)

    def event(self) -> TicketEvent:
        return self.events.get(timeout=PATIENCE_S)

    def done(self) -> SendDone:
        return self.dones.get(timeout=PATIENCE_S)

    def send_all(self, key: str, block_ids: tuple[int, ...], num_tokens: int) -> None:
        self.sender.submit(
            Send(key, block_ids, KvRange(0, num_tokens, 0, self.source.layout.num_layers))
        )
        self.sender.submit(Finish(key, num_tokens, (Sample(7),), time.monotonic()))

    def token(self, pool: ArrayKvPool, block_ids: tuple[int, ...], token: int) -> np.ndarray:
        size = pool.layout.block_size
        return pool.data[block_ids[token // size], :, :, :, token % size]

    def close(self) -> None:
        self.sender.close()
        self.running.close()


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    """make_rig(transport, source_block_size=4, target_block_size=3, ...); all is closed at the
    end."""
    rigs: list[Rig] = []

    def make(
        transport: str,
        *,
        source_layout: KvLayout | None = None,
        target_layout: KvLayout | None = None,
        make_source: Callable[[KvLayout, int], Any] | None = None,
        make_target: Callable[[KvLayout, int], Any] | None = None,
        sender_chunk_bytes: int = 400,
        receiver_chunk_bytes: int = 512,
        num_credits: int = 2,
        num_connections: int = 1,
        wire_dtype: str = "auto",
        clock: Callable[[], float] = time.monotonic,
        ack_timeout_s: float = PATIENCE_S,
        connect_timeout_s: float = PATIENCE_S,
        idle_timeout_s: float = 60.0,
        source_secret: KvSecret | None = None,
        target_secret: KvSecret | None = None,
        source_tls: TlsFiles | None = None,
        target_tls: TlsFiles | None = None,
        source_rule: NumericsRule = ANY_NUMERICS,
        target_rule: NumericsRule = ANY_NUMERICS,
        tap: Callable[[Connector], Connector] = lambda connect: connect,
    ) -> Rig:
        make_pool = DeviceArrayPool if kv_transport(transport).needs_device else ArrayKvPool
        source = (make_source or make_pool)(source_layout or layout_of(4), 16)
        target = (make_target or make_pool)(target_layout or layout_of(3), 16)
        rng = np.random.default_rng(0)
        most = 1 << (50 if source.layout.dtype == "int64" else 15)
        for own in (
            (source.in_blocks, source.in_slots) if isinstance(source, GroupedKvPool) else (source,)
        ):
            own.data[...] = rng.integers(1, most, own.data.shape)
        hub = LoopbackHub()
        events: queue.SimpleQueue[TicketEvent] = queue.SimpleQueue()
        dones: queue.SimpleQueue[SendDone] = queue.SimpleQueue()
        running = open_receiver(
            ReceiverConfig(
                WorkerIdentity("d0", 7),
                target,
                num_credits,
                receiver_chunk_bytes,
                wire_dtype,
                target_secret,
                target_rule,
            ),
            events.put,
            clock,
            transports=(transport,),
            listen=TransportConfig(hub=hub, tls=target_tls),
        )
        config = SenderConfig(
            WorkerIdentity("p0", 3),
            source,
            tap(make_connector(transport, hub, tls=source_tls, memory=device_memory_of(source))),
            clock,
            connect_timeout_s,
            ack_timeout_s,
            idle_timeout_s,
            sender_chunk_bytes,
            source_secret,
            source_rule,
        )
        is_inline = transport == "loopback"
        sender = Sender(config, dones.put, num_connections=num_connections, is_inline=is_inline)
        rig = Rig(source, target, running, sender, events, dones, hub)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.close()
