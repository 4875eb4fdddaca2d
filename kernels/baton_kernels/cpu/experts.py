"""baton_kernels.experts in native code."""

from __future__ import annotations

import ctypes

import torch

from baton_kernels.cpu.calling import NATIVE_DTYPES, STORED_NUMBERS
from baton_kernels.cpu.int_linear import NativeIntLinear
from baton_kernels.cpu.library import loaded
from baton_kernels.cpu.linear import NativeLinear
from baton_kernels.experts import GroupedLinear, RowOrder
from baton_kernels.experts import combine as combine_op
from baton_kernels.experts import grouped_linear as grouped_op
from baton_kernels.experts import route as route_op
from baton_kernels.layer import Routing

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
#: Same value as in experts.cpp.
MAX_EXPERTS = 1024


class _Route(ctypes.Structure):
    """`Route` of calls.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("logits", "bias", "chosen", "weights")),
        *((name, _LONG) for name in ("tokens", "experts", "num_chosen")),
        *((name, _LONG) for name in ("groups", "chosen_groups", "group_top")),
        *((name, _INT) for name in ("is_sigmoid", "is_normalised")),
        ("scale", ctypes.c_float),
    )


class _GroupedLinear(ctypes.Structure):
    """`GroupedLinear` of calls.h."""

    _fields_ = (
        ("experts", _POINTER),
        ("num_experts", _LONG),
        ("chosen", _POINTER),
        *((name, _LONG) for name in ("rows", "repeat")),
        *((name, _POINTER) for name in ("x", "out", "order", "gathered", "products", "scratch")),
    )


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the twin."""
    if routing.num_experts > MAX_EXPERTS or not logits.is_contiguous():
        return route_op.twin(logits, bias, routing)
    tokens = logits.shape[0]
    chosen = torch.empty(tokens, routing.num_chosen, dtype=torch.int32)
    weights = torch.empty(tokens, routing.num_chosen)
    call = _Route(
        logits=logits.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        chosen=chosen.data_ptr(),
        weights=weights.data_ptr(),
        tokens=tokens,
        experts=routing.num_experts,
        num_chosen=routing.num_chosen,
        groups=routing.num_groups,
        chosen_groups=routing.num_chosen_groups,
        group_top=routing.group_top,
        is_sigmoid=routing.is_sigmoid,
        is_normalised=routing.is_normalised,
        scale=routing.scale,
    )
    loaded().baton_route(ctypes.addressof(call), torch.get_num_threads())
    return chosen, weights


def grouped_linear(
    x: torch.Tensor,
    chosen: torch.Tensor,
    experts: GroupedLinear,
    repeat: int,
    order: RowOrder | None = None,  # noqa: ARG001
) -> torch.Tensor:
    """See the twin."""
    natives = [x for x in experts.linears if isinstance(x, NativeLinear | NativeIntLinear)]
    if x.dtype not in NATIVE_DTYPES or len(natives) < len(experts.linears):
        return grouped_op.twin(x, chosen, experts, repeat)
    x, rows = x.contiguous(), chosen.numel()
    out = x.new_empty(rows, experts.num_out)
    table = (_POINTER * len(natives))(*(linear.address for linear in natives))
    sorted_rows = torch.empty(rows + len(natives) + 1, dtype=torch.int64)
    gathered = x.new_empty(rows, experts.num_in)
    products = x.new_empty(rows, experts.num_out)
    scratch_bytes = max(linear.scratch_row_bytes for linear in natives)
    scratch = x.new_empty(rows * scratch_bytes, dtype=torch.uint8)
    call = _GroupedLinear(
        experts=ctypes.addressof(table),
        num_experts=len(natives),
        chosen=chosen.data_ptr(),
        rows=rows,
        repeat=repeat,
        x=x.data_ptr(),
        out=out.data_ptr(),
        order=sorted_rows.data_ptr(),
        gathered=gathered.data_ptr(),
        products=products.data_ptr(),
        scratch=scratch.data_ptr(),
    )
    loaded().baton_grouped_linear(
        ctypes.addressof(call), STORED_NUMBERS.get(x.dtype), torch.get_num_threads()
    )
    return out


def combine(
    parts: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """See the twin."""
    if parts.dtype not in NATIVE_DTYPES:
        return combine_op.twin(parts, weights, shared, residual)
    tokens, chosen = weights.shape
    out = parts.new_empty(tokens, parts.shape[1])
    shared = None if shared is None else shared.contiguous()
    residual = None if residual is None else residual.contiguous()
    loaded().baton_combine(
        *(parts.data_ptr(), weights.data_ptr()),
        None if shared is None else shared.data_ptr(),
        None if residual is None else residual.data_ptr(),
        *(out.data_ptr(), tokens, chosen, parts.shape[1]),
        *(STORED_NUMBERS.get(parts.dtype), torch.get_num_threads()),
    )
    return out
