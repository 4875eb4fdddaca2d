"""SmolLM2-135M-Instruct, a published model in a GGUF file that `make smol` fetches, served by two
tiers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton.client import AsyncClient
from baton.config import ServeOptions
from baton.supervisor import Cluster
from bench.peers.models import SMOL
from bench.peers.smol import dequantised
from tests.support.transformers_greedy import greedy_output

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
NUM_TOKENS = 24

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(not SMOL.is_file(), reason="no SmolLM2 here: make smol"),
]


async def answer(dtype: str) -> tuple[list[int], list[int], str]:
    """Prompt and answer of the question, in tokens, and the answer's text."""
    options = ServeOptions(
        model=str(SMOL),
        port=0,
        dtype=dtype,
        kv_cache_memory_bytes=64 << 20,
        max_local_prefill_tokens=0,
        log_level="warning",
    )
    async with Cluster(options) as cluster, AsyncClient(cluster.address) as client:
        prompt = await client.tokenize(QUESTION)
        done = await client.generate(QUESTION, max_tokens=NUM_TOKENS, temperature=0.0)
    return list(prompt.token_ids), list(done.token_ids), done.text


async def test_dequantised_it_gives_the_tokens_of_transformers() -> None:
    prompt, tokens, text = await answer("float32")
    wanted = greedy_output(dequantised(SMOL), prompt, len(tokens))
    assert tokens == wanted
    assert "Paris" in text


async def test_its_blocks_give_an_answer() -> None:
    _, _, text = await answer("bfloat16")
    assert "Paris" in text


def test_two_tiers_give_the_tokens_of_one_process() -> None:
    command = [sys.executable, "-m", "baton", "check", str(SMOL), "--num-requests", "8"]
    command += ["--kv-cache-memory-bytes", "64MiB", "--kv-transport", "shm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
