"""How KV is written into payloads: in the numbers of either peer, or in eight bits with scales;
how a range of it is cut into chunks, and in which order its bytes lie in one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from baton.types import (
    CONVERTIBLE_DTYPES,
    DTYPE_BYTES,
    SCALE_BYTES,
    SCALED_DTYPES,
    KvLayout,
)
from engine.kv.layout import groups_of
from engine.kv.range import KvRange

#: What a receiver may ask for; auto is the narrower of the two peers' own types.
WIRE_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "int8")


@dataclass(frozen=True, slots=True)
class WireFormat:
    """What the payloads of one connection are made of.

    A payload is runs, one after the other: of each of the sender's blocks the tokens that are in
    the piece, as elements of `dtype` [layers, parts, kv_heads, tokens, head_dim]. All is little
    endian. Of a dtype of SCALED_DTYPES there are two forms:

    * where the sender's pool has another dtype, float32 scales [layers, parts, kv_heads] come
      before all elements, one for a head's elements of the run;
    * where it has the same (has_row_scales), float32 scales [tokens] come behind the elements
      [tokens, head_dim] of each layer, part and head, as they lie in the pool.

    block_size: the sender's; num_parts: see KvLayout.parts. A group's records are no runs, but
    bytes as they lie in the pool; record_bytes: (group, bytes of a record in one layer).
    """

    dtype: str
    num_kv_heads: int
    head_dim: int
    block_size: int
    has_row_scales: bool = False
    num_parts: int = 2
    record_bytes: tuple[tuple[int, int], ...] = ()

    @property
    def token_layer_bytes(self) -> int:
        """Most bytes that a token takes in one layer: with scales of its own."""
        scale_bytes = SCALE_BYTES if self.dtype in SCALED_DTYPES else 0
        row_bytes = self.head_dim * DTYPE_BYTES[self.dtype] + scale_bytes
        return self.num_parts * self.num_kv_heads * row_bytes

    @property
    def least_chunk_bytes(self) -> int:
        """Bytes of a token, or a record, in one layer: the larger."""
        return max(self.token_layer_bytes, *(size for _, size in self.record_bytes), 0)

    def piece_layer_bytes(self, piece: KvRange) -> int:
        """Most bytes that a token of a piece takes in one of its layers."""
        return dict(self.record_bytes).get(piece.group, self.token_layer_bytes)

    def is_that_of(self, dtype: str) -> bool:
        """Whether runs lie in a pool of `dtype` as they do in a payload."""
        return self.dtype == dtype and (dtype in SCALED_DTYPES) == self.has_row_scales

    def num_bytes(self, piece: KvRange) -> int:
        """Bytes of the payload of a piece."""
        if piece.group and (record := dict(self.record_bytes).get(piece.group)) is not None:
            return piece.num_bytes(record)
        head_bytes = piece.num_tokens * self.head_dim * DTYPE_BYTES[self.dtype]
        if self.dtype in SCALED_DTYPES and piece.num_tokens:
            num_runs = -(-piece.end_token // self.block_size) - piece.first_token // self.block_size
            head_bytes += SCALE_BYTES * (piece.num_tokens if self.has_row_scales else num_runs)
        return piece.num_layers * self.num_parts * self.num_kv_heads * head_bytes


def wire_format(dtype: str, sender: KvLayout) -> WireFormat:
    """The format of payloads from blocks of `sender`. Raises ValueError unless KV can be turned
    from its dtype into `dtype`."""
    if dtype != sender.dtype and not {sender.dtype, dtype} <= CONVERTIBLE_DTYPES:
        raise ValueError(f"KV of {sender.dtype} cannot travel as {dtype!r}")
    has_row_scales = dtype == sender.dtype and dtype in SCALED_DTYPES
    return WireFormat(
        dtype,
        sender.num_kv_heads,
        sender.head_dim,
        sender.block_size,
        has_row_scales,
        sender.num_parts,
        tuple((group.number, group.layer_bytes) for group in groups_of(sender).records),
    )


def wire_formats(receiver: KvLayout) -> tuple[WireFormat, ...]:
    """Those that a receiver and senders that differ from it in nothing but their dtype may agree
    on, each once."""
    senders = CONVERTIBLE_DTYPES if receiver.dtype in CONVERTIBLE_DTYPES else {receiver.dtype}
    formats = {
        wire_format(agreed_dtype(sender, receiver.dtype, wanted), replace(receiver, dtype=sender))
        for sender in senders
        for wanted in WIRE_DTYPES
    }
    return tuple(sorted(formats, key=lambda one: (one.dtype, one.has_row_scales)))


def agreed_dtype(sender: str, receiver: str, wanted: str) -> str:
    """The element type that KV travels in. `wanted`: by the receiver, one of WIRE_DTYPES.

    KV that is not of numbers travels as it is. The peers' own types must be convertible, or equal.
    """
    if sender not in CONVERTIBLE_DTYPES:
        return sender
    if wanted != "auto":
        return wanted
    return min(receiver, sender, key=DTYPE_BYTES.__getitem__)


def most_token_layer_bytes(layout: KvLayout) -> int:
    """Bytes that a token, or a record, takes in one layer at most, in any type that a receiver with
    that layout agrees on."""
    dtypes = (layout.dtype, "float32")
    most = max(replace(layout, dtype=dtype).token_layer_bytes for dtype in dtypes)
    return max(most, *(group.layer_bytes for group in groups_of(layout).records), 0)


def chunks(
    piece: KvRange, token_layer_bytes: int, max_chunk_bytes: int, block_size: int = 1
) -> Iterator[KvRange]:
    """Cut `piece` into ranges of at most `max_chunk_bytes` bytes, in order of tokens, then layers.

    A chunk is as many whole blocks of `block_size` tokens as fit, over all layers of `piece`; where
    not even one fits, one block over as many layers as fit; where not even that does, as many
    tokens of one layer as fit. All are of the group of `piece`. A pool keeps all layers of a block,
    or of a group of it, side by side, so the fewer layers a chunk has, the shorter the pieces that
    packing copies. Raises ValueError if one token of one layer does not fit.
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
            last = min(num_layers, piece.end_layer - layer)
            yield KvRange(first_token, count, layer, last, piece.group)


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
