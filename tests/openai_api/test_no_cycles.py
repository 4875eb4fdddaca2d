"""A request leaves nothing behind that only a full collection of garbage frees: a thousand that end
together would stop the gateway's event loop."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncClient, SamplingParams
from baton.errors import BatonError
from tests.openai_api.test_raw_http import oracle_system

pytestmark = pytest.mark.slow

NUM = 8


async def _by_http(address: str, num_tokens: int, leaves_after_s: float | None) -> None:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": [5, 6], "max_tokens": num_tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    if leaves_after_s is None:
        await reader.readuntil(b"[DONE]")
    else:
        await asyncio.sleep(leaves_after_s)
    writer.close()


async def _by_grpc(client: AsyncClient, num_tokens: int, leaves_after_s: float | None) -> None:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    try:
        async with asyncio.timeout(leaves_after_s):
            async with client.stream((5, 6), params) as stream:
                async for _ in stream:
                    pass
    except (TimeoutError, BatonError):
        pass


@pytest.mark.parametrize("door", ["http", "grpc"])
@pytest.mark.parametrize("leaves_after_s", [None, 0.1])
async def test_a_request_leaves_no_cycle(
    tmp_path: Path, door: str, leaves_after_s: float | None
) -> None:
    num_tokens = 4 if leaves_after_s is None else 1000
    options = {"oracle_step_ms": 20.0, "max_num_seqs": 4}
    async with oracle_system(tmp_path, worker_options=options) as system:

        def ask() -> Coroutine[Any, Any, None]:
            if door == "http":
                return _by_http(system.http, num_tokens, leaves_after_s)
            return _by_grpc(system.client, num_tokens, leaves_after_s)

        async def ask_all() -> None:
            await asyncio.gather(*(ask() for _ in range(NUM)))
            await system.until_quiet()

        await ask_all()
        gc.collect()
        gc.disable()
        try:
            await ask_all()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
        finally:
            gc.set_debug(0)
            gc.enable()
        found = Counter(f"{type(each).__module__}.{type(each).__name__}" for each in gc.garbage)
        gc.garbage.clear()
    ours = {name: num for name, num in found.items() if name.startswith(("gateway.", "baton."))}
    assert not ours or max(ours.values()) < NUM, ours
