"""Two models of different vocabularies by one command, every worker a process of its own: each
answers as transformers does, over both doors, and one model's loss leaves the other alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from baton.client import AsyncClient
from baton.config import ServeOptions
from baton.errors import NoWorkers, WorkerLost
from baton.supervisor.cluster import Cluster
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.long]

BOX = Path(__file__).parents[2] / "models" / "baton-py-6m"
PROMPT = "import os\n\n\ndef walk(path):\n"
NUM_TOKENS = 12


def expected(folder: Path) -> tuple[list[int], str]:
    """Greedy tokens and their text, by transformers."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(PROMPT).ids
    read: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = read(folder, dtype=torch.float32)
    end = model.generation_config.eos_token_id
    output = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=end if isinstance(end, int) else 0,
    )[0, len(ids) :].tolist()
    return output, tokenizer.decode(output)


async def test_each_request_goes_to_its_own_model(tmp_path: Path) -> None:
    folders: Mapping[str, Path] = {
        "code": BOX,
        "bytes": make_tiny_model(tmp_path / "bytes", "qwen2"),
    }
    serve = ServeOptions(
        model=str(BOX),
        served_model_name="code",
        more_models=(f"bytes={folders['bytes']}:max_model_len=64",),
        dtype="float32",
        kv_cache_memory_bytes=32 << 20,
        max_local_prefill_tokens=0,
        generation_config="none",
        port=0,
        log_level="warning",
    )
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(Cluster(serve))
        client = await stack.enter_async_context(AsyncClient(cluster.address, max_retries=0))
        url = f"http://{cluster.http_address}/v1"
        http = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        await stack.enter_async_context(http)

        greedy: Any = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        outputs = {}
        for name, folder in folders.items():
            token_ids, text = expected(folder)
            done, answer = await asyncio.gather(
                client.generate(PROMPT, model=name, **greedy),
                http.completions.create(
                    model=name,
                    prompt=PROMPT,
                    temperature=0,
                    max_tokens=NUM_TOKENS,
                    extra_body={"ignore_eos": True},
                ),
            )
            outputs[name] = list(done.token_ids)
            assert outputs[name] == token_ids
            assert answer.choices[0].text == text
            assert done.timing.transfer_bytes > 0
        sizes = {model.name: model.vocab_size for model in await client.models()}
        assert sizes["code"] != sizes["bytes"]

        stopped = cluster.pid_of("decode-1")
        os.kill(stopped, signal.SIGSTOP)
        stack.callback(os.kill, stopped, signal.SIGCONT)
        with pytest.raises((NoWorkers, WorkerLost)):
            await client.generate(PROMPT, model="bytes", **greedy)
        again = await client.generate(PROMPT, model="code", **greedy)
        assert list(again.token_ids) == outputs["code"]
