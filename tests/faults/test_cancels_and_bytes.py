"""Real processes: what is cancelled by the hundred leaves nothing, and the KV of n choices travels
once."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from baton.client import AsyncClient, BeamSearch, SamplingParams
from baton.types import KvLayout
from bench.fault_proxy import ProxiedCluster, Way
from engine.oracle import OracleOptions
from tests.support.fault_streams import Streams, proxied_cluster, until_quiet
from tests.support.live_tiers import BOX_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

NUM_STREAMS = 300
NUM_PROMPT_TOKENS = 640
#: Layout of the oracle engines.
LAYOUT = KvLayout("", OracleOptions(num_blocks=1).num_layers, 1, 2, "int64", 8)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def singles() -> AsyncIterator[ProxiedCluster]:
    """One worker of each tier."""
    async with proxied_cluster(1, 1) as cluster:
        yield cluster


@pytest.mark.long
async def test_hundreds_of_cancels_four_times_leave_a_server_that_answers(
    singles: ProxiedCluster,
) -> None:
    """The recipe of https://github.com/NVIDIA/TensorRT-LLM/pull/12313, where the probe hung. They
    meet requests that wait in the gateway, are computed, are handed over, and run."""
    async with AsyncClient(singles.address, max_retries=9) as client:
        await until_quiet(client, 2)
        for attempt in range(4):
            streams = Streams(client, seed=attempt, num_streams=NUM_STREAMS, max_prompt_tokens=400)
            await streams.streams[attempt].tokens(1)
            await asyncio.gather(*(stream.cancel() for stream in streams.streams))
            probe = Streams(client, seed=100 + attempt, num_streams=1)
            assert not await probe.finish()
        await until_quiet(client, 2)


def params_of(num_choices: int, *, is_beam: bool) -> SamplingParams:
    if is_beam:
        return SamplingParams(n=1, max_tokens=4, beam_search=BeamSearch(num_choices))
    return SamplingParams(n=num_choices, temperature=1.0, seed=1, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize("is_beam", [False, True], ids=["n", "beams"])
async def test_the_kv_of_several_choices_travels_once(
    singles: ProxiedCluster, *, is_beam: bool
) -> None:
    """Counted on the wire between the workers."""
    link = singles.links["kv decode-0"]
    for number in (1, 2, 4, 8, 16):
        async with AsyncClient(singles.address, max_retries=9) as client:
            await until_quiet(client, 2)
            # A prompt of its own, so that nobody has any of it.
            first = number * 37 + is_beam * 500
            prompt = tuple((first + at) % 1000 for at in range(NUM_PROMPT_TOKENS))
            before = link.num_passed[Way.THERE]
            done = await client.generate(prompt, params_of(number, is_beam=is_beam))
            await until_quiet(client, 2)
        num_bytes = link.num_passed[Way.THERE] - before
        kv_bytes = NUM_PROMPT_TOKENS * LAYOUT.num_layers * LAYOUT.token_layer_bytes
        assert done.timing.transfer_bytes == kv_bytes
        # Headers, and a commit with each choice's first token.
        assert 0 < num_bytes - kv_bytes < 2048 + 64 * number


async def run(*command: str) -> tuple[int, str]:
    """Its status and output, errors with it."""
    pipe, both = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=both)
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


@pytest.mark.long
async def test_a_packet_capture_counts_what_the_proxy_does() -> None:
    """In a network namespace, on the bundled model: bench.kv_capture fails where they differ."""
    users = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    status, why = await run("unshare", *users, "--net", "true")
    if status:
        pytest.skip(f"no network namespaces here: {why}")
    status, output = await run(sys.executable, "-m", "bench.kv_capture", "--most=3", str(BOX_MODEL))
    assert status == 0, output
    rows = [line for line in output.splitlines() if line.startswith(("| n ", "| beams "))]
    assert [row.split("|")[1].strip() for row in rows] == [
        f"{kind} {number}" for kind in ("n", "beams") for number in (1, 2, 3)
    ]
