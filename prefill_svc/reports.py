"""What a prefill worker tells of its prompts as a whole: its load, and who has which blocks."""

from __future__ import annotations

from collections.abc import Collection

from baton.cache.ledger import BlockLedger, BlockOwner, num_orphan_blocks, take_ledger
from baton.cache.pool import BlockPool
from baton.types import WorkerLoad
from prefill_svc.job import PrefillJob, Stage


def ledger_of(pool: BlockPool, jobs: Collection[PrefillJob]) -> BlockLedger:
    """All blocks: each prompt's lease is an owner."""
    return take_ledger(
        pool,
        (
            BlockOwner(
                request_id=job.spec.request_id,
                choice=job.spec.choice,
                stage=job.stage.name.lower(),
                ticket_id=job.borrow_ticket_id or 0,
                block_ids=job.block_ids,
            )
            for job in jobs
            if job.lease
        ),
    )


def load_of(
    pool: BlockPool, jobs: Collection[PrefillJob], num_steps: int, *, is_draining: bool
) -> WorkerLoad:
    waiting = [job for job in jobs if job.stage in (Stage.WAITING, Stage.BORROWING)]
    computing = [job for job in jobs if job.stage is Stage.COMPUTING]
    return WorkerLoad(
        num_steps=num_steps,
        num_running=len(computing),
        num_waiting=len(waiting),
        num_pending_tokens=sum(job.num_missing_tokens for job in (*waiting, *computing)),
        blocks=pool.counts(),
        num_open_tickets=sum(job.has_ticket for job in jobs),
        num_orphan_blocks=num_orphan_blocks(pool, (job.lease for job in jobs if job.lease)),
        is_draining=is_draining,
    )
