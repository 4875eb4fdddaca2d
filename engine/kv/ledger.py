"""Owners of a worker's KV blocks, to detect leaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.kv.lease import BlockLease
from engine.kv.pool import BlockPool


@dataclass(frozen=True, slots=True)
class BlockOwner:
    """One lease and its use.

    stage: lifecycle state of its sequence or prompt on this worker, lower case. ticket_id: 0 if
    there is no open ticket.
    """

    request_id: str
    choice: int
    stage: str
    ticket_id: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockLedger:
    """All blocks of a pool at one moment. Each is free, cached, owned (by several owners if it is a
    shared prefix), or an orphan."""

    free: tuple[int, ...]
    cached: tuple[int, ...]
    owners: tuple[BlockOwner, ...]
    orphans: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ListBlocks:
    """Command to a tier's core: report the ledger. `reply` is called in the engine loop's
    thread."""

    reply: Callable[[BlockLedger], None]


def take_ledger(pool: BlockPool, owners: Iterable[BlockOwner]) -> BlockLedger:
    """`owners`: all leases that the worker accounts for."""
    known = tuple(owners)
    free, cached = pool.free_block_ids, pool.cached_block_ids
    owned = {block_id for owner in known for block_id in owner.block_ids}
    accounted = owned.union(free, cached)
    orphans = tuple(block_id for block_id in range(pool.num_blocks) if block_id not in accounted)
    return BlockLedger(free, cached, known, orphans)


def num_orphan_blocks(pool: BlockPool, leases: Iterable[BlockLease]) -> int:
    """Leased blocks held by none of `leases`. Fast if all leases of the pool are listed."""
    known = tuple(leases)
    if len(known) == pool.num_leases:
        return 0
    owned = {block_id for lease in known for block_id in lease.held_block_ids}
    return pool.counts().leased - len(owned)
