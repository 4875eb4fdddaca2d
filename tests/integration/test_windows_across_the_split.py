"""Models with windowed layers over real services: prompts of several windows prefilled in chunks on
one worker and decoded on another with blocks of another size, tokens as transformers' generate has
them, also of a second turn that goes on from what is cached; and of windowed layers no more crosses
than the window and what rounds it to blocks."""

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

NUM_TOKENS, WINDOW, NUM_LAYERS = 24, 20, 3
SENDER_BLOCK, RECEIVER_BLOCK = 16, 8
PROMPTS = ([40, 77, 5, 200, 33], [7, 8, 9] * 40, [i * 7 % 250 for i in range(83)])
#: By family: settings, and windowed layers.
CASES: dict[Family, tuple[dict[str, Any], set[int]]] = {
    "mistral": ({}, {0, 1, 2}),
    "gpt_oss": ({}, {0, 2}),
    "gemma3_text": ({"sliding_window_pattern": 2, "layer_types": None}, {0, 2}),
}


def window_start(num_tokens: int, block_size: int) -> int:
    reach = num_tokens // block_size * block_size - WINDOW + 1
    return max(0, reach) // block_size * block_size


def crossing(num_tokens: int, num_held: int, num_windowed: int) -> int:
    """Tokens of layers that a prompt takes, of which the receiver holds num_held."""
    start = max(window_start(num_tokens, size) for size in (SENDER_BLOCK, RECEIVER_BLOCK))
    full = (NUM_LAYERS - num_windowed) * (num_tokens - num_held)
    return full + num_windowed * (num_tokens - max(start, num_held))


@pytest.mark.parametrize(
    ("family", "impl"),
    [("mistral", "baton"), ("gpt_oss", "baton"), ("gemma3_text", "transformers")],
)
async def test_greedy_tokens_and_the_bytes_that_cross(
    tmp_path: Path, family: Family, impl: str
) -> None:
    settings, windowed = CASES[family]
    own = {"num_hidden_layers": NUM_LAYERS, "sliding_window": WINDOW} | settings
    model = make_tiny_model(tmp_path / "model", family, **own)
    common: dict[str, Any] = {
        "model": str(model),
        "model_impl": impl,
        "engine": "torch",
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "num_gpu_blocks_override": 200,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        "block_size": SENDER_BLOCK,
    }
    decode = {"max_local_prefill_tokens": 0, "block_size": RECEIVER_BLOCK}
    gateway = {"model": str(model), "served_model_name": str(model)}
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    async with live_system(
        worker_options=common, decode_options=decode, gateway_options=gateway
    ) as system:

        async def serve(prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
            done = await asyncio.gather(*(system.client.generate(p, params) for p in prompts))
            await system.until_quiet()
            return [list(d.token_ids) for d in done], [d.timing.transfer_bytes for d in done]

        prompts = [list(prompt) for prompt in PROMPTS]
        outputs, first_bytes = await serve(prompts)
        turns = [p + o + [3, 1, 4] * 9 for p, o in zip(prompts, outputs, strict=True)]
        more_outputs, more_bytes = await serve(turns)
    assert outputs == greedy_outputs(model, prompts, NUM_TOKENS)
    assert more_outputs == greedy_outputs(model, turns, NUM_TOKENS)
    token_layer_bytes = first_bytes[0] // (len(prompts[0]) * NUM_LAYERS)
    assert first_bytes == [
        token_layer_bytes * crossing(len(prompt), 0, len(windowed)) for prompt in prompts
    ]
    held = [(len(p) + NUM_TOKENS - 1) // RECEIVER_BLOCK * RECEIVER_BLOCK for p in prompts]
    assert more_bytes == [
        token_layer_bytes * crossing(len(turn), num_held, len(windowed))
        for turn, num_held in zip(turns, held, strict=True)
    ]
