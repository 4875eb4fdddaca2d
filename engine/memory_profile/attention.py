"""Memory of one prompt's attention: eager, with the scores of all heads at once, and paged, with an
online softmax over blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from baton_kernels.paged_attention import AttentionSlice, paged_attention, plan_attention
from engine.memory_profile.recorder import MemoryRecorder, Point

_NUM_LAYERS = 2
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a model. chunk: most new tokens of a paged step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    chunk: int


@dataclass(frozen=True, slots=True)
class AttentionRun:
    """kind: of KINDS. points: memory while two layers run one after the other, empty if the
    scores would not fit."""

    kind: str
    num_tokens: int
    points: tuple[Point, ...]


class Prompt:
    """Queries, keys and values of one prompt, random, in a pool of one layer."""

    def __init__(self, shape: AttentionShape, num_tokens: int) -> None:
        self.shape, self.num_tokens = shape, num_tokens
        generator = torch.Generator(shape.device).manual_seed(num_tokens)
        self.num_blocks = -(-num_tokens // _BLOCK_SIZE)
        size = (self.num_blocks, 1, 2, shape.num_kv_heads, _BLOCK_SIZE, shape.head_dim)
        self.pool = _normal(size, shape, generator)
        # Keys and values [tokens, kv_heads, head_dim], as the pool's blocks have them.
        flat = self.pool[:, 0].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :num_tokens]
        self.key, self.value = (each.contiguous() for each in flat)
        heads = (num_tokens, shape.num_heads, shape.head_dim)
        self.query = _normal(heads, shape, generator)


def _normal(
    size: tuple[int, ...], shape: AttentionShape, generator: torch.Generator
) -> torch.Tensor:
    empty = torch.empty(size, dtype=shape.dtype, device=shape.device)
    return empty.normal_(generator=generator)


def eager(prompt: Prompt) -> torch.Tensor:
    """softmax(query key^T + mask) value [tokens, heads, head_dim], as models without a fused kernel
    compute it: weights in float32, one matrix [tokens, tokens] of each head."""
    shape = prompt.shape
    query = prompt.query.transpose(0, 1)
    repeats = shape.num_heads // shape.num_kv_heads
    key, value = (
        each.transpose(0, 1).repeat_interleave(repeats, 0) for each in (prompt.key, prompt.value)
    )
    scores = (query @ key.transpose(1, 2)).mul_(shape.head_dim**-0.5)
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=shape.device).triu_(1)
    scores.masked_fill_(hidden, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(shape.dtype)
    mixed: torch.Tensor = weights @ value
    return mixed.transpose(0, 1)


def paged(prompt: Prompt) -> torch.Tensor:
    """The same by Baton's kernel, in chunks as a worker computes them."""
    shape, table = prompt.shape, tuple(range(prompt.num_blocks))
    out = torch.empty_like(prompt.query)
    for start in range(0, prompt.num_tokens, shape.chunk):
        rows = slice(start, min(start + shape.chunk, prompt.num_tokens))
        query, key, value = (each[rows] for each in (prompt.query, prompt.key, prompt.value))
        part = AttentionSlice(0, len(query), start, table)
        scale = shape.head_dim**-0.5
        plan = plan_attention((part,), prompt.pool, shape.num_heads, scale, None, shape.dtype)
        out[rows] = paged_attention(query, key, value, prompt.pool, 0, plan)
    return out


KINDS: Mapping[str, Callable[[Prompt], torch.Tensor]] = MappingProxyType(
    {"eager": eager, "paged": paged}
)


def eager_bytes(shape: AttentionShape, num_tokens: int) -> int:
    """Peak of eager: scores, float32 weights and, in 16 bits, their copy in the dtype."""
    is_copied = shape.dtype is not torch.float32
    each = (1 + is_copied) * shape.dtype.itemsize + 4
    return shape.num_heads * num_tokens**2 * each


def record_attention(
    shape: AttentionShape, kind: str, num_tokens: int, free_bytes: int, recorder: MemoryRecorder
) -> AttentionRun:
    """Record two layers. Eager attention that needs more than half of free_bytes is left out."""
    if kind == "eager" and eager_bytes(shape, num_tokens) > free_bytes // 2:
        return AttentionRun(kind, num_tokens, ())
    attend, prompt = KINDS[kind], Prompt(shape, num_tokens)
    with torch.inference_mode():
        attend(Prompt(shape, min(num_tokens, 64)))  # One-time costs of the process.
        with recorder:
            for _ in range(_NUM_LAYERS):
                attend(prompt)
    return AttentionRun(kind, num_tokens, tuple(recorder.points()))
