"""Blocks of GGUF files, decoded into levels, scales and minima.

A block of Q4_0 to Q8_0 and IQ4_NL has 32 values and one scale; one of the K types 256 values in
groups of 16 or 32, whose scales and minima are small integers times a float16 of the block. Every
type decodes without loss: dequantised, the result has the bits of ggml's own dequantize_row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from baton.gguf.block_types import BLOCK_TYPES
from engine.quantization.weight import QuantizedWeight

#: Blocks [num_blocks, bytes] uint8 -> levels [num_blocks, values] uint8, scales and minima
#: [num_blocks, groups] float32; minima None for a symmetric type.
Decoded = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]

#: Values of the codes of IQ4_NL.
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def decode_blocks(raw: torch.Tensor, name: str) -> QuantizedWeight:
    """Decode a tensor of type `name`: raw [rows, bytes] uint8. Raises ValueError for rows that are
    not whole blocks."""
    kind, num_rows = BLOCK_TYPES[name], len(raw)
    if raw.shape[1] % kind.num_bytes:
        raise ValueError(f"rows of {raw.shape[1]} bytes, where a block has {kind.num_bytes}")
    levels, scales, mins = _DECODERS[name](raw.reshape(-1, kind.num_bytes))
    return QuantizedWeight(
        levels.reshape(num_rows, -1),
        scales.reshape(num_rows, -1),
        None,
        kind.bits,
        None if mins is None else mins.reshape(num_rows, -1),
    )


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block: [num_blocks, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor, run: int) -> torch.Tensor:
    """[num_blocks, bytes] -> [num_blocks, 2 * bytes]: of each run of bytes all low halves, then all
    high ones."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return torch.cat((runs & 15, runs >> 4), dim=2).flatten(1)


def _bits(packed: torch.Tensor, run: int, width: int) -> torch.Tensor:
    """[num_blocks, bytes] -> [num_blocks, 8 / width * bytes]: of each run of bytes all lowest
    `width` bits, then all next ones."""
    runs = packed.reshape(len(packed), -1, 1, run)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return ((runs >> shifts) & ((1 << width) - 1)).flatten(1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """[num_blocks, 4] -> [num_blocks, 32]: the bits in order, each worth 16."""
    return ((packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1) << 4


def _q4_0(blocks: torch.Tensor) -> Decoded:
    return _nibbles(blocks[:, 2:], 16), _halves(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Decoded:
    return _nibbles(blocks[:, 4:], 16), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> Decoded:
    levels = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return levels + (128 - 16), _halves(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> Decoded:
    levels = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return levels, _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> Decoded:
    return blocks[:, 2:] ^ 128, _halves(blocks, 0), None


def _iq4_nl(blocks: torch.Tensor) -> Decoded:
    values = torch.tensor([128 + value for value in _IQ4_VALUES], dtype=torch.uint8)
    return values[_nibbles(blocks[:, 2:], 16).int()], _halves(blocks, 0), None


def _q2_k(blocks: torch.Tensor) -> Decoded:
    small, levels = blocks[:, :16], _bits(blocks[:, 16:80], 32, 2)
    return levels, _halves(blocks, 80) * (small & 15), -(_halves(blocks, 82) * (small >> 4))


def _q3_k(blocks: torch.Tensor) -> Decoded:
    high, low, small = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    levels = _bits(low, 32, 2) | (_bits(high, 32, 1) << 2)
    # Six bits each: the lower four of sixteen scales, then their upper two.
    scales = _bits(small[:, :8], 8, 4) | (_bits(small[:, 8:], 4, 2) << 4)
    # The kernels' middle is 8, this type's 4.
    return levels + 4, _halves(blocks, 108) * (scales.float() - 32), None


def _small_scales(small: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of eight groups, six bits each, from 12 bytes: the first four of both lie
    in bytes of their own, whose upper bits have the last four's upper two."""
    scales, mins, rest = small[:, :4], small[:, 4:8], small[:, 8:]
    return (
        torch.cat((scales & 63, (rest & 15) | ((scales >> 6) << 4)), dim=1),
        torch.cat((mins & 63, (rest >> 4) | ((mins >> 6) << 4)), dim=1),
    )


def _q4_k(blocks: torch.Tensor) -> Decoded:
    scales, mins = _small_scales(blocks[:, 4:16])
    levels = _nibbles(blocks[:, 16:], 32)
    return levels, _halves(blocks, 0) * scales, -(_halves(blocks, 2) * mins)


def _q5_k(blocks: torch.Tensor) -> Decoded:
    scales, mins = _small_scales(blocks[:, 4:16])
    levels = _nibbles(blocks[:, 48:], 32) | (_bits(blocks[:, 16:48], 32, 1) << 4)
    return levels, _halves(blocks, 0) * scales, -(_halves(blocks, 2) * mins)


def _q6_k(blocks: torch.Tensor) -> Decoded:
    low, high = _nibbles(blocks[:, :128], 64), _bits(blocks[:, 128:192], 32, 2)
    scales = _halves(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
    return (low | (high << 4)) + (128 - 32), scales, None


_DECODERS: Mapping[str, Callable[[torch.Tensor], Decoded]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
}
