"""What a worker's role means to its core. A worker may change its role while it runs: it gets
another policy."""

from __future__ import annotations

from dataclasses import dataclass

from baton.types import Tier
from engine.interface import EngineSpec

#: Longest missing tail that a worker that shares prompts computes without being asked to: it knows
#: what a handoff takes, but not whether prefill workers idle.
MAX_TAIL_TOKENS = 64

#: Maximum slowdown of a decode step caused by prompt tokens beside it; ItlBudget learns how much
#: less keeps the 99th percentile of inter-token latency.
MAX_ITL_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class LocalPrefillPolicy:
    """When a worker computes prompts beside the sequences that decode.

    default_threshold: missing tokens up to which it does, before anything is known. max_threshold:
    most that is ever computed by its own choice. is_pinned: the threshold is the default, whatever
    is learned.
    max_itl_factor: maximum slowdown of a decode step caused by a small chunk of a prompt beside it;
    None for any chunk. min_chunk_tokens: of a small one, at least.
    alone_chunk_tokens: of a chunk while nothing decodes, where prompts are shared: handoffs to this
    worker wait for the step's end.
    max_shared_tokens: longest prompt that a gateway may have computed here although prefill workers
    could, because it is computed sooner here.
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
    """How a worker decides.

    prompts_first: a step gives its tokens to prompts before sequences that decode.
    queues_prompts: a prompt to be computed here waits for blocks instead of being deferred.
    """

    role: Tier
    prompts_first: bool
    queues_prompts: bool
    local_prefill: LocalPrefillPolicy


def learned_local_prefill(spec: EngineSpec) -> LocalPrefillPolicy:
    """Prompts are shared with the prefill tier by load, which the gateways know. Of its own accord
    the worker computes short missing tails only: until speeds are known, those up to a block."""
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
    """What misses up to so many tokens is computed here, and nothing else."""
    return LocalPrefillPolicy(
        num_tokens,
        num_tokens,
        is_pinned=True,
        max_itl_factor=max_itl_factor,
        max_shared_tokens=num_tokens,
    )


def prefill_policy() -> Policy:
    """Prompts first, in chunks that do not hold up what decodes here while the decode tier is
    full."""
    local_prefill = pinned_local_prefill(0)
    return Policy(Tier.PREFILL, True, True, local_prefill)


def decode_policy(local_prefill: LocalPrefillPolicy) -> Policy:
    """Sequences that decode first; a prompt is computed here where that is cheaper than to wait for
    it."""
    return Policy(Tier.DECODE, False, False, local_prefill)
