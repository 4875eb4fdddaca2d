"""The types that native kernels compute in and store, and how they number them: the enumeration
`Stored` of simd.h."""

from __future__ import annotations

import torch

_NUMBERS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
}


def stored_number(dtype: torch.dtype) -> int | None:
    """Of a pool's dtype, or of one for which `is_native` holds; None if the native kernels neither
    write nor read it."""
    return _NUMBERS.get(dtype)


def is_native(dtype: torch.dtype) -> bool:
    """Whether the native kernels compute in this type."""
    return dtype in (torch.float32, torch.bfloat16, torch.float16)
