"""Adapters over both tiers, in real services: an adapter on one of two concurrent requests changes
exactly that one, whatever lies in caches; the names are those of models."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from baton.client import Completion, SamplingParams
from baton.errors import ModelNotFound
from baton.types import Sampling
from engine.oracle import oracle_tokens
from tests.engine.torch.test_adapters import NUM_TOKENS, greedy_of, prompts
from tests.support.adapters import make_adapter, merged
from tests.support.live_tiers import ONLY_DECODES, LiveSystem, has_crossed, live_system
from tests.support.tiny_models import make_tiny_model

PROMPT = [7, 8, 9] * 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ORACLE = {"lora_modules": ("red=any", "blue=any")}


def wanted(adapter: str) -> tuple[int, ...]:
    return tuple(oracle_tokens(PROMPT, Sampling(max_tokens=12), 1000, adapter=adapter))


async def complete(system: LiveSystem, model: str) -> Completion:
    return await system.client.generate(PROMPT, GREEDY, model=model)


@pytest.mark.slow
@pytest.mark.parametrize("decode_options", [ONLY_DECODES, {}], ids=["handed off", "either"])
async def test_requests_side_by_side_get_their_own_tokens(decode_options: dict[str, Any]) -> None:
    """With the same prompt: cached KV is found by requests of the same adapter only."""
    models = ("", "red", "oracle", "blue", "red", "blue")
    async with live_system(worker_options=ORACLE, decode_options=decode_options) as system:
        first = [await complete(system, model) for model in ("", "red", "blue")]
        assert [done.token_ids for done in first] == [wanted(name) for name in ("", "red", "blue")]
        assert [done.usage.cached_tokens for done in first] == [0, 0, 0]
        assert [done.usage.decode_cached_tokens for done in first] == [0, 0, 0]
        again = await asyncio.gather(*(complete(system, model) for model in models))
        for model, done in zip(models, again, strict=True):
            assert done.token_ids == wanted("" if model == "oracle" else model)
            assert done.usage.cached_tokens or done.usage.decode_cached_tokens
        assert not decode_options or all(map(has_crossed, first))
        await system.until_quiet()


async def test_models_that_are_listed() -> None:
    def get(url: str) -> Any:
        with urllib.request.urlopen(url, timeout=30) as response:
            return json.load(response)

    def post(url: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    options = {"http_port": 0, "served_model_aliases": ("again",)}
    async with live_system(worker_options=ORACLE, gateway_options=options) as system:
        await complete(system, "")
        listed = await asyncio.to_thread(get, f"http://{system.http}/v1/models")
        parents = {entry["id"]: entry["parent"] for entry in listed["data"]}
        assert parents == {"oracle": None, "again": None, "red": "oracle", "blue": "oracle"}
        entry = await asyncio.to_thread(get, f"http://{system.http}/v1/models/red")
        assert (entry["id"], entry["parent"]) == ("red", "oracle")
        named = [(model.name, model.parent) for model in await system.client.models()]
        assert named == [("oracle", ""), ("red", "oracle"), ("blue", "oracle")]
        body = {"model": "blue", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        done = await asyncio.to_thread(
            post, f"http://{system.http}/v1/completions", {**body, "ignore_eos": True}
        )
        assert done["model"] == "blue"
        text = await system.client.detokenize(wanted("blue"))
        assert done["choices"][0]["text"] == text
        with pytest.raises(ModelNotFound, match="with adapters 'red', 'blue'"):
            await complete(system, "green")


@pytest.mark.slow
async def test_an_adapter_changes_exactly_its_own_request(tmp_path: Path) -> None:
    """A model of random weights, with KV that crosses from tier to tier."""
    model = make_tiny_model(tmp_path / "model", "qwen2")
    adapter = make_adapter(tmp_path / "adapter", model)
    prompt = prompts()[1]
    (_, plain), (_, own) = (
        greedy_of(path) for path in (model, merged(tmp_path / "merged", model, adapter))
    )
    options = {
        "engine": "torch",
        "model": str(model),
        "served_model_name": "tiny",
        "lora_modules": (f"mine={adapter}",),
        "num_gpu_blocks_override": 64,
        "num_threads": 1,
    }
    front = {"model": str(model), "served_model_name": "tiny"}
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    async with live_system(
        worker_options=options, decode_options=ONLY_DECODES, gateway_options=front
    ) as system:
        for names in (("mine", ""), ("tiny", "mine")):
            both = await asyncio.gather(
                *(system.client.generate(prompt, params, model=name) for name in names)
            )
            for name, done in zip(names, both, strict=True):
                assert list(done.token_ids) == (own if name == "mine" else plain)
                assert has_crossed(done)
    assert plain != own
