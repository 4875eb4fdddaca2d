"""Pack a token range of a block table into contiguous memory, and unpack it again.

packed [layers, parts, kv_heads, tokens, head_dim]; packed[l, k, h, t] = pool[table[p // size],
first_layer + l, k, h, p % size] with p = first_token + t.

kv_pack_summed and kv_unpack_summed handle a whole payload and compute its word_sum in the same
pass. A payload is a sequence of runs, each packed as above: see Runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from baton_kernels.dispatch import op
from baton_kernels.word_sum import word_sum


class Slab(Protocol):
    """A tensor, or a numpy array with its bits: anything that supports slicing and slice
    assignment.

    On the CPU, pass numpy views: numpy copies on the calling thread without the GIL, but torch
    starts a team of threads for each calling thread.
    """

    @property
    def shape(self) -> Any: ...

    def __getitem__(self, key: Any, /) -> Any: ...

    def __setitem__(self, key: Any, value: Any, /) -> None: ...


def block_runs(
    block_ids: Sequence[int], first_token: int, num_tokens: int, block_size: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (block id, offset in the block, index in the packed range, number of tokens) for each
    block of a token range."""
    done = 0
    while done < num_tokens:
        index, offset = divmod(first_token + done, block_size)
        count = min(block_size - offset, num_tokens - done)
        yield block_ids[index], offset, done, count
        done += count


@op
def kv_pack(
    pool: Slab, block_ids: Sequence[int], first_token: int, first_layer: int, packed: Slab
) -> None:
    """Fill `packed` [layers, parts, kv_heads, tokens, head_dim] from the blocks."""
    num_layers, num_tokens = packed.shape[0], packed.shape[3]
    layers = slice(first_layer, first_layer + num_layers)
    for block, offset, at, count in block_runs(block_ids, first_token, num_tokens, pool.shape[4]):
        packed[:, :, :, at : at + count] = pool[block, layers, :, :, offset : offset + count]


@op
def kv_unpack(
    pool: Slab, block_ids: Sequence[int], first_token: int, first_layer: int, packed: Slab
) -> None:
    """Write `packed` [layers, parts, kv_heads, tokens, head_dim] into the blocks."""
    num_layers, num_tokens = packed.shape[0], packed.shape[3]
    layers = slice(first_layer, first_layer + num_layers)
    for block, offset, at, count in block_runs(block_ids, first_token, num_tokens, pool.shape[4]):
        pool[block, layers, :, :, offset : offset + count] = packed[:, :, :, at : at + count]


class Runs(NamedTuple):
    """Layout of a payload: tokens [first_token, + num_tokens) of layers [first_layer, +
    num_layers), cut into runs at multiples of run_tokens (at least 1)."""

    first_token: int
    num_tokens: int
    first_layer: int
    num_layers: int
    run_tokens: int


@op
def kv_pack_summed(
    pool: torch.Tensor, block_ids: Sequence[int], runs: Runs, payload: torch.Tensor, key: int
) -> torch.Tensor:
    """Fill `payload`, int64 [words], from the blocks. Returns its word_sum under `key`, int64 [],
    on the pool's device.

    pool: int64 [blocks, layers, parts, kv_heads, block_size, words of a token's head], a view of
    elements of any type with rows of whole words.
    """
    for first_token, part in _parts(pool, runs, payload):
        kv_pack.twin(pool, block_ids, first_token, runs.first_layer, part)
    return word_sum(payload, key)


@op
def kv_unpack_summed(
    pool: torch.Tensor, block_ids: Sequence[int], runs: Runs, payload: torch.Tensor, key: int
) -> torch.Tensor:
    """Write `payload` into the blocks and return its word_sum. Arguments as for kv_pack_summed."""
    taken = payload.clone()
    for first_token, part in _parts(pool, runs, taken):
        kv_unpack.twin(pool, block_ids, first_token, runs.first_layer, part)
    return word_sum(taken, key)


def _parts(
    pool: torch.Tensor, runs: Runs, payload: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the first token of each run and its words [layers, parts, kv_heads, tokens, words of a
    token's head]."""
    num_parts, num_kv_heads, _, row_words = pool.shape[2:]
    token_words = runs.num_layers * num_parts * num_kv_heads * row_words
    at, end = runs.first_token, runs.first_token + runs.num_tokens
    while at < end:
        border = min((at // runs.run_tokens + 1) * runs.run_tokens, end)
        words = payload[
            (at - runs.first_token) * token_words : (border - runs.first_token) * token_words
        ]
        yield at, words.view(runs.num_layers, num_parts, num_kv_heads, border - at, row_words)
        at = border
