"""How a range of KV is cut into chunks, and in which order its bytes lie in one."""

from __future__ import annotations

from collections.abc import Iterator

from baton.types import KvRange


def chunks(
    piece: KvRange, token_layer_bytes: int, max_chunk_bytes: int, block_size: int = 1
) -> Iterator[KvRange]:
    """Cut `piece` into ranges of at most `max_chunk_bytes` bytes, in order of tokens, then layers.

    A chunk is as many whole blocks of `block_size` tokens as fit, over all layers of `piece`; where
    not even one fits, one block over as many layers as fit; where not even that does, as many
    tokens of one layer as fit. A pool keeps all layers of a block side by side, so the fewer layers
    a chunk has, the shorter the pieces that packing copies. Raises ValueError if one token of one
    layer does not fit.
    """
    if max_chunk_bytes < token_layer_bytes:
        raise ValueError(
            f"chunks of {max_chunk_bytes} bytes cannot hold a token of {token_layer_bytes}"
        )
    num_fitting = max_chunk_bytes // token_layer_bytes
    num_tokens = num_fitting // piece.num_layers // block_size * block_size
    num_layers = piece.num_layers
    if not num_tokens:
        num_tokens = min(block_size, num_fitting)
        num_layers = num_fitting // num_tokens
    for first_token, count in runs(piece.first_token, piece.num_tokens, num_tokens, block_size):
        for layer in range(piece.first_layer, piece.end_layer, num_layers):
            yield KvRange(first_token, count, layer, min(num_layers, piece.end_layer - layer))


def runs(
    first_token: int, num_tokens: int, step: int, block_size: int
) -> Iterator[tuple[int, int]]:
    """Cut tokens into (first token, count) of `step` at most, with cuts at multiples of block_size
    or within a block.

    step: a multiple of block_size, or less than it.
    """
    token, end = first_token, first_token + num_tokens
    while token < end:
        border = (token // block_size + max(1, step // block_size)) * block_size
        count = min(border - token, step, end - token)
        yield token, count
        token += count
