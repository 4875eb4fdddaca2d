"""torch's own product of float8 with scales of 128 inputs, for prompts of checkpoints with such
weights (DeepSeek-V3 and Qwen3-FP8 as published).

Which devices, CUDA versions and layouts of scales it takes differs between builds of torch. So it
runs only where a small product of random numbers has been right once, in this process.
"""

from __future__ import annotations

from functools import cache

import torch

#: Inputs of a block.
GROUP_SIZE = 128
_CAPABILITY = (9, 0)
#: Rows that it takes are a multiple of this, as cuBLAS reads scales.
ROWS_MULTIPLE = 4
#: Relative error of the trial's result, of which the sums are float32 and the numbers exact.
_TOLERANCE = 1e-2


def block_scaled_mm(
    x_codes: torch.Tensor, x_scales: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """x_codes [rows, in], codes [out, in] float8_e4m3fn; x_scales [rows, groups], scales [groups,
    out] float32 -> [rows, out] bfloat16. Raises RuntimeError where torch has no such product."""
    # Scales of both sides lie with neighbouring rows, or outputs, side by side.
    by_row = x_scales.t().contiguous().t()
    return torch._scaled_mm(
        x_codes, codes.t(), scale_a=by_row, scale_b=scales, out_dtype=torch.bfloat16
    )


@cache
def has_block_scaled_mm(device: torch.device) -> bool:
    """Whether block_scaled_mm runs on the device, and is right there. The first call waits for the
    device; a worker makes it while it warms up."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _CAPABILITY:
        return False
    return is_right(device)


def is_right(device: torch.device) -> bool:
    """Try it: 36 rows, 3 groups, 48 outputs, with scales that all differ."""
    generator = torch.Generator().manual_seed(0)
    rows, groups, outs = 36, 3, 48

    def codes_of(count: int) -> torch.Tensor:
        shape = (count, groups * GROUP_SIZE)
        whole = torch.randint(-8, 9, shape, generator=generator).float()
        return whole.to(torch.float8_e4m3fn).to(device)

    x_codes, codes = codes_of(rows), codes_of(outs)
    x_scales = (torch.rand(rows, groups, generator=generator) + 0.1).to(device)
    scales = (torch.rand(groups, outs, generator=generator) + 0.1).to(device)
    try:
        got = block_scaled_mm(x_codes, x_scales, codes, scales)
    except RuntimeError:  # torch raises no narrower type for what its libraries lack
        return False
    x = x_codes.float() * x_scales.repeat_interleave(GROUP_SIZE, 1)
    weight = codes.float() * scales.t().repeat_interleave(GROUP_SIZE, 1)
    wanted = x.double() @ weight.double().t()
    return float((got.double() - wanted).norm() / wanted.norm()) < _TOLERANCE
