"""A model with slots for its windowed layers, over real services: a LoRA adapter on one of two
requests, drafts by n-grams and by a draft model that has windows itself, a second turn, and workers
without blocks for all of them at once; tokens as transformers' generate has them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.client import Completion, SamplingParams, WorkerStatus
from tests.support.adapters import make_adapter, merged
from tests.support.live_tiers import ONLY_DECODES, LiveSystem, has_crossed, live_system
from tests.support.tiny_models import make_tiny_model
from tests.support.transformers_greedy import greedy_outputs

pytestmark = pytest.mark.slow

NUM_TOKENS = 24
SETTINGS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "sliding_window": 20,
}
PROMPTS = [[7, 8, 9] * 20, [i * 7 % 250 for i in range(83)], [7, 8, 9] * 13 + [5], [40, 77, 5]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def options_of(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "engine": "torch",
        "model": str(model),
        "served_model_name": "tiny",
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "block_size": 8,
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 32,
        **more,
    }


def front(model: Path) -> dict[str, Any]:
    return {"model": str(model), "served_model_name": "tiny"}


async def workers(system: LiveSystem) -> tuple[WorkerStatus, ...]:
    return (await system.client.model()).workers


async def serve(system: LiveSystem, prompts: list[list[int]], **more: Any) -> list[Completion]:
    done = await asyncio.gather(
        *(system.client.generate(prompt, PARAMS, **more) for prompt in prompts)
    )
    await system.until_quiet()
    return done


def outputs(done: list[Completion]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in done]


async def test_an_adapter_changes_exactly_its_own_request(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2", **SETTINGS)
    adapter = make_adapter(tmp_path / "adapter", model)
    own = greedy_outputs(merged(tmp_path / "merged", model, adapter), PROMPTS, NUM_TOKENS)
    plain = greedy_outputs(model, PROMPTS, NUM_TOKENS)
    assert own != plain
    async with live_system(
        worker_options=options_of(
            model, lora_modules=(f"mine={adapter}",), num_gpu_blocks_override=160
        ),
        decode_options=ONLY_DECODES,
        gateway_options=front(model),
    ) as system:
        assert all(worker.num_window_slots for worker in await workers(system))
        for names in (("mine", ""), ("tiny", "mine")):
            both = await asyncio.gather(
                *(
                    system.client.generate(prompt, PARAMS, model=name)
                    for prompt in PROMPTS
                    for name in names
                )
            )
            for number, name in enumerate(names):
                got = both[number::2]
                assert outputs(got) == (own if name == "mine" else plain)
                # Some lies in caches, from the first round on.
                assert names[0] == "tiny" or any(map(has_crossed, got))


@pytest.mark.parametrize("method", ["ngram", "draft"])
async def test_drafts_change_no_token(tmp_path: Path, method: str) -> None:
    """The draft model is the model itself, so that its drafts are right."""
    model = make_tiny_model(tmp_path / "model", "qwen2", **SETTINGS)
    drafts = {"speculative_method": method, "num_speculative_tokens": 4}
    if method == "draft":
        drafts["speculative_model"] = str(model)
    async with live_system(
        worker_options=options_of(model),
        decode_options={**ONLY_DECODES, **drafts},
        gateway_options=front(model),
    ) as system:
        first = outputs(await serve(system, PROMPTS))
        turns = [[*prompt, *out, 3, 1] for prompt, out in zip(PROMPTS, first, strict=True)]
        second = outputs(await serve(system, turns))
        assert all(worker.num_window_slots for worker in await workers(system))
    assert first == greedy_outputs(model, PROMPTS, NUM_TOKENS)
    assert second == greedy_outputs(model, turns, NUM_TOKENS)


async def test_all_slots_come_back(tmp_path: Path) -> None:
    """Answers of a decode worker with too few blocks for all sequences."""
    model = make_tiny_model(tmp_path / "model", "qwen2", **SETTINGS)
    few = {"num_gpu_blocks_override": 40, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    prompts = [[i * (7 + k) % 250 for i in range(40 + 9 * k)] for k in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    async with live_system(
        worker_options=options_of(model, **few),
        decode_options=ONLY_DECODES,
        gateway_options=front(model),
    ) as system:
        done = await asyncio.gather(*(system.client.generate(p, params) for p in prompts))
        assert outputs(done) == greedy_outputs(model, prompts, 80)
        await system.until_quiet()
        for worker in await workers(system):
            assert worker.num_leased_window_slots == 0
            assert 0 < worker.num_window_slots < worker.num_blocks
