"""The prefill worker's process: the worker core, told to compute prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.config import PrefillOptions
from baton.service import ReadyReport
from baton.worker.build import build_engine
from worker_core.policy import prefill_policy
from worker_core.worker import TierSetup, serve_worker


async def serve_prefill(
    options: PrefillOptions, stop: asyncio.Event, on_ready: Callable[[ReadyReport], None]
) -> None:
    """Prefill worker: computes prompts and sends their KV to decode workers."""
    await serve_worker(
        options, lambda: TierSetup(build_engine(options), prefill_policy()), stop, on_ready
    )
