"""Types of tensors in a GGUF file. A row of a tensor is a run of blocks, each of the same number of
values and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of tensor. number: in the file. num_values, num_bytes: of a block.

    bits, group_size: the levels, and the number of values that share a scale, as Baton's kernels
    run them; 0 for floats. has_mins: each group has a minimum besides its scale.
    """

    name: str
    number: int
    num_values: int
    num_bytes: int
    bits: int = 0
    group_size: int = 0
    has_mins: bool = False

    @property
    def is_quantized(self) -> bool:
        return self.bits > 0

    @property
    def packed_bytes(self) -> float:
        """Bytes of a value in Baton's kernels: its level, and its part of float32 scales and zero
        points."""
        return self.bits / 8 + (8 if self.has_mins else 4) / self.group_size


BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        each.name: each
        for each in (
            BlockType("F32", 0, 1, 4),
            BlockType("F16", 1, 1, 2),
            BlockType("BF16", 30, 1, 2),
            BlockType("Q4_0", 2, 32, 18, 4, 32),
            BlockType("Q4_1", 3, 32, 20, 4, 32, has_mins=True),
            BlockType("Q5_0", 6, 32, 22, 8, 32),
            BlockType("Q5_1", 7, 32, 24, 8, 32, has_mins=True),
            BlockType("Q8_0", 8, 32, 34, 8, 32),
            BlockType("Q2_K", 10, 256, 84, 4, 16, has_mins=True),
            BlockType("Q3_K", 11, 256, 110, 4, 16),
            BlockType("Q4_K", 12, 256, 144, 4, 32, has_mins=True),
            BlockType("Q5_K", 13, 256, 176, 8, 32, has_mins=True),
            BlockType("Q6_K", 14, 256, 210, 8, 16),
            BlockType("IQ4_NL", 20, 32, 18, 8, 32),
        )
    }
)
