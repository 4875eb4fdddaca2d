"""Workers change their tiers by `baton set-role` while real processes serve: no stream fails, and
each has the tokens that it has at rest."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from baton.client import AsyncClient
from baton.config import ServeOptions
from baton.supervisor import Cluster

# Beside tests/sim/test_roles.py, which any change is tried with.
pytestmark = [pytest.mark.slow, pytest.mark.long]

BATON = str(Path(sys.executable).with_name("baton"))
MODEL = Path(__file__).parents[2] / "models" / "baton-py-6m"

#: Some begin alike, so that prefixes are found; each is drawn with a seed of its own.
PROMPTS = tuple(
    f"{beginning}\n\n\ndef f{number}(x, y):\n"
    for number in range(4)
    for beginning in ("import os\n" * 40, "class Stack:\n    pass\n", "x = 1")
)
NUM_TOKENS = 64
NUM_CLIENTS = 8
MIN_STREAMS = 40


async def baton(*arguments: str) -> str:
    """Stdout of a command, which must end with status 0."""
    process = await asyncio.create_subprocess_exec(BATON, *arguments, stdout=PIPE, stderr=PIPE)
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def tokens_of(client: AsyncClient, number: int) -> list[int]:
    """Token ids of one stream, in order."""
    token_ids: list[int] = []
    async with client.stream(PROMPTS[number], seed=number, max_tokens=NUM_TOKENS) as stream:
        async for chunk in stream:
            token_ids += chunk.token_ids
    return token_ids


async def tiers(cluster: Cluster) -> dict[str, str]:
    """Tier by worker name, as `baton status` shows it."""
    (model,) = json.loads(await baton("status", "--address", cluster.address, "--json"))
    return {worker["worker_id"]: worker["tier"] for worker in model["workers"]}


async def test_no_stream_fails_while_workers_change_their_tiers() -> None:
    options = ServeOptions(
        model=str(MODEL),
        dtype="float32",
        port=0,
        num_decode_workers=2,
        kv_cache_memory_bytes=64 << 20,
        max_local_prefill_tokens=0,
        log_level="warning",
        drain_timeout_s=5,
    )
    changed = asyncio.Event()
    begun: asyncio.Queue[int] = asyncio.Queue()
    numbers = itertools.count()

    async def keep_streaming(client: AsyncClient) -> None:
        """One stream after the other, until the roles are changed and there were enough."""
        while not changed.is_set() or begun.qsize() + num_seen < MIN_STREAMS:
            place = next(numbers) % len(PROMPTS)
            begun.put_nowait(place)
            assert await tokens_of(client, place) == references[place]

    async with Cluster(options) as cluster, AsyncClient(cluster.address, max_retries=0) as client:
        references = [await tokens_of(client, number) for number in range(len(PROMPTS))]
        at_first = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
        assert await tiers(cluster) == at_first
        num_seen = 0
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(keep_streaming(client))
            for role, worker in (
                ("colocated", "decode-0"),
                ("decode", "decode-0"),
                ("prefill", "decode-1"),
                ("decode", "prefill-0"),
            ):
                where = ("--worker", worker, "--address", cluster.address)
                assert await baton("set-role", role, *where) == f"{worker} is a {role} worker\n"
                # As many streams again, and one more: some began after the change.
                for _ in range(begun.qsize() + NUM_CLIENTS + 1):
                    await begun.get()
                    num_seen += 1
            changed.set()
        assert begun.qsize() + num_seen >= MIN_STREAMS
        swapped = {"prefill-0": "decode", "decode-0": "decode", "decode-1": "prefill"}
        assert await tiers(cluster) == swapped
        after = await client.generate("y = 2\n" * 60, max_tokens=4)
        assert after.timing.prefill_worker == "decode-1"
        assert after.timing.decode_worker in ("prefill-0", "decode-0")
