"""What a worker's role means to its core. A worker may change its role while it runs: it gets
another policy."""

from __future__ import annotations

from dataclasses import dataclass

from baton.types import Tier

#: Maximum slowdown of a decode step caused by prompt tokens beside it, unless an option says
#: otherwise.
MAX_ITL_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class LocalPrefillPolicy:
    """When a worker computes prompts beside the sequences that decode.

    default_threshold: missing tokens up to which it does, before anything is known. max_threshold:
    most that is ever computed by choice. is_pinned: the threshold is the default, whatever is
    learned.
    max_itl_factor: maximum slowdown of a decode step caused by prompt tokens beside it; None for
    any.
    """

    default_threshold: int
    max_threshold: int
    is_pinned: bool
    max_itl_factor: float | None
    min_chunk_tokens: int = 16


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


def learned_local_prefill(block_size: int, max_num_batched_tokens: int) -> LocalPrefillPolicy:
    """Until speeds are known, a missing tail up to a block is taken to cost less to compute here
    than to send for."""
    return LocalPrefillPolicy(
        block_size, max_num_batched_tokens, is_pinned=False, max_itl_factor=MAX_ITL_FACTOR
    )


def prefill_policy() -> Policy:
    """Prompts first, whatever they do to sequences that decode here; nobody is asked to compute a
    prompt instead."""
    local_prefill = LocalPrefillPolicy(0, 0, is_pinned=True, max_itl_factor=None)
    return Policy(Tier.PREFILL, True, True, local_prefill)


def decode_policy(local_prefill: LocalPrefillPolicy) -> Policy:
    """Sequences that decode first; a prompt is computed here where that is cheaper than to wait for
    it."""
    return Policy(Tier.DECODE, False, False, local_prefill)
