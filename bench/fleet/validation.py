"""Simulated workers beside real cores: the same small load, the same times of steps.

The real ones are those of tests/support/sim_load.py: whole worker cores with tickets and handoffs,
requests driven by the gateway's reducer, under the same virtual clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from baton.types import Slo, StepCosts, Tier
from bench.fleet.cluster import Answer, Cluster, Shape, serve
from bench.fleet.worker import Hardware
from bench.plan import poisson
from engine.plan.trace import TraceEntry
from tests.support.sim_load import TIMED_SPEC, Arrival, Speed, records_of_load
from tests.support.virtual_loop import run_virtual
from worker_core.policy import (
    Policy,
    colocated_policy,
    decode_policy,
    learned_local_prefill,
    prefill_policy,
)

#: Requests before those that are compared, so that workers have measured.
_NUM_BEFORE = 40
_SPEED = Speed(step_s=0.008, sequence_s=0.0002, token_s=0.0002)
SLO = Slo(1.5, 0.04)


@dataclass(frozen=True, slots=True)
class Deviation:
    """Of the simulated mean from the real one, as a share of it."""

    shape: str
    ttft: float
    tpot: float

    @property
    def worst(self) -> float:
        return max(abs(self.ttft), abs(self.tpot))


def deviations(num_requests: int = 200, seed: int = 0) -> list[Deviation]:
    """Of two prefill and two decode workers, and of four colocated ones; 11 requests/s with prompts
    of 256 to 1,024 tokens and answers of 16 to 96."""
    prefill = prefill_policy(SLO)
    decode = decode_policy(learned_local_prefill(TIMED_SPEC, SLO))
    shapes: dict[str, list[Policy]] = {
        "split": [prefill, prefill, decode, decode],
        "colocated": [colocated_policy(TIMED_SPEC, SLO)] * 4,
    }
    rng = Random(seed)
    entries = [
        TraceEntry(due_s, rng.randint(256, 1024), rng.randint(16, 96))
        for due_s in poisson(_NUM_BEFORE + num_requests, 11.0, rng)
    ]
    return [_deviation(name, policies, entries) for name, policies in shapes.items()]


def _deviation(name: str, policies: Sequence[Policy], entries: Sequence[TraceEntry]) -> Deviation:
    real, simulated = _real(policies, entries), _simulated(policies, entries)
    return Deviation(name, *(s / r - 1 for r, s in zip(real, simulated, strict=True)))


def _real(policies: Sequence[Policy], entries: Sequence[TraceEntry]) -> tuple[float, float]:
    arrivals = [Arrival(e.arrival_s, e.num_input_tokens, e.num_output_tokens) for e in entries]
    workers: dict[str, tuple[Tier, Policy]] = {
        f"w{number}:1": (policy.role, policy) for number, policy in enumerate(policies)
    }
    records = records_of_load(arrivals, _SPEED, workers, targets=SLO)[_NUM_BEFORE:]
    ttfts = [record.ttft_ms or 0.0 for record in records]
    tpots = [record.tpot_ms or 0.0 for record in records]
    return fmean(ttfts) / 1e3, fmean(tpots) / 1e3


def _simulated(policies: Sequence[Policy], entries: Sequence[TraceEntry]) -> tuple[float, float]:
    costs = StepCosts(_SPEED.step_s, _SPEED.sequence_s, _SPEED.step_s, _SPEED.token_s)
    hardware = Hardware(
        costs,
        host_s=_SPEED.host_s,
        transfer_s=_SPEED.transfer_s,
        wire_bytes_per_s=float("inf"),
        num_blocks=2048,
        max_num_seqs=64,
    )

    async def main() -> list[Answer]:
        cluster = Cluster(Shape(policies), hardware, SLO, entries[0].block_tokens)
        answers = await serve(cluster, entries)
        await cluster.close()
        return answers

    answers = run_virtual(main())[_NUM_BEFORE:]
    ttft_s = fmean(answer.first_s - answer.due_s for answer in answers)
    return ttft_s, fmean(answer.tpot_s for answer in answers)
