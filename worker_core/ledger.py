"""Which sequence has which blocks of a worker, and what a gateway has forgotten."""

from __future__ import annotations

from baton.cache.ledger import BlockLedger, BlockOwner, take_ledger
from worker_core.commands import Known
from worker_core.sequence import Stage, WorkerSequence
from worker_core.state import CoreState, SequenceGroup


def ledger_of(state: CoreState) -> BlockLedger:
    """All blocks: each lease of each sequence is an owner, and each prefix that is being sent."""
    owners = [
        BlockOwner(
            request_id=group.spec.request_id,
            choice=group.spec.choice,
            stage=group.stage.name.lower(),
            ticket_id=(isinstance(group, WorkerSequence) and group.ticket_id) or 0,
            block_ids=tuple(lease.block_ids),
        )
        for group in state
        for lease in group.leases
    ]
    served = [
        BlockOwner(key, 0, "served_prefix", 0, tuple(lease.block_ids))
        for key, lease in state.served_prefixes.items()
    ]
    return take_ledger(state.pool, (*owners, *served))


def orphans_of(state: CoreState, known: Known) -> list[SequenceGroup]:
    """Sequences of a stream that its gateway does not know, and has not given up either."""
    return [
        group
        for group in state
        if group.stream == known.stream
        and group.stage is not Stage.CLOSING
        and known.handles.isdisjoint(range(group.handle, group.handle + width_of_handles(group)))
    ]


def width_of_handles(group: SequenceGroup) -> int:
    """How many handles a group has, from its own on."""
    return group.spec.num_choices if isinstance(group, WorkerSequence) else group.width
