"""Cost of a prompt with latent attention that does not expand keys and values.

    python -m bench.latent [--tokens 512 2048 4096] [--num-threads 1] [--rounds 3]

One layer of DeepSeek-V2-Lite's shape (16 heads, latent of 512 and 64 rotated dimensions, 128 per
head) with random weights in bfloat16. Compares a whole prompt's attention over the rows of the KV
cache, as Baton computes it, with attention over expanded keys and values. Both include the products
with each head's matrix; common parts are left out. Expanded values are as wide as keys, because the
kernel has one width. Variants take turns; medians of CPU seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton_kernels.experts import GroupedLinear, headwise_linear
from baton_kernels.kv_write import block_rows, head_rows, kv_write
from baton_kernels.linear import pack_linear
from baton_kernels.paged_attention import AttentionSlice, paged_attention, plan_attention

HEADS, RANK, ROPE, NOPE, VALUE = 16, 512, 64, 128, 128
BLOCK_SIZE = 16
DTYPE = torch.bfloat16
SCALE = (NOPE + ROPE) ** -0.5


@dataclass(frozen=True)
class Prompt:
    """Per head: query [tokens, heads, NOPE], turned [tokens, heads, ROPE]. Cached per token: latent
    [tokens, RANK], key [tokens, ROPE]."""

    query: torch.Tensor
    turned: torch.Tensor
    latent: torch.Tensor
    key: torch.Tensor

    @classmethod
    def random(cls, tokens: int) -> Prompt:
        return cls(
            random(tokens, HEADS, NOPE),
            random(tokens, HEADS, ROPE),
            random(tokens, RANK),
            random(tokens, ROPE),
        )


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(DTYPE)


@dataclass(frozen=True)
class Heads:
    """Each head's matrices: queries to latents; latents to keys, the transpose of the first; and
    latents to values."""

    queries: GroupedLinear
    keys: GroupedLinear
    values: GroupedLinear

    @classmethod
    def random(cls) -> Heads:
        keys = [random(NOPE, RANK) * RANK**-0.5 for _ in range(HEADS)]
        values = [random(VALUE, RANK) * RANK**-0.5 for _ in range(HEADS)]
        queries = [weight.T.contiguous() for weight in keys]
        return cls(
            *(GroupedLinear([pack_linear(w, None) for w in ws]) for ws in (queries, keys, values))
        )


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parts: int) -> torch.Tensor:
    """Causal attention through a pool with the prompt's own blocks."""
    tokens, kv_heads, width = key.shape
    blocks = -(-tokens // BLOCK_SIZE)
    pool = torch.zeros(blocks, 1, parts, kv_heads, BLOCK_SIZE, width, dtype=DTYPE)
    place = torch.arange(tokens)
    first = place // BLOCK_SIZE * block_rows(pool) + place % BLOCK_SIZE
    kv_write(pool, 0, head_rows(first, pool), key, value if parts == 2 else None)
    part = AttentionSlice(0, tokens, 0, list(range(blocks)))
    plan = plan_attention([part], pool, HEADS, SCALE, None, DTYPE)
    return paged_attention(query, key, value, pool, 0, plan)


def absorbed(prompt: Prompt, heads: Heads) -> torch.Tensor:
    """[tokens, heads, VALUE]."""
    query = torch.cat((headwise_linear(prompt.query, heads.queries), prompt.turned), -1)
    row = torch.cat((prompt.latent, prompt.key), -1)[:, None]
    return headwise_linear(attend(query, row, row[..., :RANK], 1), heads.values)


def expanded(prompt: Prompt, heads: Heads) -> torch.Tensor:
    """Equal to `absorbed` except for rounding."""
    latents = prompt.latent[:, None].expand(-1, HEADS, -1)
    turned = prompt.key[:, None].expand(-1, HEADS, -1)
    key = torch.cat((headwise_linear(latents, heads.keys), turned), -1)
    value = torch.nn.functional.pad(
        headwise_linear(latents, heads.values), (0, key.shape[2] - VALUE)
    )
    return attend(torch.cat((prompt.query, prompt.turned), -1), key, value, 2)[..., :VALUE]


def seconds(way: Callable[[Prompt, Heads], torch.Tensor], prompt: Prompt, heads: Heads) -> float:
    start_s = time.process_time()
    way(prompt, heads)
    return time.process_time() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    torch.manual_seed(0)
    heads = Heads.random()
    print("| Tokens | rows as they are, ms | expanded, ms | ratio |\n|---|---|---|---|")
    for tokens in arguments.tokens:
        prompt = Prompt.random(tokens)
        found = [
            (seconds(absorbed, prompt, heads), seconds(expanded, prompt, heads))
            for _ in range(arguments.rounds)
        ]
        plain, wide = (1e3 * statistics.median(times) for times in zip(*found, strict=True))
        print(f"| {tokens:,} | {plain:.0f} | {wide:.0f} | {plain / wide:.2f} |", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
