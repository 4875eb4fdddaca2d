"""Baton's service as a contender: gateway and one worker that does both, in processes of their own,
asked through the client.

python -m bench.peers.service MODEL DTYPE THREADS
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from baton.client import AsyncClient, SamplingParams
from baton.config import ServeOptions
from baton.model.config import read_config
from baton.supervisor import Cluster
from bench.peers.task import Answer, Task, emit, prompts_of, task_of

_MAX_MODEL_LEN = 2048
_MAX_NUM_SEQS = 32


@dataclass(frozen=True, slots=True)
class _Written:
    """One answer. first_s, last_s: when its first and its last piece came. num_first: tokens in the
    first piece."""

    first_s: float
    last_s: float
    num_first: int
    token_ids: tuple[int, ...]

    @property
    def step_s(self) -> float:
        """The mean, over what came after the first piece."""
        return (self.last_s - self.first_s) / max(1, len(self.token_ids) - self.num_first)


def _options(model: str, dtype: str, num_threads: int) -> ServeOptions:
    return ServeOptions.model_validate(
        {
            "model": model,
            "dtype": dtype,
            "num_threads": num_threads,
            "colocated": True,
            "num_decode_workers": 1,
            "max_model_len": _MAX_MODEL_LEN,
            "max_num_seqs": _MAX_NUM_SEQS,
            "speculative_method": "none",
            "enable_prefix_caching": False,
            "log_level": "error",
            "port": 0,
        }
    )


async def run(client: AsyncClient, task: Task, vocab_size: int) -> Answer:
    """All prompts at once. A step is known as the mean of each stream."""
    started = time.perf_counter()
    written = await asyncio.gather(
        *(_write(client, prompt, task.num_tokens) for prompt in prompts_of(task, vocab_size))
    )
    return Answer(
        max(one.first_s for one in written) - started,
        tuple(one.step_s for one in written),
        tuple(one.token_ids for one in written),
    )


async def _write(client: AsyncClient, prompt: list[int], num_tokens: int) -> _Written:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    tokens: list[int] = []
    first_s = last_s = 0.0
    num_first = 0
    async with client.stream(prompt, params, cache_salt=secrets.token_hex(8)) as stream:
        async for chunk in stream:
            if chunk.token_ids:
                last_s = time.perf_counter()
                tokens += chunk.token_ids
            if not num_first:
                first_s, num_first = last_s, len(tokens)
    return _Written(first_s, last_s, num_first, tuple(tokens))


async def serve(model: str, dtype: str, num_threads: int) -> None:
    """Answer tasks until stdin ends. The loop runs between them, too: services wish to be heard."""
    vocab_size = read_config(Path(model)).vocab_size
    options = _options(model, dtype, num_threads)
    async with Cluster(options) as cluster, AsyncClient(cluster.address, max_retries=0) as client:
        while line := await asyncio.to_thread(sys.stdin.readline):
            emit(await run(client, task_of(line), vocab_size))


def main() -> None:
    """Serve."""
    model, dtype, num_threads = sys.argv[1:]
    asyncio.run(serve(model, dtype, int(num_threads)))


if __name__ == "__main__":
    main()
