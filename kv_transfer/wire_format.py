"""How KV is written into payloads: in the numbers of either peer, or in eight bits with scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from baton.types import CONVERTIBLE_DTYPES, DTYPE_BYTES, KvLayout
from kv_transfer.coverage import KvRange

#: What a receiver may ask for; auto is the narrower of the two peers' own types.
WIRE_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "int8")

SCALE_BYTES = 4
#: Element types of the wire alone. Each head's elements of a run are told as multiples of one float32.
SCALED_DTYPES = frozenset({"fp8", "int8"})
_ELEMENT_BYTES: Mapping[str, int] = MappingProxyType(
    dict(DTYPE_BYTES) | dict.fromkeys(SCALED_DTYPES, 1)
)


@dataclass(frozen=True, slots=True)
class WireFormat:
    """What the payloads of one connection are made of.

    A payload is runs, one after the other: of each of the sender's blocks the tokens that are in the piece, as elements of
    `dtype` [layers, 2, kv_heads, tokens, head_dim]; before them, for a dtype of SCALED_DTYPES, their scales, float32
    [layers, 2, kv_heads]. All is little endian. block_size: the sender's.
    """

    dtype: str
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def token_layer_bytes(self) -> int:
        """Most bytes that a token takes in one layer: with scales of its own."""
        return 2 * self.num_kv_heads * (self.head_dim * self._element_bytes + self._scale_bytes)

    def num_bytes(self, piece: KvRange) -> int:
        """Bytes of the payload of a piece."""
        num_runs = 0
        if piece.num_tokens:
            last_token = piece.end_token - 1
            num_runs = last_token // self.block_size - piece.first_token // self.block_size + 1
        elements = piece.num_tokens * self.head_dim * self._element_bytes
        return piece.num_layers * 2 * self.num_kv_heads * (elements + num_runs * self._scale_bytes)

    @property
    def _element_bytes(self) -> int:
        return _ELEMENT_BYTES[self.dtype]

    @property
    def _scale_bytes(self) -> int:
        return SCALE_BYTES if self.dtype in SCALED_DTYPES else 0


def wire_format(dtype: str, sender: KvLayout) -> WireFormat:
    """The format of payloads from blocks of `sender`. Raises ValueError unless KV can be turned from its dtype into `dtype`."""
    if dtype != sender.dtype and not (
        sender.dtype in CONVERTIBLE_DTYPES and dtype in CONVERTIBLE_DTYPES | SCALED_DTYPES
    ):
        raise ValueError(f"KV of {sender.dtype} cannot travel as {dtype!r}")
    return WireFormat(dtype, sender.num_kv_heads, sender.head_dim, sender.block_size)


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
    """Bytes that a token of a layer takes at most, whatever type a receiver with that layout agrees on."""
    return max(
        WireFormat(dtype, layout.num_kv_heads, layout.head_dim, 1).token_layer_bytes
        for dtype in (layout.dtype, "float32")
    )
