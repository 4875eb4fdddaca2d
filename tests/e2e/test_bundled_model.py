"""The bundled model, served by real processes as `baton serve` starts them, against
transformers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.client import AsyncClient, ChatMessage, Client
from baton.config import ServeOptions
from baton.supervisor import Cluster
from baton.types import FinishReason

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

BATON = str(Path(sys.executable).with_name("baton"))
MODEL = Path(__file__).parents[2] / "models" / "baton-py-6m"
PROMPTS = (
    "import os\n\n\ndef walk(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "",
    "x = {'a': 1}\nfor k, v in x.items():\n    print(",
    "def f(" * 60,
)


@pytest.fixture(scope="module")
def reference() -> Iterator[tuple[AutoModelForCausalLM, AutoTokenizer]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield (
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        AutoTokenizer.from_pretrained(MODEL),
    )
    torch.set_num_threads(threads)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    options = ServeOptions(
        model=str(MODEL),
        served_model_name="box",
        dtype="float32",
        port=0,
        kv_cache_memory_bytes=64 << 20,
        prefill_block_size=32,
        log_level="warning",
        drain_timeout_s=5,
    )
    async with Cluster(options) as running:
        yield running


async def test_greedy_output_is_that_of_transformers(
    cluster: Cluster, reference: tuple[AutoModelForCausalLM, AutoTokenizer]
) -> None:
    model, tokenizer = reference
    async with AsyncClient(cluster.address) as client:
        for prompt in filter(None, PROMPTS):
            token_ids = tokenizer(prompt)["input_ids"]
            assert (await client.tokenize(prompt)).token_ids == tuple(token_ids)
            done = await client.generate(prompt, temperature=0.0, max_tokens=40)
            with torch.inference_mode():
                full = model.generate(
                    torch.tensor([token_ids]), max_new_tokens=40, do_sample=False
                )[0]
            output = full[len(token_ids) :].tolist()
            assert list(done.token_ids) == output
            assert done.text == tokenizer.decode(output, skip_special_tokens=True)
            assert done.timing.decode_worker == "decode-0"
        chat = [ChatMessage("user", "Write a function.")]
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Write a function."}], add_generation_prompt=True
        )
        expected = rendered["input_ids"] if hasattr(rendered, "keys") else rendered
        assert list((await client.tokenize(chat)).token_ids) == list(expected)
        assert await client.detokenize(expected) == tokenizer.decode(expected)


async def test_streams_stops_and_seeds(cluster: Cluster) -> None:
    async with AsyncClient(cluster.address) as client:
        whole = await client.generate(PROMPTS[0], seed=11, max_tokens=60)
        again = await client.generate(PROMPTS[0], seed=11, max_tokens=60)
        other = await client.generate(PROMPTS[0], seed=12, max_tokens=60)
        assert whole.token_ids == again.token_ids != other.token_ids
        async with client.stream(PROMPTS[0], seed=11, max_tokens=60) as stream:
            chunks = [chunk async for chunk in stream]
        assert "".join(chunk.text for chunk in chunks) == whole.text
        stop = whole.text[len(whole.text) // 2 :][:4]
        stopped = await client.generate(PROMPTS[0], seed=11, max_tokens=60, stop=stop)
        assert stopped.finish_reason is FinishReason.STOP
        assert stopped.text == whole.text[: whole.text.index(stop)]
        assert stopped.choices[0].stop == stop


async def test_the_command_line_and_the_sync_client(cluster: Cluster) -> None:
    async def run(*arguments: str) -> tuple[int | None, str, str]:
        """Exit status, stdout and stderr of one command."""
        process = await asyncio.create_subprocess_exec(
            *(BATON, *arguments, "--address", cluster.address), stdout=PIPE, stderr=PIPE
        )
        out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()

    with Client(cluster.address) as client:
        done = client.generate(PROMPTS[0], seed=7, max_tokens=12)
    flags = ("--seed", "7", "--max-tokens", "12", "--json")
    generated, status, refused = await asyncio.gather(
        run("generate", *flags, PROMPTS[0]),
        run("status", "--json"),
        run("generate", "--top-p", "7", "a"),
    )
    assert generated[0] == status[0] == 0, (generated, status)
    told = json.loads(generated[1])
    assert told["choices"][0]["token_ids"] == list(done.token_ids)
    assert told["usage"]["completion_tokens"] == len(done.token_ids) > 0
    workers = {worker["worker_id"] for worker in json.loads(status[1])[0]["workers"]}
    assert workers == {"prefill-0", "decode-0"}
    assert refused[:2] == (1, "")
    assert "sampling.top_p" in refused[2]


async def test_killed_workers_come_back_and_streams_go_on(cluster: Cluster) -> None:
    async with AsyncClient(cluster.address) as client:
        expected = await client.generate(PROMPTS[1], seed=5, max_tokens=300, ignore_eos=True)
        async with client.stream(PROMPTS[1], seed=5, max_tokens=300, ignore_eos=True) as stream:
            tokens: list[int] = []
            async for chunk in stream:
                if not tokens:
                    os.kill(cluster.pid_of("prefill-0"), signal.SIGKILL)
                tokens += chunk.token_ids
        assert tuple(tokens) == expected.token_ids
        # With no prefill worker the decode worker computes the prompt by itself.
        done = await client.generate(PROMPTS[1], seed=5, max_tokens=300, ignore_eos=True)
        assert done.token_ids == expected.token_ids
