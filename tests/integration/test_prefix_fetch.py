"""A conversation's next turn over real services: the prefill worker borrows what the decode worker
kept."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack

import pytest

from baton.client import AsyncClient, SamplingParams
from baton.types import Sampling
from engine.oracle import oracle_tokens
from tests.support.live_tiers import (
    ONLY_DECODES,
    decode_worker,
    gateway,
    has_crossed,
    prefill_worker,
)
from tests.support.metrics_page import fetch_metrics, free_ports

pytestmark = pytest.mark.slow

VOCAB = 1000


def fetched_tokens(page: str) -> int:
    (found,) = re.findall(r"^baton_prefix_fetched_tokens\S* (\S+)$", page, re.MULTILINE)
    return int(float(found))


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.long)])
async def test_a_prefill_worker_without_a_cache_borrows_the_conversation_so_far(
    transport: str,
) -> None:
    (port,) = free_ports(1)
    async with AsyncExitStack() as stack:
        # Computing a conversation anew takes seconds: more than receiving it costs by what was
        # measured on a busy machine.
        slow = {"oracle_step_ms": 250.0, "max_num_batched_tokens": 16, "max_num_seqs": 8}
        prefill = await stack.enter_async_context(
            prefill_worker(
                enable_prefix_caching=False, metrics_port=port, kv_transport=transport, **slow
            )
        )
        decode = await stack.enter_async_context(
            decode_worker(kv_transport=transport, **ONLY_DECODES)
        )
        address = await stack.enter_async_context(gateway([prefill], [decode]))
        client = await stack.enter_async_context(AsyncClient(address, max_retries=0))
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        said = list(range(100))
        for turn in range(3):
            done = await client.generate(said, params)
            assert list(done.token_ids) == oracle_tokens(said, Sampling(max_tokens=40), VOCAB)
            assert has_crossed(done)
            said += [*done.token_ids, *range(200 + turn, 240 + turn)]
        # Each turn holds all of the last one but its last token, in whole blocks of 4.
        assert fetched_tokens(await fetch_metrics(port)) == (139 // 4 + 219 // 4) * 4
