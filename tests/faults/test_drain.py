"""A draining decode worker hands its live sequences over: nothing waits for it, and nothing is
computed again."""

from __future__ import annotations

import os
import signal

import pytest

from baton.client import AsyncClient
from baton.config import ServeOptions
from baton.supervisor import Cluster
from tests.support.fault_streams import Streams
from tests.support.live_tiers import BOX_MODEL

pytestmark = pytest.mark.slow


@pytest.mark.long
async def test_sequences_of_a_worker_that_drains_go_on_elsewhere_with_their_kv() -> None:
    options = ServeOptions(
        model=str(BOX_MODEL),
        engine="oracle",
        generation_config="none",
        oracle_step_ms=40.0,
        num_decode_workers=2,
        num_gpu_blocks_override=4000,
        drain_timeout_s=60,
        port=0,
        log_level="error",
    )
    async with Cluster(options) as cluster, AsyncClient(cluster.address, max_retries=0) as client:
        streams = Streams(client, seed=7, num_streams=40, num_tokens=60)
        await streams.all_run()
        num_running = {w.address: w.num_running for w in (await client.model()).workers}
        decodes = [name for name in cluster.names if name.startswith("decode")]
        busiest = max(decodes, key=lambda name: num_running[cluster.address_of(name)])
        os.kill(cluster.pid_of(busiest), signal.SIGTERM)
        assert await streams.finish() == []
    assert num_running[cluster.address_of(busiest)] >= 5
    assert streams.num_resumes == 0
