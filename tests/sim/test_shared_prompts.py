"""Two tiers that share prompts by load, beside the same workers apart and colocated: at least as
many requests in time as colocated, and gaps between tokens hardly longer than apart."""

from __future__ import annotations

import asyncio
import random

import pytest

from baton.types import KvSource, Tier
from bench.measure import Slo
from bench.plan import poisson
from tests.support.sim_load import Arrival, LoadCluster, Speed, request, run_load
from tests.support.virtual_loop import run_virtual
from worker_core.itl_budget import KeepPercentile
from worker_core.policy import (
    BALANCED,
    LocalPrefillPolicy,
    Policy,
    decode_policy,
    pinned_local_prefill,
    prefill_policy,
)

SPEED = Speed(
    step_s=0.0007, sequence_s=0.0002, token_s=0.00006, host_s=0.001, noise=0.08, noise_s=0.015
)
SLO = Slo(ttft_ms=250.0, tpot_ms=15.0)
SHARED = decode_policy(LocalPrefillPolicy(16, 64, False, BALANCED, max_shared_tokens=8192))
COLOCATED = decode_policy(pinned_local_prefill(8192, None))

#: Tiers and policies: a prefill and a decode worker, or two that do both.
WAYS: dict[str, dict[str, tuple[Tier, Policy]]] = {
    "shared": {"p0": (Tier.PREFILL, prefill_policy()), "d0": (Tier.DECODE, SHARED)},
    "apart": {
        "p0": (Tier.PREFILL, prefill_policy()),
        "d0": (Tier.DECODE, decode_policy(pinned_local_prefill(16, KeepPercentile(2.0)))),
    },
    "colocated": {"d0": (Tier.DECODE, COLOCATED), "d1": (Tier.DECODE, COLOCATED)},
}


def load_of(rate: float, seed: int) -> list[Arrival]:
    """Lengths as in recorded loads: most are short, some very long."""
    rng = random.Random(seed)
    return [
        Arrival(
            due_s,
            min(4000, max(8, int(rng.lognormvariate(0, 0.8) * 700))),
            max(4, int(rng.uniform(0.3, 1.7) * 60)),
        )
        for due_s in poisson(60, rate, rng)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rate", [4.0, pytest.param(8.0, marks=pytest.mark.long)])
def test_more_requests_are_in_time_and_gaps_stay_short(rate: float) -> None:
    shared, apart, colocated = (
        run_load(load_of(rate, 3), SPEED, WAYS[way], SLO)
        for way in ("shared", "apart", "colocated")
    )
    assert shared.num_complete == 60
    assert shared.slo_attainment >= colocated.slo_attainment
    assert shared.slo_attainment >= apart.slo_attainment
    assert shared.itl_ms.p99 <= 1.2 * apart.itl_ms.p99


def test_a_burst_is_shared_by_workers_that_have_measured_nothing_yet() -> None:
    burst = [Arrival(0.0, 2000, 8) for _ in range(4)]
    shared, apart = (run_load(burst, SPEED, WAYS[way], SLO) for way in ("shared", "apart"))
    assert shared.num_complete == apart.num_complete == 4
    assert shared.ttft_ms.max < 0.8 * apart.ttft_ms.max


def test_a_prefill_worker_decodes_on_while_the_decode_tier_is_full_and_hands_off_later() -> None:
    async def main() -> None:
        cluster = LoadCluster(SPEED, WAYS["apart"], max_num_seqs=3)
        await asyncio.sleep(0.5)
        now_s = asyncio.get_running_loop().time()
        outputs = [200, 20, 20, 300, 300, 300]
        records = await asyncio.gather(
            *(request(cluster, n, Arrival(now_s, 64, num)) for n, num in enumerate(outputs))
        )
        assert [record.num_output_tokens for record in records] == outputs
        prefill, decode = cluster.nodes
        assert prefill.opened[KvSource.LOCAL] > 0, "it decoded on"
        assert decode.opened[KvSource.HANDOFF] > 0, "a sequence that ran was handed off"
        assert all(w.num_homed == w.outstanding_tokens == 0 for w in cluster.fleet.workers.values())
        await cluster.close()

    run_virtual(main())
