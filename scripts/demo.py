"""The demonstration: three processes, one answer, and where its time went. The bundled model
completes Python; any other with a chat template answers a question."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from baton.cli.timing import render_timing
from baton.client import AsyncClient, Usage
from baton.config import ServeOptions
from baton.errors import BatonError
from baton.supervisor import ChildFailed, Cluster, describe_start

_KV_BYTES = 256 << 20
_BUNDLED = "baton-py-6m"

#: Longer than a block, so that the prefill tier reads it and hands it over.
PROMPT = '''import os


def find_files(path, suffix):
    """Return the names of the files below path that end with suffix."""
    names = []
    for name in os.listdir(path):
'''


QUESTION = "Give me three tips for a good night's sleep."


async def demo(model: str, prompt: str | None, max_tokens: int) -> Usage:
    """Start the tiers, stream one answer to stdout, and stop them. prompt: a text, or a question in
    a chat; None for the demonstration's own. Raises BatonError."""
    options = ServeOptions(
        model=model, port=0, log_level="warning", kv_cache_memory_bytes=_KV_BYTES
    )
    print(f"Starting gateway, prefill worker and decode worker for {model} ...", flush=True)
    is_bundled = Path(model).name == _BUNDLED
    async with Cluster(options) as cluster:
        print(f"Ready at {cluster.address}: {describe_start(cluster.phases)}\n")
        async with AsyncClient(cluster.address) as client:
            is_chat = not is_bundled and (await client.model()).has_chat_template
            text = prompt or (QUESTION if is_chat else PROMPT)
            usage = await complete(client, text, max_tokens, is_chat=is_chat)
        print("\nStopping ...", flush=True)
    return usage


async def complete(
    client: AsyncClient, prompt: str, max_tokens: int, *, is_chat: bool = False
) -> Usage:
    """Stream one completion, or one answer in a chat, and print its timing."""
    print(prompt, end="\n\n" if is_chat else "", flush=True)
    usage = Usage()
    given = [{"role": "user", "content": prompt}] if is_chat else prompt
    temperature = 0.2 if is_chat else 0.7
    stream = client.stream(given, max_tokens=max_tokens, temperature=temperature, top_p=0.9, seed=1)
    async with stream:
        async for chunk in stream:
            print(chunk.text, end="", flush=True)
            if chunk.usage and chunk.timing:
                usage = chunk.usage
                print(f"\n\n{render_timing(chunk.timing, usage)}")
    return usage


def main() -> int:
    """0 if a completion came, 1 if not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt")
    parser.add_argument("--max-tokens", type=int, default=96)
    arguments = parser.parse_args()
    try:
        usage = asyncio.run(demo(arguments.model, arguments.prompt, arguments.max_tokens))
    except BatonError as error:
        if isinstance(error, ChildFailed):
            sys.stderr.write("\n".join((*error.last_lines, "")))
        sys.stderr.write(f"demo: error: {error}\n")
        return 1
    return 0 if usage.completion_tokens else 1


if __name__ == "__main__":
    sys.exit(main())
