"""Scheduling policy by role. A worker that changes its role gets another policy."""

from __future__ import annotations

from dataclasses import dataclass

from baton.types import Tier
from engine.interface import EngineSpec

#: Longest missing tail that a worker with shared prompts computes unasked: it has measured
#: handoffs, but does not see whether prefill workers are idle.
MAX_TAIL_TOKENS = 64

#: Maximum slowdown of a decode step by prompt tokens. ItlBudget learns the lower value that keeps
#: the 99th percentile of inter-token latency.
MAX_ITL_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class LocalPrefillPolicy:
    """When to compute prompts beside decoding sequences.

    default_threshold: maximum missing tokens before the first measurement.
    max_threshold: upper limit of the learned threshold.
    is_pinned: whether the threshold stays at the default.
    max_itl_factor: maximum slowdown of a decode step by a small chunk of a prompt; None for any
    chunk.
    min_chunk_tokens: minimum of a small chunk.
    alone_chunk_tokens: chunk size while nothing decodes, with shared prompts; limited because
    handoffs to this worker wait for the end of a step.
    max_shared_tokens: longest prompt that a gateway may assign here despite available prefill
    workers, if it is computed sooner here.
    """

    default_threshold: int
    max_threshold: int
    is_pinned: bool
    max_itl_factor: float | None
    min_chunk_tokens: int = 8
    alone_chunk_tokens: int = 256
    max_shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """Decisions of a worker.

    prompts_first: a step serves prompts before decoding sequences.
    queues_prompts: a local prompt without room is queued instead of deferred.
    """

    role: Tier
    prompts_first: bool
    queues_prompts: bool
    local_prefill: LocalPrefillPolicy


def learned_local_prefill(spec: EngineSpec) -> LocalPrefillPolicy:
    """Gateways share prompts between the tiers by load. Unasked, the worker computes only short
    missing tails: at most a block until speeds are known."""
    block_size = spec.layout.block_size
    return LocalPrefillPolicy(
        block_size,
        max(block_size, MAX_TAIL_TOKENS),
        is_pinned=False,
        max_itl_factor=MAX_ITL_FACTOR,
        max_shared_tokens=spec.max_model_len,
    )


def pinned_local_prefill(
    num_tokens: int, max_itl_factor: float | None = MAX_ITL_FACTOR
) -> LocalPrefillPolicy:
    """Compute up to `num_tokens` missing tokens here; never more."""
    return LocalPrefillPolicy(
        num_tokens,
        num_tokens,
        is_pinned=True,
        max_itl_factor=max_itl_factor,
        max_shared_tokens=num_tokens,
    )


def prefill_policy() -> Policy:
    """Prompts first, in chunks that limit the delay of sequences that decode here while the decode
    tier is full."""
    local_prefill = pinned_local_prefill(0)
    return Policy(Tier.PREFILL, True, True, local_prefill)


def decode_policy(local_prefill: LocalPrefillPolicy) -> Policy:
    """Decoding sequences first; prompts are computed here where that is cheaper than awaiting
    KV."""
    return Policy(Tier.DECODE, False, False, local_prefill)
