"""Decoder layers in native code: one call runs any number of consecutive layers. See layers.cpp for
the stages of a layer.

Results are bit-identical to calling the ops of baton_kernels one by one. Fewer calls save most of a
small model's decode step.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from baton_kernels.cpu.calling import NATIVE_DTYPES, STORED_NUMBERS
from baton_kernels.cpu.int_linear import NativeIntLinear
from baton_kernels.cpu.library import library, loaded
from baton_kernels.cpu.linear import NativeLinear
from baton_kernels.cpu.paged_attention import MAX_HEAD_DIM, AttentionPlan
from baton_kernels.cpu.rope_kv_write import call_over
from baton_kernels.layer import Attention, Layer, Mlp, Norm

if TYPE_CHECKING:
    from baton_kernels.linear import Linear

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long

#: Stages of a layer: write KV, attend, and the rest.
NUM_STAGES = 3

NativeForm = NativeLinear | NativeIntLinear


NativeLayer = Layer[NativeForm, torch.Tensor]


class StepKv(NamedTuple):
    """A pool, its scales if it is quantised, and the rows of a step's tokens in it: first_rows as
    in kv_write.head_rows."""

    pool: torch.Tensor
    scales: torch.Tensor | None
    first_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Metadata of a step, in the form that baton_kernels.rope_kv_write and paged_attention take.

    kv: pool of all layers, or, if `windowed` is set, of the layers without a window; `windowed`:
    pool of the layers with one. Layers are numbered within their pool. plans: by window.
    """

    kv: StepKv
    cos: torch.Tensor
    sin: torch.Tensor
    plans: Mapping[int | None, AttentionPlan]
    windowed: StepKv | None = None

    def kv_of(self, window: int | None) -> StepKv:
        """KV of the layers with that window."""
        return self.kv if window is None or self.windowed is None else self.windowed


class _Layer(ctypes.Structure):
    """`Layer` of layers.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "qkv", "q_norm", "k_norm")),
        *((name, _POINTER) for name in ("output", "post_norm", "gate_up", "down")),
        ("plan", _LONG),
    )


class _Stages(ctypes.Structure):
    """`Stages` of layers.cpp."""

    _fields_ = (
        ("layers", _POINTER),
        ("num_layers", _LONG),
        ("norm", _POINTER),
        *((name, _LONG) for name in ("hidden_size", "intermediate_size")),
        *((name, _LONG) for name in ("heads", "kv_heads", "dim")),
        ("eps", ctypes.c_float),
        ("is_wide", ctypes.c_int),
        *((name, _POINTER) for name in ("plans", "writes", "numbers")),
        ("tokens", _LONG),
        *((name, _POINTER) for name in ("hidden", "mixed", "normalised", "qkv", "query", "key")),
        *((name, _POINTER) for name in ("gate_up", "gated", "scratch")),
    )


def row_bytes(layer: NativeLayer, itemsize: int) -> dict[str, int]:
    """Scratch bytes per token of a step, by the stage's buffer."""
    attention, mlp, shape = _attention(layer), _mlp(layer), layer.attention.shape
    widths = {
        "normalised": attention.qkv.num_in,
        "qkv": attention.qkv.num_out,
        "query": shape.num_heads * shape.head_dim,
        "key": shape.num_kv_heads * shape.head_dim,
        "gate_up": mlp.gate_up.num_out,
        "gated": mlp.down.num_in,
    }
    scratch = max(linear.scratch_row_bytes for linear in layer.linears)
    return {name: width * itemsize for name, width in widths.items()} | {"scratch": scratch}


def native_layer(layer: Layer[Linear, torch.Tensor]) -> NativeLayer | None:
    """Convert a layer for NativeLayers; None if it has an unsupported part or form of linear
    layer."""
    attention = layer.attention
    if not isinstance(attention, Attention):
        return None
    linears = [linear for linear in layer.linears if isinstance(linear, NativeForm)]
    is_plain = (
        layer.before_attention is not None
        and layer.before_mlp is not None
        and layer.after_attention is None
        and layer.after_mlp is None
        and attention.shape.rope == 0
        and attention.shape.softcap is None
        and attention.sinks is None
        and isinstance(layer.mlp, Mlp)
        and layer.mlp.activation == "silu"
        and all(vector.dtype == layer.before_mlp.weight.dtype for vector in layer.vectors)
        and _has_head_norms(attention.q_norm, attention.shape.head_dim)
    )
    return layer.with_linears(linears) if is_plain and len(linears) == len(layer.linears) else None


def can_run(dtype: torch.dtype, pool_dtype: torch.dtype, head_dim: int) -> bool:
    """Whether NativeLayers supports layers that compute in `dtype` over such a pool."""
    is_stored = pool_dtype in STORED_NUMBERS
    return (
        dtype in NATIVE_DTYPES and is_stored and head_dim <= MAX_HEAD_DIM and library() is not None
    )


class NativeLayers:
    """Runs layers for which `can_run` holds. Keeps scratch memory for the largest step so far; runs
    one step at a time."""

    def __init__(self, layers: Sequence[NativeLayer], norm: Norm[torch.Tensor]) -> None:
        """layers: of equal shape, except for windows. norm: applied to the results of the last
        layer."""
        self._layers, self._norm = tuple(layers), norm
        self._windows = tuple(dict.fromkeys(layer.attention.shape.window for layer in layers))
        self._table = (_Layer * len(layers))(*(self._entry(layer) for layer in layers))
        has_window = [layer.attention.shape.window is not None for layer in layers]
        self._in_one_pool = array("q", range(len(layers)))
        self._in_two_pools = array(
            "q", (has_window[:index].count(own) for index, own in enumerate(has_window))
        )
        sizes = [row_bytes(layer, norm.weight.element_size()) for layer in layers]
        self._row_bytes = {name: max(size[name] for size in sizes) for name in sizes[0]}
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._max_rows = 0
        first, shape = layers[0], layers[0].attention.shape
        self._call = _Stages(
            layers=ctypes.addressof(self._table),
            num_layers=len(layers),
            norm=norm.weight.data_ptr(),
            hidden_size=_attention(first).qkv.num_in,
            intermediate_size=_mlp(first).down.num_in,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            dim=shape.head_dim,
            eps=norm.eps,
            is_wide=False,
        )
        """Arguments common to all steps, with scratch memory for _max_rows."""

    def begin(
        self, hidden: torch.Tensor, mixed: torch.Tensor, step: StepMetadata, max_rows: int
    ) -> RunningLayers:
        """Start a step over hidden [tokens, hidden_size], which layers change in place. mixed
        [tokens, heads * head_dim] receives the attention outputs. Both are contiguous. max_rows:
        maximum rows after `goes_on_with`."""
        calls = [step.plans[window].call for window in self._windows]
        kvs = [step.kv_of(window) for window in self._windows]
        for attention, kv in zip(calls, kvs, strict=True):
            attention.scales = None if kv.scales is None else kv.scales.data_ptr()
        writes = [call_over(kv.pool, kv.scales, step.cos, step.sin, kv.first_rows, 1) for kv in kvs]
        addresses = [(_POINTER * len(own))(*map(ctypes.addressof, own)) for own in (calls, writes)]
        numbers = self._in_one_pool if step.windowed is None else self._in_two_pools
        max_rows = max(max_rows, hidden.shape[0])
        if max_rows > self._max_rows:
            # Scratch buffers of the stages, each aligned to 64 bytes.
            sizes = {name: -(-max_rows * size // 64) * 64 for name, size in self._row_bytes.items()}
            self._workspace = torch.empty(sum(sizes.values()), dtype=torch.uint8)
            at = self._workspace.data_ptr()
            for name, size in sizes.items():
                setattr(self._call, name, at)
                at += size
            self._max_rows = max_rows
        call = _Stages.from_buffer_copy(self._call)
        call.plans, call.writes = map(ctypes.addressof, addresses)
        call.numbers, _ = numbers.buffer_info()
        kept = self, addresses, writes, step
        running = RunningLayers(call, kept, STORED_NUMBERS.get(hidden.dtype))
        running.goes_on_with(hidden, mixed)
        return running

    def _entry(self, layer: NativeLayer) -> _Layer:
        attention, mlp = _attention(layer), _mlp(layer)
        return _Layer(
            _address(layer.before_attention),
            attention.qkv.address,
            _address(attention.q_norm),
            _address(attention.k_norm),
            attention.output.address,
            _address(layer.before_mlp),
            mlp.gate_up.address,
            mlp.down.address,
            self._windows.index(attention.shape.window),
        )


@dataclass(slots=True)
class RunningLayers:
    """A step in progress. kept, tensors: keep the memory alive that the call points at."""

    call: _Stages
    kept: object
    dtype: int | None
    tensors: tuple[torch.Tensor, ...] = ()

    def goes_on_with(self, hidden: torch.Tensor, mixed: torch.Tensor) -> None:
        """Continue with these rows of the step's tokens, repeats allowed; at most `max_rows`."""
        self.tensors = hidden, mixed
        self.call.tokens = hidden.shape[0]
        self.call.hidden, self.call.mixed = hidden.data_ptr(), mixed.data_ptr()

    def run(self, first: int, end: int) -> None:
        """Run stages [first, end), counted over all layers. The stage after the last layer's is the
        final norm, in place."""
        loaded().baton_layers(
            ctypes.addressof(self.call), first, end, self.dtype, torch.get_num_threads()
        )


def _has_head_norms(norm: Norm[torch.Tensor] | None, head_dim: int) -> bool:
    return norm is None or len(norm.weight) == head_dim


def _attention(layer: NativeLayer) -> Attention[NativeForm, torch.Tensor]:
    """The attention part; native_layer has checked its type."""
    return cast("Attention[NativeForm, torch.Tensor]", layer.attention)


def _mlp(layer: NativeLayer) -> Mlp[NativeForm]:
    """The MLP; native_layer rejects mixtures of experts."""
    return cast("Mlp[NativeForm]", layer.mlp)


def _address(norm: Norm[torch.Tensor] | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()
