"""The prefill worker's process: the worker core, with the policy of a prefill worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.config import PrefillOptions
from baton.service import ReadyReport
from baton.types import Role, Tier
from worker_core.build import build_engine, threads_of
from worker_core.policy import policy_of
from worker_core.worker import TierSetup, max_num_launches, serve_worker


async def serve_prefill(
    options: PrefillOptions, stop: asyncio.Event, on_ready: Callable[[ReadyReport], None]
) -> None:
    """Prefill worker: computes prompts and sends their KV to decode workers."""

    def load() -> TierSetup:
        engine = build_engine(options)
        num_launches = max_num_launches(options.async_scheduling, engine.spec, has_drafts=False)
        return TierSetup(
            engine,
            lambda role: policy_of(role, engine.spec, options.slo),
            Role(Tier.PREFILL),
            threads_of(options),
            max_num_launches=num_launches,
        )

    await serve_worker(options, load, stop, on_ready)
