"""What all native kernels ask of their arguments."""

from __future__ import annotations

import torch


def is_native(dtype: torch.dtype) -> bool:
    """Whether the native kernels compute in this type."""
    return dtype in (torch.float32, torch.bfloat16, torch.float16)
