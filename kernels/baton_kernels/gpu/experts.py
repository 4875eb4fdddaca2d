"""Products by each row's own expert: y[r] = W[e(r)] x[r // repeat]: see the twin.

    x [rows / repeat, num_in]; chosen: rows experts in all; y [rows, num_out]

Experts in float8 are multiplied as quantized_linear does: x is rounded to float8, too, a run of
inputs that share scales at a time, and each step's sum is scaled.

Rows are sorted by expert, and each expert's are cut into tiles of ROWS, which programs find by the
tiles' numbers: how many rows an expert has is known on the device alone, so that nothing waits for
the host and a graph can hold it. There are as many programs as tiles there can be at most; those
that have none end at once. Weights are reached by their addresses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.experts import GroupedLinear
from baton_kernels.experts import grouped_linear as grouped_op
from baton_kernels.gpu.quantize_rows import quantize_rows

COLUMNS, DEPTH = 64, 64


@triton.jit
def _grouped_linear(
    x_ptr, addresses_ptr, biases_ptr, x_scales_ptr, scales_ptr, order_ptr, first_ptr, tile_end_ptr,
    y_ptr, num_in, num_out, num_groups,
    EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, REPEAT: tl.constexpr,
    HAS_BIASES: tl.constexpr, HAS_SCALES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    experts = tl.arange(0, EXPERTS_BLOCK)
    inside = experts < EXPERTS
    ends = tl.load(tile_end_ptr + experts, mask=inside, other=2147483647)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    if expert >= EXPERTS:
        return
    before = tl.max(tl.where(ends <= tile, ends, 0), 0)
    first = tl.load(first_ptr + expert) + (tile - before) * ROWS
    sorted_rows = first + tl.arange(0, ROWS)
    is_row = sorted_rows < tl.load(first_ptr + expert + 1)
    rows = tl.load(order_ptr + sorted_rows, mask=is_row, other=0)
    dtype = x_ptr.dtype.element_ty
    weight_ptr = tl.load(addresses_ptr + expert).to(tl.pointer_type(dtype))
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < num_out
    depth = tl.arange(0, DEPTH)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    group_size = num_in // num_groups
    for start in range(0, num_in, DEPTH):
        is_deep = start + depth < num_in
        x_at = (rows // REPEAT)[:, None] * num_in + start + depth[None, :]
        x = tl.load(x_ptr + x_at, mask=is_row[:, None] & is_deep[None, :], other=0.0)
        w_at = columns[None, :].to(tl.int64) * num_in + start + depth[:, None]
        w = tl.load(weight_ptr + w_at, mask=is_deep[:, None] & is_column[None, :], other=0.0)
        if HAS_SCALES:
            group = start // group_size
            x_scale = tl.load(
                x_scales_ptr + (rows // REPEAT) * num_groups + group, mask=is_row, other=0.0
            )
            scale_at = (expert * num_groups + group) * num_out + columns
            scale = tl.load(scales_ptr + scale_at, mask=is_column, other=0.0)
            sums += tl.dot(x, w) * x_scale[:, None] * scale[None, :]
        else:
            sums = tl.dot(x, w, sums, input_precision="ieee")
    if HAS_BIASES:
        bias = tl.load(biases_ptr + expert * num_out + columns, mask=is_column, other=0.0)
        sums += bias.to(tl.float32)[None, :]
    y_at = rows[:, None] * num_out + columns[None, :]
    tl.store(
        y_ptr + y_at, sums.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :]
    )


def grouped_linear(
    x: torch.Tensor, chosen: torch.Tensor, experts: GroupedLinear, repeat: int
) -> torch.Tensor:
    """See the twin. Experts of integers are run by it."""
    if experts.addresses is None:
        return grouped_op.twin(x, chosen, experts, repeat)
    x, num_experts, num_rows = x.contiguous(), len(experts.linears), chosen.numel()
    y = x.new_empty(num_rows, experts.num_out)
    if not num_rows:
        return y
    x_scales, scales, num_groups = None, experts.scales, 1
    if scales is not None:
        num_groups = scales.shape[1]
        x, x_scales = quantize_rows(x.view(len(x), num_groups, -1), torch.float8_e4m3fn)
    depth = min(DEPTH, experts.num_in // num_groups) if num_groups > 1 else DEPTH
    of_row = chosen.flatten().long()
    order = torch.argsort(of_row, stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, of_row, torch.ones_like(of_row))
    first = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    tile_rows = 16 if num_rows <= 16 * num_experts else 64
    tile_ends = (-(-counts // tile_rows)).cumsum(0).int()
    most_tiles = triton.cdiv(num_rows, tile_rows) + min(num_experts, num_rows)
    _grouped_linear[(most_tiles, triton.cdiv(experts.num_out, COLUMNS))](
        x, experts.addresses, experts.biases, x_scales, scales, order, first, tile_ends, y,
        experts.num_in, experts.num_out, num_groups,
        EXPERTS=num_experts, EXPERTS_BLOCK=triton.next_power_of_2(num_experts), REPEAT=repeat,
        HAS_BIASES=experts.biases is not None, HAS_SCALES=scales is not None,
        ROWS=tile_rows, COLUMNS=COLUMNS, DEPTH=depth, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return y
