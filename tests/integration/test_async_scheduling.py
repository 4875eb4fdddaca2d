"""A model's answers by workers that launch steps ahead, and by workers that wait for each token:
the same."""

from __future__ import annotations

import asyncio

import pytest

from baton.client import AsyncClient, Completion, SamplingParams
from tests.support.live_tiers import BOX_MODEL, decode_worker, gateway

pytestmark = pytest.mark.slow

PROMPTS = ["import os\n", "def f(x):\n    return", "class A:\n", "for i in range("]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=1.0, top_k=40, seed=3, max_tokens=24, logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=24, n=2),
    SamplingParams(temperature=0.8, seed=5, max_tokens=24, presence_penalty=0.5),
]


async def answers(*, is_ahead: bool) -> list[Completion]:
    """Answers to all prompts with all parameters, sent at the same time."""
    options = {
        "model": str(BOX_MODEL),
        "engine": "torch",
        "dtype": "float32",
        "num_threads": 1,
        "max_model_len": 128,
        "num_gpu_blocks_override": 256,
        "max_num_seqs": 24,
        "kv_transport": "tcp",
        "colocated": True,
        "speculative_method": "none",
        "async_scheduling": is_ahead,
    }
    async with (
        decode_worker(worker_id="d0", **options) as decode,
        gateway([], [decode], served_model_name=str(BOX_MODEL)) as front,
        AsyncClient(front, max_retries=0) as client,
    ):
        calls = [client.generate(prompt, params) for prompt in PROMPTS for params in PARAMS]
        return await asyncio.gather(*calls)


async def test_answers_are_the_same() -> None:
    expected, got = await answers(is_ahead=False), await answers(is_ahead=True)
    for one, other in zip(expected, got, strict=True):
        assert [c.token_ids for c in one.choices] == [c.token_ids for c in other.choices]
        assert [c.finish_reason for c in one.choices] == [c.finish_reason for c in other.choices]
        assert [len(c.logprobs) for c in one.choices] == [len(c.logprobs) for c in other.choices]
