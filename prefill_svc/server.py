"""The prefill worker's process: the worker core, with the policy of a prefill worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.config import PrefillOptions
from baton.service import ReadyReport
from baton.types import Tier
from worker_core.build import build_engine
from worker_core.policy import Policy, decode_policy, learned_local_prefill, prefill_policy
from worker_core.worker import TierSetup, max_num_launches, serve_worker


async def serve_prefill(
    options: PrefillOptions, stop: asyncio.Event, on_ready: Callable[[ReadyReport], None]
) -> None:
    """Prefill worker: computes prompts and sends their KV to decode workers."""

    def load() -> TierSetup:
        engine = build_engine(options)

        def policy_of(role: Tier) -> Policy:
            if role is Tier.PREFILL:
                return prefill_policy(options.slo)
            return decode_policy(learned_local_prefill(engine.spec, options.slo))

        num_launches = max_num_launches(options.async_scheduling, engine.spec, has_drafts=False)
        return TierSetup(engine, policy_of, max_num_launches=num_launches)

    await serve_worker(options, load, stop, on_ready)
