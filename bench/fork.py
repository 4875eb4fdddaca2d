"""Several choices of one prompt: what they share, beside as many separate requests.

    python -m bench.fork [--model DIR] [--rounds 5] [--prompt-tokens 512]
        [--output-tokens 64] [--json FILE]

One prefill worker, one decode worker. For each n, by turns in each round: one request of n choices,
and n requests of one choice at once, of the same prompt under a cache salt of their own, so that no
request finds another's prefix but those that run beside it. Told are medians over the rounds: KV
bytes that were sent, the most KV blocks that the decode worker held at a time, and tokens a second
from the request to the last token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.client import AsyncClient, Completion, SamplingParams
from baton.config import ServeOptions
from baton.supervisor import Cluster
from bench.machine import describe_commit, describe_machine, describe_versions

NUM_CHOICES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Shape:
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Of n outputs. max_blocks: most that the decode worker held at a time, as polled."""

    transfer_bytes: float
    max_blocks: float
    tokens_per_s: float


class BlockWatch:
    """Polls how many blocks the decode worker holds."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.max_blocks = 0

    async def run(self) -> None:
        while True:
            for worker in (await self._client.model()).workers:
                if worker.tier == "decode":
                    self.max_blocks = max(self.max_blocks, worker.num_leased_blocks)
            await asyncio.sleep(0.01)


async def measure(
    client: AsyncClient, prompt: Sequence[int], params: Sequence[SamplingParams], salt: str
) -> Cost:
    """Send one request for each of `params`, all at once."""
    watch = BlockWatch(client)
    watching = asyncio.create_task(watch.run())
    begin_s = time.monotonic()
    try:
        done: list[Completion] = await asyncio.gather(
            *(client.generate(prompt, one, cache_salt=salt) for one in params)
        )
        seconds = time.monotonic() - begin_s
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return Cost(
        transfer_bytes=sum(one.timing.transfer_bytes for one in done),
        max_blocks=watch.max_blocks,
        tokens_per_s=sum(one.usage.completion_tokens for one in done) / seconds,
    )


def median_of(costs: Sequence[Cost]) -> Cost:
    return Cost(
        statistics.median(cost.transfer_bytes for cost in costs),
        statistics.median(cost.max_blocks for cost in costs),
        statistics.median(cost.tokens_per_s for cost in costs),
    )


async def fork(model: str, num_rounds: int, shape: Shape) -> dict[int, dict[str, Cost]]:
    """By n, then by way ("choices" or "requests"), the median cost."""
    options = ServeOptions(
        model=model, port=0, log_level="error", max_num_seqs=32, max_local_prefill_tokens=0
    )
    rng = random.Random(1)
    costs: dict[int, dict[str, list[Cost]]] = {
        n: {"choices": [], "requests": []} for n in NUM_CHOICES
    }
    async with Cluster(options) as cluster, AsyncClient(cluster.address) as client:
        vocab_size = (await client.model()).vocab_size
        for number in range(num_rounds + 1):  # the first warms up
            for n, ways in costs.items():
                prompt = [rng.randrange(vocab_size) for _ in range(shape.prompt_tokens)]
                for way in rng.sample(sorted(ways), 2):
                    num_each, num_requests = (n, 1) if way == "choices" else (1, n)
                    params = [
                        SamplingParams(
                            n=num_each,
                            temperature=1.0,
                            seed=number * 100 + index,
                            max_tokens=shape.output_tokens,
                            ignore_eos=True,
                        )
                        for index in range(num_requests)
                    ]
                    cost = await measure(client, prompt, params, f"{number}-{n}-{way}")
                    if number:
                        ways[way].append(cost)
    return {n: {way: median_of(found) for way, found in ways.items()} for n, ways in costs.items()}


def table_of(medians: dict[int, dict[str, Cost]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in (
        "n",
        "one request: bytes",
        "blocks",
        "tok/s",
        "n requests: bytes",
        "blocks",
        "tok/s",
    ):
        table.add_column(heading, justify="right")
    for n, ways in medians.items():
        cells = [
            text
            for way in ("choices", "requests")
            for text in (
                f"{ways[way].transfer_bytes:,.0f}",
                f"{ways[way].max_blocks:.0f}",
                f"{ways[way].tokens_per_s:.0f}",
            )
        ]
        table.add_row(str(n), *cells)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="models/baton-py-6m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shape = Shape(arguments.prompt_tokens, arguments.output_tokens)
    medians = asyncio.run(fork(arguments.model, arguments.rounds, shape))
    Console().print(table_of(medians))
    if arguments.json:
        told = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "commit": describe_commit(),
            "shape": asdict(shape),
            "costs": {n: {w: asdict(c) for w, c in ways.items()} for n, ways in medians.items()},
        }
        arguments.json.write_text(json.dumps(told, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
