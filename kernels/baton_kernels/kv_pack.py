"""Pack a token range of a block table into contiguous memory, and unpack it again.

packed [layers, 2, kv_heads, tokens, head_dim]; packed[l, k, h, t] = pool[table[p // size], first_layer + l, k, h, p % size]
with p = first_token + t.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from baton_kernels.dispatch import op


class Slab(Protocol):
    """A tensor or an array of its bits: something sliced and assigned by slices.

    On the CPU pass numpy views: their copies run on the calling thread alone and without the GIL, where torch
    would start a team of threads for every thread that calls it.
    """

    @property
    def shape(self) -> Any: ...

    def __getitem__(self, key: Any, /) -> Any: ...

    def __setitem__(self, key: Any, value: Any, /) -> None: ...


def block_runs(
    block_ids: Sequence[int], first_token: int, num_tokens: int, block_size: int
) -> Iterator[tuple[int, int, int, int]]:
    """(block id, offset in the block, index in the packed range, count) of each block's part of a token range."""
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
    """Fill `packed` [layers, 2, kv_heads, tokens, head_dim] from the blocks."""
    num_layers, num_tokens = packed.shape[0], packed.shape[3]
    layers = slice(first_layer, first_layer + num_layers)
    for block, offset, at, count in block_runs(block_ids, first_token, num_tokens, pool.shape[4]):
        packed[:, :, :, at : at + count] = pool[block, layers, :, :, offset : offset + count]


@op
def kv_unpack(
    pool: Slab, block_ids: Sequence[int], first_token: int, first_layer: int, packed: Slab
) -> None:
    """Write `packed` [layers, 2, kv_heads, tokens, head_dim] into the blocks."""
    num_layers, num_tokens = packed.shape[0], packed.shape[3]
    layers = slice(first_layer, first_layer + num_layers)
    for block, offset, at, count in block_runs(block_ids, first_token, num_tokens, pool.shape[4]):
        pool[block, layers, :, :, offset : offset + count] = packed[:, :, :, at : at + count]
