"""Host cost of a decode worker's step, by number of sequences."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from baton.commands import Abort
from bench.host_rig import HostRig, draw_spec
from bench.stub_engine import BLOCK_SIZE
from engine.kv.layout import whole_blocks
from engine.kv.lease import BlockLease
from engine.kv.pool import BlockPool
from worker_core.commands import StreamCommand
from worker_core.scheduler import Budget, plan_step
from worker_core.sequence import Stage, WorkerSequence
from worker_core.worker import collect_garbage_less_often

#: Blocks per sequence in measurements of allocation, release and lookup.
NUM_LEASED_BLOCKS = 32


@dataclass(frozen=True, slots=True)
class TierCosts:
    """Microseconds of one core. step, plan: per sequence and step. take, find: per block. open,
    abort: per sequence. expire: per open ticket and step."""

    num_seqs: int
    step_us: float
    plan_us: float
    take_us: float
    find_us: float
    open_us: float
    abort_us: float
    expire_us: float


def measure_tier(num_seqs: int, num_blocks: int, num_steps: int) -> TierCosts:
    """Measure all costs for one number of sequences, in a pool of num_blocks."""
    rig = HostRig(num_seqs, 2 * BLOCK_SIZE, num_blocks)
    collect_garbage_less_often(num_seqs)
    open_s = _seconds(lambda: rig.step(rig.opening))
    rig.step()
    step_s = _typical(rig.step, num_steps)
    aborts = [StreamCommand(0, opening.handle, Abort()) for opening in rig.opening]
    abort_s = _seconds(lambda: rig.step(aborts))
    take_s, find_s = _cache_seconds(rig.pool, num_seqs)
    return TierCosts(
        num_seqs=num_seqs,
        step_us=step_s / num_seqs * 1e6,
        plan_us=_plan_seconds(num_seqs, num_steps) / num_seqs * 1e6,
        take_us=take_s * 1e6,
        find_us=find_s * 1e6,
        open_us=open_s / num_seqs * 1e6,
        abort_us=abort_s / num_seqs * 1e6,
        expire_us=_expire_seconds(rig, num_seqs, num_steps) / num_seqs * 1e6,
    )


def _plan_seconds(num_seqs: int, num_steps: int) -> float:
    """Seconds of the scheduler alone, over decoding sequences that sometimes need a block."""
    pool = BlockPool(4 * num_seqs, whole_blocks(BLOCK_SIZE), secret=bytes(32))
    sequences = []
    for index in range(num_seqs):
        spec = draw_spec(index, BLOCK_SIZE + index % BLOCK_SIZE)
        lease = pool.lease(spec.tenant, spec.token_ids, spec.num_tokens)
        if lease is None:
            raise RuntimeError("the pool is too small")
        num_computed = spec.num_tokens - 1
        sequences.append(WorkerSequence(0, index, spec, lease, Stage.RUNNING, num_computed))
    budget = Budget(2 * num_seqs, num_seqs)
    available = pool.counts().available
    return _typical(lambda: plan_step(sequences, available, budget), num_steps)


def _cache_seconds(pool: BlockPool, num_seqs: int) -> tuple[float, float]:
    """Seconds per block: to allocate and release it, and to find it by its prefix."""
    specs = [draw_spec(-1 - index, NUM_LEASED_BLOCKS * BLOCK_SIZE + 1) for index in range(num_seqs)]
    num_blocks = num_seqs * (NUM_LEASED_BLOCKS + 1)
    leases: list[BlockLease] = []

    def take() -> None:
        for spec in specs:
            lease = pool.lease(b"nobody", (), spec.num_tokens)
            if lease is None:
                raise RuntimeError("the pool is too small")
            leases.append(lease)
        while leases:
            leases.pop().release()

    take_s = _typical(take, 3) / num_blocks
    for spec in specs:
        lease = pool.lease(spec.tenant, spec.token_ids, spec.num_tokens)
        if lease is None:
            raise RuntimeError("the pool is too small")
        with lease:
            lease.index(spec.token_ids, spec.num_tokens)

    def find() -> None:
        for spec in specs:
            pool.num_cached_tokens(spec.tenant, spec.token_ids)

    return take_s, _typical(find, 3) / (num_seqs * NUM_LEASED_BLOCKS)


def _expire_seconds(rig: HostRig, num_tickets: int, num_steps: int) -> float:
    """Seconds with num_tickets open tickets, none expired."""
    for index in range(num_tickets):
        rig.tickets.offer(draw_spec(index, BLOCK_SIZE), (index,), 0, BLOCK_SIZE)
    return _typical(rig.tickets.expire, num_steps)


def _typical(work: Callable[[], object], num_times: int) -> float:
    """Median seconds; robust against a few disturbances."""
    return median(_seconds(work) for _ in range(num_times))


def _seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this thread, nearly independent of other load."""
    begin_s = time.thread_time()
    work()
    return time.thread_time() - begin_s
