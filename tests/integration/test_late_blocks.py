"""Real workers, transports and threads: KV that arrives before its blocks."""

from __future__ import annotations

import asyncio

import pytest

from baton.client import SamplingParams
from baton.types import Sampling
from engine.oracle import oracle_tokens
from kv_transfer.ticket import ParkedChunk
from kv_transfer.ticket_table import TicketTable
from tests.support.live_tiers import live_system

pytestmark = pytest.mark.slow

NUM_PROMPTS, NUM_TOKENS, NUM_NEW = 6, 120, 60


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_prompts_larger_than_what_is_free_arrive_and_get_their_tokens(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode worker has room for one of them, and its steps are slow."""
    parked: list[int] = []
    park = TicketTable.park

    def spy(tickets: TicketTable, ticket_id: int, chunk: ParkedChunk) -> None:
        parked.append(chunk.num_bytes)
        park(tickets, ticket_id, chunk)

    monkeypatch.setattr(TicketTable, "park", spy)
    options = {
        "kv_transport": transport,
        "block_size": 4,
        "num_gpu_blocks_override": 50,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "oracle_token_us": 1000.0,
    }
    prompts = [
        [(number * 31 + place * 7) % 999 for place in range(NUM_TOKENS)]
        for number in range(NUM_PROMPTS)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    async with live_system(1, 1, worker_options=options) as system, asyncio.timeout(90):
        done = await asyncio.gather(*(system.client.generate(prompt, params) for prompt in prompts))
    for prompt, one in zip(prompts, done, strict=True):
        assert list(one.token_ids) == oracle_tokens(prompt, Sampling(max_tokens=NUM_NEW), 1000)
    assert parked
