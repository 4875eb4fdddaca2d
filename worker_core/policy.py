"""Scheduling policy by role. A worker that changes its role gets another policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.types import NO_SLO, Role, Slo, Tier
from engine.interface import EngineSpec
from worker_core.gap_rule import GapRule
from worker_core.itl_budget import KeepPercentile
from worker_core.slo_budget import TARGET_SHARE, KeepTarget

#: Longest missing tail that a worker with shared prompts computes unasked: it has measured
#: handoffs, but does not see whether prefill workers are idle.
MAX_TAIL_TOKENS = 64

#: The gap rule of a split without targets.
BALANCED = KeepPercentile()
#: Maximum gap that a prompt makes on a colocated worker without a target, in seconds. Smaller
#: chunks would cost the prompts more decode steps.
COLOCATED_GAP_S = 0.25
#: Minimum of a bounded chunk.
MIN_CHUNK_TOKENS = 8


@dataclass(frozen=True, slots=True)
class LocalPrefillPolicy:
    """When to compute prompts beside decoding sequences.

    default_threshold: maximum missing tokens before the first measurement.
    max_threshold: upper limit of the learned threshold.
    is_pinned: whether the threshold stays at the default.
    gap_rule: bound on the chunks of a prompt beside decoding sequences; None for any chunk.
    min_chunk_tokens: minimum of a bounded chunk.
    alone_chunk_tokens: chunk size while nothing decodes, with shared prompts; limited because
    handoffs to this worker wait for the end of a step.
    max_shared_tokens: longest prompt that a gateway may assign here despite available prefill
    workers, if it is computed sooner here.
    """

    default_threshold: int
    max_threshold: int
    is_pinned: bool
    gap_rule: GapRule | None
    min_chunk_tokens: int = MIN_CHUNK_TOKENS
    alone_chunk_tokens: int = 256
    max_shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """Decisions of a worker.

    prompts_first: a step serves prompts before decoding sequences.
    queues_prompts: a local prompt without room is queued instead of deferred.
    is_colocated: all prompts are computed where their answers are decoded.
    """

    role: Tier
    prompts_first: bool
    queues_prompts: bool
    local_prefill: LocalPrefillPolicy
    is_colocated: bool = False


def gap_rule_of(slo: Slo, otherwise: GapRule) -> GapRule:
    """The rule that keeps the targets. With a target of the first token alone, a gap may be as
    long as that. otherwise: without targets."""
    if slo.tpot_s is not None:
        return KeepTarget.of_tpot(slo.tpot_s)
    return KeepTarget(None, slo.ttft_s) if slo.ttft_s is not None else otherwise


def kept_tpot_s(usual_s: float, slo: Slo | None) -> float:
    """Mean gap that a sequence is to keep. usual_s: that of the rule. slo: of its class."""
    return usual_s if slo is None or slo.tpot_s is None else TARGET_SHARE * slo.tpot_s


def learned_local_prefill(spec: EngineSpec, slo: Slo = NO_SLO) -> LocalPrefillPolicy:
    """Gateways share prompts between the tiers by load. Unasked, the worker computes only short
    missing tails: at most a block until speeds are known."""
    block_size = spec.layout.block_size
    return LocalPrefillPolicy(
        block_size,
        max(block_size, MAX_TAIL_TOKENS),
        is_pinned=False,
        gap_rule=gap_rule_of(slo, BALANCED),
        max_shared_tokens=spec.max_model_len,
    )


def pinned_local_prefill(
    num_tokens: int, gap_rule: GapRule | None = BALANCED
) -> LocalPrefillPolicy:
    """Compute up to `num_tokens` missing tokens here; never more."""
    return LocalPrefillPolicy(
        num_tokens,
        num_tokens,
        is_pinned=True,
        gap_rule=gap_rule,
        max_shared_tokens=num_tokens,
    )


def colocated_prefill(spec: EngineSpec, slo: Slo = NO_SLO) -> LocalPrefillPolicy:
    """Compute all prompts here; no handoff awaits the end of a step."""
    rule = gap_rule_of(slo, KeepTarget(None, COLOCATED_GAP_S))
    return replace(
        pinned_local_prefill(spec.max_model_len, rule), alone_chunk_tokens=spec.max_model_len
    )


def prefill_policy(slo: Slo = NO_SLO) -> Policy:
    """Prompts first, in chunks that limit the delay of sequences that decode here while the decode
    tier is full."""
    local_prefill = pinned_local_prefill(0, gap_rule_of(slo, BALANCED))
    return Policy(Tier.PREFILL, True, True, local_prefill)


def decode_policy(local_prefill: LocalPrefillPolicy) -> Policy:
    """Decoding sequences first; prompts are computed here where that is cheaper than awaiting
    KV."""
    return Policy(Tier.DECODE, False, False, local_prefill)


def colocated_policy(spec: EngineSpec, slo: Slo = NO_SLO) -> Policy:
    """Decoding sequences first; all prompts are computed here."""
    return replace(decode_policy(colocated_prefill(spec, slo)), is_colocated=True)


def policy_of(
    role: Role, spec: EngineSpec, slo: Slo, local_prefill: LocalPrefillPolicy | None = None
) -> Policy:
    """local_prefill: of the decode tier; None: learned."""
    if role.tier is Tier.PREFILL:
        return prefill_policy(slo)
    if role.is_colocated:
        return colocated_policy(spec, slo)
    return decode_policy(local_prefill or learned_local_prefill(spec, slo))
