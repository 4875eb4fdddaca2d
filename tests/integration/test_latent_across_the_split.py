"""Multi-head latent attention over real services: prompts prefilled in chunks on one worker and
decoded on another with blocks of another size, tokens as transformers' generate has them; and what
crosses is a row of a latent and a rotated key for each token and layer, and no more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.client import SamplingParams
from tests.support.live_tiers import live_system
from tests.support.tiny_models import Family, make_tiny_model
from tests.support.transformers_greedy import greedy_outputs

pytestmark = pytest.mark.slow

NUM_TOKENS = 24
PROMPTS = ([40, 77, 5, 200, 33, 12, 9, 101, 64], [7, 8, 9] * 30, [250], list(range(3, 60)))
#: Elements of a token's row in the tiny models: the latent and the rotated key.
ROW_ELEMENTS = 32 + 8


@pytest.mark.parametrize(
    "family", ["deepseek_v3", pytest.param("deepseek_v2", marks=pytest.mark.long)]
)
async def test_greedy_tokens_and_the_bytes_that_cross(tmp_path: Path, family: Family) -> None:
    model = make_tiny_model(tmp_path / "model", family, num_hidden_layers=3)
    common: dict[str, Any] = {
        "model": str(model),
        "engine": "torch",
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "num_gpu_blocks_override": 200,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        "block_size": 16,
    }
    decode = {"max_local_prefill_tokens": 0, "block_size": 8}
    gateway = {"model": str(model), "served_model_name": str(model)}
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    async with live_system(
        worker_options=common, decode_options=decode, gateway_options=gateway
    ) as system:
        done = await asyncio.gather(*(system.client.generate(prompt, params) for prompt in PROMPTS))
        await system.until_quiet()
    assert [list(each.token_ids) for each in done] == greedy_outputs(model, PROMPTS, NUM_TOKENS)
    assert [each.timing.transfer_bytes for each in done] == [
        len(prompt) * 3 * ROW_ELEMENTS * 4 for prompt in PROMPTS
    ]
