"""Two models of different vocabularies on one gateway, every worker a process of its own: each
answers as transformers does, over both doors, and one model's loss leaves the other alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from baton.client import AsyncClient
from baton.config import GatewayOptions, ServeOptions
from baton.config.command import to_arguments
from baton.errors import NoWorkers
from baton.supervisor.child import Child
from baton.supervisor.plan import PROGRAMS, ChildSpec, plan_workers
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.long]

BOX = Path(__file__).parents[2] / "models" / "baton-py-6m"
PROMPT = "import os\n\n\ndef walk(path):\n"
NUM_TOKENS = 12


@asynccontextmanager
async def running(spec: ChildSpec, parent_fd: int) -> AsyncIterator[Child]:
    child = Child(spec, print, dict(os.environ))
    await child.start(parent_fd)
    try:
        yield child
    finally:
        await child.stop(1.0)


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
    parent, kept_open = os.pipe()
    async with AsyncExitStack() as stack:
        stack.callback(os.close, parent)
        stack.callback(os.close, kept_open)
        tiers: dict[str, list[str]] = {"prefill": [], "decode": []}
        children: dict[str, Child] = {}
        for name, folder in folders.items():
            options = ServeOptions(
                model=str(folder),
                served_model_name=name,
                dtype="float32",
                kv_cache_memory_bytes=32 << 20,
                max_local_prefill_tokens=0,
                log_level="warning",
            )
            for spec in plan_workers(options, num_cores=2):
                child = await stack.enter_async_context(running(spec, parent))
                assert child.report is not None
                tier = spec.name.partition("-")[0]
                tiers[tier].append(child.report.address)
                children[f"{tier} {name}"] = child
        gateway_options = GatewayOptions(
            model=str(BOX),
            served_model_name="code",
            more_models=(f"bytes={folders['bytes']}",),
            generation_config="none",
            port=0,
            prefill_workers=tuple(tiers["prefill"]),
            decode_workers=tuple(tiers["decode"]),
        )
        spec = ChildSpec("gateway", PROGRAMS.gateway, tuple(to_arguments(gateway_options)))
        report = (await stack.enter_async_context(running(spec, parent))).report
        assert report is not None
        client = await stack.enter_async_context(AsyncClient(report.address, max_retries=0))
        url = f"http://{report.http_address}/v1"
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

        await children["decode bytes"].stop(0.0)
        with pytest.raises(NoWorkers):
            await client.generate(PROMPT, model="bytes", **greedy)
        again = await client.generate(PROMPT, model="code", **greedy)
        assert list(again.token_ids) == outputs["code"]
