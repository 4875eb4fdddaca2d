"""The KV channel of a simulated worker with several ranks."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from baton.types import WorkerIdentity
from engine.kv.part import KvPart
from engine.kv.tensors.part import pool_part
from engine.ranks.mesh import stage_layers
from kv_transfer.handshake import ReceiverConfig, SenderConfig
from kv_transfer.receiver import Receiver
from kv_transfer.sender import SendDone, Sender
from kv_transfer.ticket import OwnerRank, Reservation
from kv_transfer.ticket_group import SenderGroup, TicketGroup
from kv_transfer.ticket_table import TicketMint, TicketRules, TicketTable

if TYPE_CHECKING:
    from tests.support.sim_tiers import SimWorker


class LateTickets:
    """The ticket table of a rank in another process: it acknowledges later. See RankTickets."""

    def __init__(self, table: TicketTable, unacknowledged: list[int]) -> None:
        self._unacknowledged = unacknowledged
        self._put = table.put
        self.abort, self.expire, self.release = table.abort, table.expire, table.release

    def put(self, reservation: Reservation) -> bool:
        self._put(reservation)
        self._unacknowledged.append(reservation.ticket_id)
        return False


class KvOfRanks:
    """The listeners, tickets and senders of a worker's ranks, whose KV lies in the engine's only
    pool. tickets, sender: as one."""

    def __init__(self, worker: SimWorker, identity: WorkerIdentity) -> None:
        layout, num_ranks = worker.engine.spec.layout, worker.shape.num_kv_ranks
        stages = stage_layers(layout.num_layers, num_ranks)
        parts = tuple(
            KvPart(layers.start, len(layers), 0, layout.num_kv_heads) for layers in stages
        )
        ids = random.Random(worker.seed)
        rules = TicketRules(worker.lease_s, math.inf, bytes(32), lambda: ids.getrandbits(64))
        self._listeners = [worker.hub.listen(f"{worker.name}/{rank}") for rank in range(num_ranks)]
        self._unacknowledged: list[int] = []
        tables, self._senders = [], []
        for rank, (part, listener) in enumerate(zip(parts, self._listeners, strict=True)):
            pool = pool_part(worker.engine.kv, part)
            table = TicketTable(
                *(identity, pool.layout, (), rules),
                lambda event, rank=rank: self.tickets.on_rank_event(rank, event),
                worker.clock,
                part=part,
            )
            listener.serve(Receiver(ReceiverConfig(identity, pool, 4, 1 << 16, part=part), table))
            config = SenderConfig(
                *(identity, pool, lambda at, _: worker.hub.connect(at[0].address), worker.clock),
                max_chunk_bytes=256,
                ranks=parts,
                rank=rank,
            )
            self._senders.append(Sender(config, self._on_rank_done, is_inline=True))
            tables.append(LateTickets(table, self._unacknowledged) if rank else table)
        owners = [
            OwnerRank(part, (listener.endpoint,))
            for part, listener in zip(parts, self._listeners, strict=True)
        ]
        mint = TicketMint(identity, layout, (), rules, tuple(owners))
        self.tickets = TicketGroup(mint, tables, worker.submit)
        self.sender = SenderGroup(self._senders, worker.submit)
        self.sender.close = self.close_senders  # type: ignore[attr-defined]

    def _on_rank_done(self, done: SendDone) -> None:
        self.sender.on_rank_done(done)

    def acknowledge(self) -> None:
        """The acknowledgements of the other ranks arrive."""
        while self._unacknowledged:
            self.tickets.on_rank_offered(self._unacknowledged.pop(0))

    def close_senders(self) -> None:
        for sender in self._senders:
            sender.close()

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
