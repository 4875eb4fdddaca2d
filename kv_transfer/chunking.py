"""How a range of KV is cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator

from kv_transfer.coverage import KvRange


def chunks(piece: KvRange, token_layer_bytes: int, max_chunk_bytes: int) -> Iterator[KvRange]:
    """Cut `piece` into ranges of at most `max_chunk_bytes` bytes, in order of layers, then tokens.

    Whole layers are kept together while they fit, because long runs of tokens are what packs fast.
    Raises ValueError if one token of one layer does not fit.
    """
    if max_chunk_bytes < token_layer_bytes:
        raise ValueError(
            f"chunks of {max_chunk_bytes} bytes cannot hold a token of {token_layer_bytes}"
        )
    layer_bytes = piece.num_tokens * token_layer_bytes
    if layer_bytes <= max_chunk_bytes:
        step = max_chunk_bytes // layer_bytes
        for layer in range(piece.first_layer, piece.end_layer, step):
            num_layers = min(step, piece.end_layer - layer)
            yield KvRange(piece.first_token, piece.num_tokens, layer, num_layers)
        return
    step = max_chunk_bytes // token_layer_bytes
    for layer in range(piece.first_layer, piece.end_layer):
        for token in range(piece.first_token, piece.end_token, step):
            yield KvRange(token, min(step, piece.end_token - token), layer, 1)
