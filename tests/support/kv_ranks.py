"""Two workers of several ranks in one process: each rank has its own pool, sender and receiver."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from baton.types import KvLayout, Sample, Sampling, SequenceSpec, WorkerIdentity
from engine.kv.groups.group import SlotTable
from engine.kv.groups.window import WINDOWED, WindowSlots
from engine.kv.interface import KvPool
from engine.kv.layout import groups_of
from engine.kv.part import KvPart
from engine.kv.range import KvRange
from engine.kv.tensors.array import ArrayKvPool
from engine.kv.tensors.grouped import GroupedKvPool
from engine.kv.tensors.part import pool_part
from engine.ranks.mesh import Degrees, stage_layers
from engine.shard import Shard
from kv_transfer.handshake import ReceiverConfig, SenderConfig
from kv_transfer.kv_secret import KvSecret
from kv_transfer.send_connection import Finish, Send, SendDone
from kv_transfer.sender import Sender
from kv_transfer.ticket import OfferedTicket, OwnerRank, TicketEvent
from kv_transfer.ticket_group import SenderGroup, TicketGroup
from kv_transfer.ticket_table import TicketMint, TicketRules
from kv_transfer.transport.base import TransportConfig
from kv_transfer.transport.connector import make_connector
from kv_transfer.transport.listeners import RunningReceiver, open_receiver
from kv_transfer.transport.loopback import LoopbackHub

MakePool = Callable[[KvLayout, int], Any]
Clock = Callable[[], float]
NUM_BLOCKS = 12
OWNER, PEER = WorkerIdentity("d0", 7), WorkerIdentity("p0", 3)
LEASE_S, OFFER_S = 8.0, 4.0


def parts_of(layout: KvLayout, tensor: int, stages: int) -> tuple[KvPart, ...]:
    """What the ranks of a mesh hold, by rank. Stages share layers with a state as those with KV."""
    states = stage_layers(layout.num_state_layers, stages)
    degrees, layers = Degrees(tensor, stages), stage_layers(layout.num_layers, stages)
    places = map(degrees.place, range(degrees.num_ranks))
    shares = [
        (
            layers[at.stage],
            Shard(at.tensor_rank, tensor).kv_heads(layout.num_kv_heads),
            states[at.stage] or range(0),
        )
        for at in places
    ]
    return tuple(
        KvPart(own.start, len(own), heads.start, len(heads), state.start, len(state))
        for own, heads, state in shares
    )


def grouped_pool(layout: KvLayout, num_blocks: int) -> Any:
    """Windowed layers apart, if there are others; every block has a slot, in another order."""
    if len(groups_of(layout).paged) < 2:
        return ArrayKvPool(layout, num_blocks)
    pool = GroupedKvPool(layout, num_blocks, num_blocks, ArrayKvPool)
    slots = WindowSlots(SlotTable(num_blocks, pool.slot_tables[WINDOWED].of_block))
    for block_id in reversed(range(num_blocks)):
        slots.take(block_id)
    return pool


def held(pool: KvPool, part: KvPart, num_tokens: int, block_ids: Sequence[int]) -> bytes:
    """The bytes of a part of a pool, counted from its first layer and head, that the next token
    needs."""
    of_part = pool_part(pool, part)
    groups, found = of_part.groups, []
    whole = KvRange(0, num_tokens, 0, part.num_layers)
    for piece in groups.kept(whole, groups.kept_start(num_tokens)):
        data = bytearray(piece.num_tokens * piece.num_layers * of_part.layout.token_layer_bytes)
        of_part.pack(block_ids, piece, memoryview(data))
        found.append(bytes(data))
    return b"".join(found)


@dataclass
class Ranks:
    """A sending worker with pools of `sources`, and a receiving one with pools of `targets`.

    source, target: layouts of the whole model. clock: of all; wait_s: for any answer.
    """

    source: KvLayout
    target: KvLayout
    sources: tuple[KvPart, ...]
    targets: tuple[KvPart, ...]
    transport: str = "loopback"
    make_source: MakePool = ArrayKvPool
    make_target: MakePool = ArrayKvPool
    clock: Clock = time.monotonic
    hub: LoopbackHub = field(default_factory=LoopbackHub)
    wire_dtype: str = "auto"
    chunk_bytes: int = 400
    secret: KvSecret | None = None
    wait_s: float = 30.0

    def __post_init__(self) -> None:
        self.events: queue.SimpleQueue[TicketEvent] = queue.SimpleQueue()
        self.dones: queue.SimpleQueue[SendDone] = queue.SimpleQueue()
        self.requests = itertools.count()
        ids = itertools.count(1)
        rules = TicketRules(LEASE_S, OFFER_S, b"s" * 32, lambda: next(ids))
        self.source_pools = [
            self.make_source(part.layout(self.source), NUM_BLOCKS) for part in self.sources
        ]
        self.target_pools = [
            self.make_target(part.layout(self.target), NUM_BLOCKS) for part in self.targets
        ]
        self.receivers = [self._receiver(rank, rules) for rank in range(len(self.targets))]
        owners = tuple(
            OwnerRank(part, running.endpoints)
            for part, running in zip(self.targets, self.receivers, strict=True)
        )
        mint = TicketMint(OWNER, self.target, (), rules, owners)
        tables = [running.tickets for running in self.receivers]
        self.tickets = TicketGroup(mint, tables, self.events.put)
        self.senders = [self._sender(rank) for rank in range(len(self.sources))]
        self.sender = SenderGroup(self.senders, self.dones.put)

    def _receiver(self, rank: int, rules: TicketRules) -> RunningReceiver:
        return open_receiver(
            ReceiverConfig(
                *(OWNER, self.target_pools[rank], 2, 512, self.wire_dtype, self.secret),
                part=self.targets[rank],
            ),
            lambda event: self.tickets.on_rank_event(rank, event),
            self.clock,
            transports=(self.transport,),
            listen=TransportConfig(hub=self.hub, worker_id=f"d0 rank {rank}"),
            rules=rules,
        )

    def _sender(self, rank: int) -> Sender:
        config = SenderConfig(
            *(PEER, self.source_pools[rank], make_connector(self.transport, self.hub), self.clock),
            *(self.wait_s, self.wait_s, 60.0, self.chunk_bytes, self.secret),
            ranks=self.sources,
            rank=rank,
        )
        return Sender(config, self._on_rank_done, is_inline=self.transport == "loopback")

    def _on_rank_done(self, done: SendDone) -> None:
        self.sender.on_rank_done(done)

    def offer(
        self, block_ids: tuple[int, ...], num_cached_tokens: int, num_tokens: int
    ) -> OfferedTicket:
        spec = SequenceSpec(f"r{next(self.requests)}", tuple(range(num_tokens)), Sampling())
        return self.tickets.offer(spec, block_ids, num_cached_tokens, num_tokens)

    def send(self, key: str, block_ids: tuple[int, ...], piece: KvRange, num_tokens: int) -> None:
        start = groups_of(self.source).whole_start(num_tokens)
        self.sender.submit(Send(key, block_ids, piece, whole_start=start))

    def finish(self, key: str, num_tokens: int) -> None:
        self.sender.submit(Finish(key, num_tokens, (Sample(7),), self.clock()))

    def send_all(self, key: str, block_ids: tuple[int, ...], num_tokens: int) -> None:
        whole = KvRange(0, num_tokens, 0, self.source.num_layers)
        self.send(key, block_ids, whole, num_tokens)
        self.finish(key, num_tokens)

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        for running in self.receivers:
            running.close()


def whole_of(ranks: Ranks) -> Ranks:
    """The same two workers with one rank each."""
    return replace(
        ranks,
        sources=(KvPart.whole(ranks.source),),
        targets=(KvPart.whole(ranks.target),),
        hub=LoopbackHub(),
    )


def fill_alike(ranks: Ranks, whole: Ranks, fill: Callable[[Any], None]) -> None:
    """Fill the whole sender's pool, and have the ranks' hold their parts of it."""
    (pool,) = whole.source_pools
    fill(pool)
    blocks = range(NUM_BLOCKS)
    size = ranks.source.block_size
    for part, own in zip(ranks.sources, ranks.source_pools, strict=True):
        of_part = pool_part(pool, part)
        everything = KvRange(0, NUM_BLOCKS * size, 0, part.num_layers)
        data = bytearray(everything.num_bytes(of_part.layout.token_layer_bytes))
        of_part.pack(blocks, everything, memoryview(data))
        own.unpack(blocks, everything, memoryview(data))
