"""Format of KV in payloads: in a peer's dtype, or in eight bits with scales; also how a range is
cut into chunks, and the byte order within one."""

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

#: Values of a receiver's option; auto selects the narrower of the two peers' dtypes.
WIRE_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "int8")


@dataclass(frozen=True, slots=True)
class WireFormat:
    """Format of the payloads of one connection.

    A payload is a sequence of runs, one per sender block: the piece's tokens in that block, as
    elements of `dtype` [layers, parts, kv_heads, tokens, head_dim]. All is little endian. A dtype
    of SCALED_DTYPES has two forms:

    * if the sender's pool has another dtype, float32 scales [layers, parts, kv_heads] precede all
      elements, one for a head's elements of the run;
    * if it has the same (has_row_scales), float32 scales [tokens] follow the elements
      [tokens, head_dim] of each layer, part and head, as in the pool.

    block_size: the sender's. num_parts: see KvLayout.parts. State records of a group are not runs,
    but bytes as in the pool; record_bytes: (group, bytes of a record in one layer).
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
        """Maximum bytes of a token in one layer, including scales of its own."""
        scale_bytes = SCALE_BYTES if self.dtype in SCALED_DTYPES else 0
        row_bytes = self.head_dim * DTYPE_BYTES[self.dtype] + scale_bytes
        return self.num_parts * self.num_kv_heads * row_bytes

    @property
    def least_chunk_bytes(self) -> int:
        """Maximum of the bytes of a token and of a record, in one layer."""
        return max(self.token_layer_bytes, *(size for _, size in self.record_bytes), 0)

    def piece_layer_bytes(self, piece: KvRange) -> int:
        """Maximum bytes of a token of a piece, in one of its layers."""
        record = self._record_bytes_of(piece)
        return self.token_layer_bytes if record is None else record

    def _record_bytes_of(self, piece: KvRange) -> int | None:
        """Bytes of a record of the piece's group in one layer; None if it has token rows."""
        for group, num_bytes in self.record_bytes:
            if group == piece.group:
                return num_bytes
        return None

    def is_that_of(self, dtype: str) -> bool:
        """Whether runs are stored in a pool of `dtype` exactly as in a payload."""
        return self.dtype == dtype and (dtype in SCALED_DTYPES) == self.has_row_scales

    def num_bytes(self, piece: KvRange) -> int:
        """Bytes of the payload of a piece."""
        if (record := self._record_bytes_of(piece)) is not None:
            return piece.num_bytes(record)
        head_bytes = piece.num_tokens * self.head_dim * DTYPE_BYTES[self.dtype]
        if self.dtype in SCALED_DTYPES and piece.num_tokens:
            num_runs = -(-piece.end_token // self.block_size) - piece.first_token // self.block_size
            head_bytes += SCALE_BYTES * (piece.num_tokens if self.has_row_scales else num_runs)
        return piece.num_layers * self.num_parts * self.num_kv_heads * head_bytes


def wire_format(dtype: str, sender: KvLayout) -> WireFormat:
    """The format of payloads from blocks of `sender`. Raises ValueError if its dtype cannot be
    converted to `dtype`."""
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
    """The distinct formats that a receiver may agree on with senders that differ only in dtype."""
    senders = CONVERTIBLE_DTYPES if receiver.dtype in CONVERTIBLE_DTYPES else {receiver.dtype}
    formats = {
        wire_format(agreed_dtype(sender, receiver.dtype, wanted), replace(receiver, dtype=sender))
        for sender in senders
        for wanted in WIRE_DTYPES
    }
    return tuple(sorted(formats, key=lambda one: (one.dtype, one.has_row_scales)))


def agreed_dtype(sender: str, receiver: str, wanted: str) -> str:
    """The wire dtype. wanted: by the receiver, one of WIRE_DTYPES.

    Non-numeric KV is sent unchanged. The peers' dtypes must be convertible, or equal.
    """
    if sender not in CONVERTIBLE_DTYPES:
        return sender
    if wanted != "auto":
        return wanted
    return min(receiver, sender, key=DTYPE_BYTES.__getitem__)


def most_token_layer_bytes(layout: KvLayout) -> int:
    """Maximum bytes of a token, or a record, in one layer, over all dtypes that a receiver with
    that layout accepts."""
    dtypes = (layout.dtype, "float32")
    most = max(replace(layout, dtype=dtype).token_layer_bytes for dtype in dtypes)
    return max(most, *(group.layer_bytes for group in groups_of(layout).records), 0)


def chunks(
    piece: KvRange, token_layer_bytes: int, max_chunk_bytes: int, block_size: int = 1
) -> Iterator[KvRange]:
    """Cut `piece` into ranges of at most `max_chunk_bytes` bytes, ordered by token, then layer.

    A chunk has as many whole blocks of `block_size` tokens as fit, over all layers of `piece`;
    otherwise one block over as many layers as fit; otherwise as many tokens of one layer as fit.
    All are of the group of `piece`. A pool stores all layers of a block, or of a group of it,
    contiguously, so fewer layers per chunk mean shorter copies. Raises ValueError if one token of
    one layer does not fit.
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
    """Cut tokens into (first token, count) of at most `step`, at multiples of block_size or within
    a block.

    step: a multiple of block_size, or less than it.
    """
    token, end = first_token, first_token + num_tokens
    while token < end:
        border = (token // block_size + max(1, step // block_size)) * block_size
        count = min(border - token, step, end - token)
        yield token, count
        token += count
