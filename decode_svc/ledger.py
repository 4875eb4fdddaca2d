"""Who has which blocks of a decode worker, and what a gateway has forgotten."""

from __future__ import annotations

from baton.cache.ledger import BlockLedger, BlockOwner, take_ledger
from decode_svc.commands import Known
from decode_svc.sequence import DecodeSequence, Stage
from decode_svc.state import DecodeState, Member, width


def ledger_of(state: DecodeState) -> BlockLedger:
    """All blocks: each lease of each member is an owner, and each loan."""
    owners = [
        BlockOwner(
            request_id=member.spec.request_id,
            choice=member.spec.choice,
            stage=member.stage.name.lower(),
            ticket_id=(isinstance(member, DecodeSequence) and member.ticket_id) or 0,
            block_ids=tuple(lease.block_ids),
        )
        for member in state
        for lease in member.leases
    ]
    loans = [
        BlockOwner(key, 0, "lent", 0, tuple(lease.block_ids)) for key, lease in state.loans.items()
    ]
    return take_ledger(state.pool, (*owners, *loans))


def orphans_of(state: DecodeState, known: Known) -> list[Member]:
    """Members of a stream that its gateway does not know, and has not given up either."""
    return [
        member
        for member in state
        if member.stream == known.stream
        and member.stage is not Stage.ABANDONED
        and known.handles.isdisjoint(range(member.handle, member.handle + width(member.spec)))
    ]
