"""SmolLM2-135M-Instruct, a published model in a GGUF file that `make smol` fetches, served by two
tiers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch

from baton.client import AsyncClient
from baton.config import ServeOptions
from baton.supervisor import Cluster
from tests.support.transformers_greedy import greedy_output

FILE = Path(__file__).parents[2] / "models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
NUM_TOKENS = 24

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(not FILE.is_file(), reason="no SmolLM2 here: make smol"),
]


def dequantised(file: Path) -> torch.nn.Module:
    """The model in float32, by the gguf package's reading of the file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(file)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True,
        )
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    found = {tensor.name: tensor for tensor in reader.tensors}
    for name, parameter in model.named_parameters():
        tensor = found[str(names.get_name(name, try_suffixes=(".weight",)))]
        dense = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = torch.from_numpy(dense.copy())
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            pairs = values.view(-1, 32, 2, values.shape[1])
            values = pairs.transpose(1, 2).reshape(values.shape)
        parameter.data = values.view(parameter.shape).float()
    return model.eval()


async def answer(dtype: str) -> tuple[list[int], list[int], str]:
    """Prompt and answer of the question, in tokens, and the answer's text."""
    options = ServeOptions(
        model=str(FILE),
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
    wanted = greedy_output(dequantised(FILE), prompt, len(tokens))
    assert tokens == wanted
    assert "Paris" in text


async def test_its_blocks_give_an_answer() -> None:
    _, _, text = await answer("bfloat16")
    assert "Paris" in text


def test_two_tiers_give_the_tokens_of_one_process() -> None:
    command = [sys.executable, "-m", "baton", "check", str(FILE), "--num-requests", "8"]
    command += ["--kv-cache-memory-bytes", "64MiB", "--kv-transport", "shm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
