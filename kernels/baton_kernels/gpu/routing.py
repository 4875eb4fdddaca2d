"""Routing of a mixture of experts: see the twins in baton_kernels.experts.

logits [tokens, experts] float32; chosen [tokens, CHOSEN] int32; weights [tokens, CHOSEN] float32;
parts [tokens * CHOSEN, dim]

One launch each: `route` has a program for each token, `order_rows` one for each expert, which
counts all rows itself, and `combine` one for each token and run of the sum. Nothing waits for the
host, so CUDA graphs can capture them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.experts import RowOrder
from baton_kernels.layer import Routing

#: Rows read at once by order_rows.
_ROWS = 1024
#: Elements of a sum for each program of combine.
_COLUMNS = 1024


@triton.jit
def _largest(values, is_open, indices, BLOCK: tl.constexpr):
    """Index of the largest open value; ties go to the lower index."""
    best = tl.max(tl.where(is_open, values, float("-inf")), 0)
    return tl.min(tl.where(is_open & (values == best), indices, BLOCK), 0)


@triton.jit
def _in_best_groups(
    ranked, experts, there, BLOCK: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr,
):  # fmt: skip
    """Whether each expert is in one of the best groups, of SIZE experts."""
    groups = tl.arange(0, GROUPS_BLOCK)
    ranks = tl.full([GROUPS_BLOCK], float("-inf"), tl.float32)
    for group in range(GROUPS):
        is_mine = there & (experts // SIZE == group)
        rank = tl.max(tl.where(is_mine, ranked, float("-inf")), 0)
        if GROUP_TOP == 2:
            first = _largest(ranked, is_mine, experts, BLOCK)
            rank += tl.max(tl.where(is_mine & (experts != first), ranked, float("-inf")), 0)
        ranks = tl.where(groups == group, rank, ranks)
    is_open = groups < GROUPS
    for _ in range(CHOSEN_GROUPS):
        is_open = is_open & (groups != _largest(ranks, is_open, groups, GROUPS_BLOCK))
    is_of_other = (experts // SIZE)[:, None] == tl.where(is_open, groups, -1)[None, :]
    return tl.sum(is_of_other.to(tl.int32), 1) == 0


@triton.jit
def _route(
    logits_ptr, bias_ptr, chosen_ptr, weights_ptr, scale,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr,
    IS_SIGMOID: tl.constexpr, IS_NORMALISED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    there = experts < EXPERTS
    logits = tl.load(logits_ptr + token * EXPERTS + experts, mask=there, other=float("-inf"))
    if IS_SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    ranked = scores
    if HAS_BIAS:
        ranked += tl.load(bias_ptr + experts, mask=there, other=0.0)
    # NaN comes first, as in a sort: there are always CHOSEN experts.
    ranked = tl.where(ranked < float("inf"), ranked, float("inf"))
    if GROUPS > 1:
        is_in = _in_best_groups(
            ranked, experts, there, BLOCK, EXPERTS // GROUPS, GROUPS, GROUPS_BLOCK, CHOSEN_GROUPS,
            GROUP_TOP,
        )  # fmt: skip
        ranked = tl.where(is_in, ranked, float("-inf"))
    is_open = there
    for _ in range(CHOSEN):
        is_open = is_open & (experts != _largest(ranked, is_open, experts, BLOCK))
    is_chosen = there & (is_open == 0)
    if IS_NORMALISED:
        scores = scores / (tl.sum(tl.where(is_chosen, scores, 0.0), 0) + 1e-20)
    at = token * CHOSEN + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(chosen_ptr + at, experts, mask=is_chosen)
    tl.store(weights_ptr + at, scores * scale, mask=is_chosen)


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the twin."""
    logits, num_tokens = logits.contiguous(), len(logits)
    shape = (num_tokens, routing.num_chosen)
    chosen = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route[(num_tokens,)](
            logits, bias, chosen, weights, routing.scale,
            EXPERTS=routing.num_experts, BLOCK=triton.next_power_of_2(routing.num_experts),
            CHOSEN=routing.num_chosen, GROUPS=routing.num_groups,
            GROUPS_BLOCK=triton.next_power_of_2(routing.num_groups),
            CHOSEN_GROUPS=routing.num_chosen_groups,
            GROUP_TOP=min(routing.group_top, routing.num_experts // routing.num_groups),
            IS_SIGMOID=routing.is_sigmoid, IS_NORMALISED=routing.is_normalised,
            HAS_BIAS=bias is not None, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return chosen, weights


@triton.jit(do_not_specialize=["num_rows"])
def _order_rows(
    chosen_ptr, order_ptr, first_ptr, tile_end_ptr, num_rows,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (experts). BLOCK: a power of two above EXPERTS; rows that do not exist are counted at
    EXPERTS."""
    expert = tl.program_id(0)
    experts = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        of_row = tl.load(chosen_ptr + rows, mask=rows < num_rows, other=EXPERTS)
        counts += tl.histogram(of_row, BLOCK)
    place = tl.sum(tl.where(experts < expert, counts, 0), 0)
    for start in range(0, num_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        of_row = tl.load(chosen_ptr + rows, mask=rows < num_rows, other=EXPERTS)
        is_mine = (of_row == expert).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(is_mine, 0) - 1, rows, mask=is_mine > 0)
        place += tl.sum(is_mine, 0)
    if expert == 0:
        tl.store(first_ptr + experts, tl.cumsum(counts, 0) - counts, mask=experts <= EXPERTS)
        tiles = tl.cumsum((counts + TILE_ROWS - 1) // TILE_ROWS, 0)
        tl.store(tile_end_ptr + experts, tiles, mask=experts < EXPERTS)


def order_rows(chosen: torch.Tensor, num_experts: int) -> RowOrder:
    """See the twin."""
    num_rows, device = chosen.numel(), chosen.device
    order = torch.empty(num_rows, dtype=torch.int32, device=device)
    first = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    tile_ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    _order_rows[(num_experts,)](
        chosen.contiguous(), order, first, tile_ends, num_rows,
        EXPERTS=num_experts, BLOCK=triton.next_power_of_2(num_experts + 1), ROWS=_ROWS,
        TILE_ROWS=tile_rows_for(num_rows, num_experts), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return RowOrder(order, first, tile_ends)


def tile_rows_for(num_rows: int, num_experts: int) -> int:
    """Rows of a tile of grouped_linear."""
    return 16 if num_rows <= 16 * num_experts else 64


@triton.jit
def _combine(
    parts_ptr, weights_ptr, shared_ptr, residual_ptr, out_ptr, dim,
    CHOSEN: tl.constexpr, BLOCK: tl.constexpr, HAS_SHARED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < dim
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(CHOSEN):
        part = tl.load(parts_ptr + (token * CHOSEN + i) * dim + columns, mask=inside, other=0.0)
        total += part.to(tl.float32) * tl.load(weights_ptr + token * CHOSEN + i)
    at = token * dim + columns
    if HAS_SHARED:
        total += tl.load(shared_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def combine(
    parts: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """See the twin. parts must be contiguous."""
    (num_tokens, num_chosen), dim = weights.shape, parts.shape[1]
    out = torch.empty(num_tokens, dim, dtype=parts.dtype, device=parts.device)
    shared, residual = (x if x is None else x.contiguous() for x in (shared, residual))
    block = min(_COLUMNS, triton.next_power_of_2(dim))
    if num_tokens:
        _combine[(num_tokens, triton.cdiv(dim, block))](
            parts, weights, shared, residual, out, dim, CHOSEN=num_chosen, BLOCK=block,
            HAS_SHARED=shared is not None, HAS_RESIDUAL=residual is not None,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
