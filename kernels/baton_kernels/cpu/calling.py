"""The types that native kernels compute in and store, and how they number them: the enumeration
`Stored` of simd.h."""

from __future__ import annotations

from types import MappingProxyType

import torch

#: By type, of what the native kernels read and write.
STORED_NUMBERS = MappingProxyType(
    {
        torch.float32: 0,
        torch.bfloat16: 1,
        torch.float16: 2,
        torch.int8: 3,
        torch.float8_e4m3fn: 4,
    }
)
#: Those that they compute in.
NATIVE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
