"""The decode worker's process: the worker core, with the policy of a decode worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from baton.config import DecodeOptions
from baton.service import ReadyReport
from baton.types import Role, Tier
from engine.interface import Engine
from worker_core.build import build_decode_engine, threads_of
from worker_core.policy import (
    BALANCED,
    LocalPrefillPolicy,
    gap_rule_of,
    learned_local_prefill,
    pinned_local_prefill,
    policy_of,
)
from worker_core.speculation.speculator import build_speculation, speculative_method
from worker_core.worker import TierSetup, max_num_launches, serve_worker


async def serve_decode(
    options: DecodeOptions,
    stop: asyncio.Event,
    on_ready: Callable[[ReadyReport], None],
    make_engine: Callable[[DecodeOptions], Engine] = build_decode_engine,
) -> None:
    """Decode worker: receives sequences from prefill workers and streams their tokens."""

    def load() -> TierSetup:
        engine = make_engine(options)
        local_prefill = local_prefill_policy(options, engine)
        has_drafts = speculative_method(options, engine.spec) != "none"
        return TierSetup(
            engine,
            lambda role: policy_of(role, engine.spec, options.slo, local_prefill),
            Role(Tier.DECODE, options.colocated),
            threads_of(options),
            build_speculation(options, engine, time.perf_counter),
            max_num_launches(options.async_scheduling, engine.spec, has_drafts=has_drafts),
            # KV on several hosts cannot be swapped.
            int(options.swap_space * 2**30),
            options.kv_transfer_dtype,
        )

    await serve_worker(options, load, stop, on_ready)


def local_prefill_policy(options: DecodeOptions, engine: Engine) -> LocalPrefillPolicy:
    """What it does unless colocated: compute prompts up to a given length, or by load."""
    if options.max_local_prefill_tokens is not None:
        rule = gap_rule_of(options.slo, BALANCED)
        return pinned_local_prefill(options.max_local_prefill_tokens, rule)
    return learned_local_prefill(engine.spec, options.slo)
