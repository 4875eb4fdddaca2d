"""What a decode worker learns of the prefill tier from the tickets that it gives out."""

from __future__ import annotations

import pytest

from baton.events import LocalPrefill, Offered
from baton.types import KvSource, Sample, Sampling, SequenceSpec
from bench.stub_engine import BLOCK_SIZE, StubEngine
from engine.kv.layout import whole_blocks
from engine.kv.pool import BlockPool
from kv_transfer.ticket import OfferedTicket, TicketCommitted
from tests.support.recording_sender import RecordingSender
from tests.support.sim_tiers import sim_matchers
from worker_core.admission import Admission, CoreLimits
from worker_core.commands import Open
from worker_core.costs import Costs
from worker_core.handoff import Handoffs
from worker_core.itl_budget import KeepPercentile
from worker_core.policy import LocalPrefillPolicy, decode_policy
from worker_core.state import CoreState
from worker_core.swap import no_swap

NUM_TOKENS = 100


class Tickets:
    """Numbers them."""

    num_offered = 0

    def offer(
        self,
        spec: SequenceSpec,
        block_ids: tuple[int, ...],
        num_cached_tokens: int,
        num_tokens: int,
        lease_s: float = 30.0,
        held_start: int = 0,
    ) -> OfferedTicket:
        del spec, block_ids, num_cached_tokens, num_tokens, lease_s, held_start
        self.num_offered += 1
        return OfferedTicket(self.num_offered, b"")

    def abort(self, ticket_id: int, reason: str, message: str) -> None:
        raise NotImplementedError

    def expire(self) -> None:
        raise NotImplementedError

    def release(self, ticket_id: int) -> None:
        del ticket_id


@pytest.mark.parametrize(
    ("first_tokens", "answer"),
    [((Sample(1),), LocalPrefill), ((), Offered)],
    ids=["prefills", "moves"],
)
def test_prompts_that_come_late_from_the_prefill_tier_are_computed_here_from_then_on(
    first_tokens: tuple[Sample, ...], answer: type[object]
) -> None:
    """A sequence that only moves, without first tokens, says nothing of prefills."""
    now_s = 0.0
    engine = StubEngine(num_blocks=200)
    pool = BlockPool(200, whole_blocks(BLOCK_SIZE), secret=bytes(32), enable_prefix_caching=False)
    state = CoreState(engine.spec, pool, no_swap(engine.kv), lambda: now_s)
    costs = Costs(LocalPrefillPolicy(0, 2048, is_pinned=False, gap_rule=KeepPercentile(2.0)), 128)
    for num_tokens in range(1, 10):
        costs.observe_step(0, num_tokens, 1e-3 * num_tokens)
    limits = CoreLimits(max_num_seqs=16, max_num_batched_tokens=2048, max_num_launches=1)
    handoffs = Handoffs(state, RecordingSender())
    admission = Admission(state, Tickets(), limits, costs, sim_matchers(), handoffs)
    policy = decode_policy(costs.policy)

    def open_next(handle: int) -> object:
        spec = SequenceSpec(f"r{handle}", (5,) * NUM_TOKENS, Sampling(), arrival_ns=handle)
        admission.open(Open(0, handle, spec, KvSource.PREFILL), policy)
        return state.take_events()[-1][-1]

    for number in range(1, 9):
        assert isinstance(open_next(number), Offered)
        now_s += 1.0
        admission.on_committed(TicketCommitted(number, NUM_TOKENS, first_tokens, 0.0, 0))
        if number >= 4 and first_tokens:
            break
    assert isinstance(open_next(10), answer)
