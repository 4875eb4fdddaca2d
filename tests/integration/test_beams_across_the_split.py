"""Beam search over real services and a real model: a prompt prefilled on one worker, beams that
share its blocks on another, and outputs that transformers finds in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.client import BeamSearch, SamplingParams
from baton.types import BeamParams, EarlyStopping, Sampling
from tests.support.live_tiers import live_system
from tests.support.tiny_models import END_OF_TEXT, make_tiny_model
from tests.support.transformers_beams import transformers_beams

pytestmark = pytest.mark.slow

PROMPTS = ([40, 77, 5, 200, 33, 12, 9, 101, 64], [7] * 30, [250])
STOPS = frozenset((END_OF_TEXT, *range(0, 120, 3)))
BEAMS = (BeamSearch(4), BeamSearch(3, 0.5, True), BeamSearch(5, 2.0, "never"))
EARLY = {False: EarlyStopping.HEURISTIC, True: EarlyStopping.ALWAYS, "never": EarlyStopping.NEVER}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("beams"), "llama", seed=3)


async def test_same_outputs_and_scores_as_transformers(model: Path) -> None:
    common: dict[str, Any] = {
        "model": str(model),
        "engine": "torch",
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "num_gpu_blocks_override": 200,
    }
    gateway = {"model": str(model), "served_model_name": str(model)}
    remote = {"max_local_prefill_tokens": 0}
    async with live_system(
        worker_options=common, decode_options=remote, gateway_options=gateway
    ) as system:

        async def search(prompt: list[int], beam: BeamSearch) -> None:
            params = SamplingParams(
                n=beam.width,
                beam_search=beam,
                max_tokens=10,
                ignore_eos=True,
                stop_token_ids=sorted(STOPS),
            )
            done = await system.client.generate(prompt, params)
            assert (done.timing.prefill_worker, done.timing.decode_worker) == ("p0", "d0")
            assert done.timing.transfer_bytes > 0
            ours = BeamParams(
                beam.width, beam.length_penalty, EARLY[beam.early_stopping], beam.width
            )
            sampling = Sampling(max_tokens=10, stop_token_ids=STOPS, beam=ours)
            wanted = transformers_beams(model, prompt, sampling)
            found = [list(choice.token_ids) for choice in done.choices]
            assert found == [tokens for tokens, _ in wanted]
            scores = [choice.score for choice in done.choices]
            assert scores == pytest.approx([score for _, score in wanted], abs=1e-4)

        await asyncio.gather(
            *(search(prompt, beam) for prompt, beam in zip(PROMPTS, BEAMS, strict=True))
        )
        await system.until_quiet()
