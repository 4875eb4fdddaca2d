"""Prompts of 128K tokens through real services: computed on a prefill worker, handed to a decode
worker, with the tokens of one process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from baton.client import SamplingParams
from tests.support.live_tiers import live_system
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.long]

NUM_TOKENS, NUM_NEW = 131072 - 64, 24
YARN = '{"rope_type": "yarn", "factor": 64}'


async def test_128k_tokens_in_two_tiers_equal_one_process(tmp_path: Path) -> None:
    """A model of 2,048 tokens, stretched by YaRN, so that positions matter to the end."""
    model = make_tiny_model(
        tmp_path / "model",
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
    )
    common: dict[str, Any] = {
        "model": str(model),
        "engine": "torch",
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "rope_scaling": YARN,
        "num_gpu_blocks_override": 131072 // 64 + 8,
        "block_size": 64,
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 2,
    }
    gateway = {"model": str(model), "served_model_name": str(model)}
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    rng = random.Random(5)
    prompt = [rng.randrange(256) for _ in range(NUM_TOKENS)]
    outputs = []
    for max_local in (0, 1 << 20):
        decode = {"max_local_prefill_tokens": max_local, "block_size": 128 if not max_local else 64}
        if not max_local:
            decode["num_gpu_blocks_override"] = 131072 // 128 + 8
        async with live_system(
            worker_options=common, decode_options=decode, gateway_options=gateway
        ) as system:
            done = await system.client.generate(prompt, params)
            assert (done.timing.transfer_bytes > 0) == (not max_local)
            outputs.append(list(done.token_ids))
            await system.until_quiet()
    assert len(set(outputs[0])) > 3
    assert outputs[0] == outputs[1]
