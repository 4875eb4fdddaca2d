"""Element types that native kernels compute in and store, and their numbers in the enumeration
`Stored` of simd.h."""

from __future__ import annotations

from types import MappingProxyType

import torch

#: Numbers of the dtypes that native kernels read and write.
STORED_NUMBERS = MappingProxyType(
    {
        torch.float32: 0,
        torch.bfloat16: 1,
        torch.float16: 2,
        torch.int8: 3,
        torch.float8_e4m3fn: 4,
    }
)
#: Dtypes that native kernels compute in.
NATIVE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
