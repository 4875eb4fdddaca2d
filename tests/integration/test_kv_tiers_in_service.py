"""Tiers of KV in real workers: real folders, a real Redis, threads; a disk that is full, a store
that dies."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.client import SamplingParams, TierLoad
from baton.errors import ConfigError
from baton.types import Sampling
from engine.oracle import oracle_tokens
from tests.support.live_tiers import LiveSystem, decode_worker, live_system
from tests.support.metrics_page import fetch_metrics, free_ports
from tests.support.redis_server import redis_server

pytestmark = pytest.mark.slow

NUM_PROMPTS, NUM_TOKENS = 10, 101
#: Room for two prompts, each of which takes 0.2 s to compute.
WORKER: dict[str, Any] = {
    "num_gpu_blocks_override": 60,
    "max_num_seqs": 4,
    "oracle_token_us": 2000.0,
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def prompt_of(number: int) -> list[int]:
    return [(number * 31 + place * 7) % 999 for place in range(NUM_TOKENS)]


async def ask(system: LiveSystem, *numbers: int) -> list[int]:
    """Ask one after another; all answers are right. Returns the numbers of cached tokens."""
    cached = []
    for number in numbers:
        prompt = prompt_of(number)
        done = await system.client.generate(prompt, PARAMS)
        assert list(done.token_ids) == oracle_tokens(prompt, Sampling(max_tokens=4), 1000)
        cached.append(done.usage.cached_tokens)
    return cached


async def tiers_of(system: LiveSystem, worker_id: str = "d0") -> list[TierLoad]:
    """As of a load report after now."""
    await asyncio.sleep(0.6)
    workers = (await system.client.model()).workers
    return [tier for worker in workers if worker.worker_id == worker_id for tier in worker.kv_tiers]


@asynccontextmanager
async def colocated(**options: Any) -> AsyncIterator[LiveSystem]:
    async with live_system(0, 1, worker_options={**WORKER, "colocated": True, **options}) as system:
        yield system


async def test_prefixes_come_back_from_the_host_and_metrics_say_so() -> None:
    (port,) = free_ports(1)
    async with colocated(kv_host_bytes=1 << 20, metrics_port=port) as system:
        await ask(system, *range(NUM_PROMPTS))
        cached = await ask(system, *range(NUM_PROMPTS))
        # The first was computed before the worker knew what computing costs.
        assert cached.count(100) >= NUM_PROMPTS - 1
        (host,) = await tiers_of(system)
        assert host.pays
        assert host.num_hits >= 25 * 7
        assert host.saved_ms > 10 * host.lost_ms
        page = await fetch_metrics(port)
        (hits,) = re.findall(r"^baton_kv_tier_hits\S*host\S* (\S+)$", page, re.MULTILINE)
        assert float(hits) == host.num_hits


async def test_a_restart_keeps_what_is_on_the_disk(tmp_path: Path) -> None:
    options = {"kv_disk_dir": str(tmp_path), "kv_disk_bytes": 4 << 20}
    async with colocated(**options) as system:
        await ask(system, *range(NUM_PROMPTS))
        before = (await tiers_of(system))[0].num_bytes
        assert before > 0
    async with colocated(**options) as system:
        await ask(system, 99)  # it learns what computing costs
        assert (await tiers_of(system))[0].num_bytes >= before
        cached = await ask(system, *range(1, NUM_PROMPTS - 2))
        assert cached == [100] * (NUM_PROMPTS - 3)


async def test_two_workers_do_not_share_a_folder(tmp_path: Path) -> None:
    options = {"kv_disk_dir": str(tmp_path), "kv_disk_bytes": 4 << 20}
    async with decode_worker(**options):
        with pytest.raises(ConfigError, match="another worker uses this folder"):
            async with decode_worker(**options):
                pass


async def run(*command: str) -> int:
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    return await process.wait()


@asynccontextmanager
async def small_filesystem(path: Path, num_bytes: int) -> AsyncIterator[None]:
    """A tmpfs of so many bytes. Skips where it may not be mounted."""
    if await run("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "baton-test", str(path)):
        pytest.skip("a file system cannot be mounted here")
    try:
        yield
    finally:
        await run("umount", "-l", str(path))


async def test_a_full_disk_switches_its_tier_off_and_requests_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        small_filesystem(tmp_path, 256 << 10),
        colocated(kv_disk_dir=str(tmp_path), kv_disk_bytes=64 << 20) as system,
    ):
        await ask(system, *range(NUM_PROMPTS), *range(NUM_PROMPTS))
        (disk,) = await tiers_of(system)
        assert "No space left on device" in disk.off_reason or "disk is full" in disk.off_reason
        assert caplog.text.count("KV tier disk is switched off") == 1
        await ask(system, *range(NUM_PROMPTS))


async def test_workers_share_a_store_and_go_on_without_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with redis_server() as redis:
        options = {**WORKER, "kv_store_url": redis.url, "kv_host_bytes": 8 << 10}
        async with live_system(1, 1, worker_options={**options, "block_size": 4}) as system:
            await ask(system, *range(NUM_PROMPTS))
            assert (await ask(system, *range(NUM_PROMPTS))).count(100) >= NUM_PROMPTS - 2
            stores = [(await tiers_of(system, name))[1] for name in ("p0", "d0")]
            assert sum(store.num_hits for store in stores) > 0
            await redis.stop()
            await ask(system, *range(NUM_PROMPTS))
            stores = [(await tiers_of(system, name))[1] for name in ("p0", "d0")]
            assert any("the store failed" in store.off_reason for store in stores)
            assert caplog.text.count("KV tier store is switched off") <= 2
            await redis.start()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kv_host_bytes": 100}, "a block of this model takes"),
        ({"oracle_has_states": True, "kv_host_bytes": 1 << 20}, "shares no prefixes"),
        ({"enable_prefix_caching": False, "kv_host_bytes": 1 << 20}, "no prefix is reused"),
        ({"kv_disk_dir": "/dev/null/x", "kv_disk_bytes": 1 << 20}, "this process can write"),
    ],
)
async def test_what_cannot_be_is_refused_at_the_start(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        async with decode_worker(**options):
            pass
