"""Measures this machine as a Device: what Baton's own linear layers reach on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from baton_kernels.linear import Linear, pack_linear
from baton_kernels.paged_attention import AttentionSlice, paged_attention, plan_attention
from engine.host_memory import available_memory_bytes
from engine.plan.devices import THIS_CPU, Device
from engine.plan.model import ModelSizes
from engine.plan.roofline import num_pairs

#: Bytes of weights that are read: more than caches hold, or the model's, if they are fewer.
_MAX_BYTES = 128 << 20
_COPY_BYTES = 64 << 20
_NUM_IN, _NUM_OUT = 1024, 1024
_FEW_ROWS, _MANY_ROWS = 8, 256
#: Inputs and outputs of a layer that takes no longer than its call.
_SMALLEST = 32
#: Tokens of a sequence that attention sees.
_CONTEXT, _BLOCK_SIZE = 512, 16
#: Layers that compute many rows: enough for some milliseconds.
_NUM_COMPUTING = 8
#: Seconds of one exchange through shared memory (docs/adr/0009), as that of stages.
_EXCHANGE_S = 38e-6


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a layer's attention: of queries, of keys and values, and their elements."""

    num: int = 8
    num_kv: int = 2
    dim: int = 64

    @classmethod
    def of(cls, model: ModelSizes) -> Heads:
        """Those of a model; latent attention has one KV head."""
        layout = model.layout
        num = max(1, model.attention_width // layout.head_dim)
        return cls(num, layout.num_kv_heads, layout.head_dim)


class CpuProbe:
    """Linear layers of a model's size, to be timed with one row and with many, and attention with
    one new token of some sequences and with many of one.

    A layer takes bytes / read rate + rows * products / compute rate: one row and many give both
    rates, a few the share of the second that small batches reach.
    """

    def __init__(
        self,
        weight_bytes: int,
        dtype: str,
        heads: Heads = Heads(),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """weight_bytes: of the model, of this type. clock: in seconds."""
        self._dtype, self._clock = dtype, clock
        weight = torch.empty(_NUM_OUT, _NUM_IN, dtype=getattr(torch, dtype)).normal_()
        self._layer_bytes = weight.numel() * weight.element_size()
        num_layers = max(1, min(weight_bytes, _MAX_BYTES) // self._layer_bytes)
        self._layers = [pack_linear(weight, None) for _ in range(num_layers)]
        self._smallest = [pack_linear(weight[:_SMALLEST, :_SMALLEST].contiguous(), None)] * 8
        self._rows = torch.empty(_MANY_ROWS, _NUM_IN, dtype=weight.dtype).normal_()
        self._decode = _Attention(heads, weight.dtype, _FEW_ROWS, 1)
        self._prompt = _Attention(heads, weight.dtype, 1, _MANY_ROWS)
        self._copied, self._copy = torch.ones(2, _COPY_BYTES, dtype=torch.uint8)

    def measure(self, num_rounds: int = 5) -> Device:
        """The whole machine, with torch's number of threads: the best of some rounds."""
        call = one = few = many = copy = decode = prompt = float("inf")
        for _ in range(num_rounds):
            call = min(call, self._layer_s(self._smallest, 1))
            one = min(one, self._layer_s(self._layers, 1))
            few = min(few, self._layer_s(self._layers, _FEW_ROWS))
            many = min(many, self._layer_s(self._layers[:_NUM_COMPUTING], _MANY_ROWS))
            copy = min(copy, self._seconds(lambda: self._copy.copy_(self._copied)))
            # In the second run KV is in the cache: reading it is counted by its bytes.
            decode = min(decode, *(self._seconds(self._decode.run) for _ in range(2)))
            prompt = min(prompt, *(self._seconds(self._prompt.run) for _ in range(2)))
        # A call's own time is of the host's costs.
        one, few, many = (max(taken / 2, taken - call) for taken in (one, few, many))
        row_s = max(0.0, many - one) / (_MANY_ROWS - 1) or many / _MANY_ROWS
        few_row_s = max(row_s, (few - one) / (_FEW_ROWS - 1))
        # Where products take nearly all of the time, the difference says nothing of reading.
        read_s = max(one - few_row_s, one / 4)
        peak = 2.0 * _NUM_IN * _NUM_OUT / row_s
        return Device(
            THIS_CPU,
            "cpu",
            available_memory_bytes(),
            self._layer_bytes / read_s,
            MappingProxyType(dict.fromkeys((self._dtype, "bfloat16"), peak)),
            _COPY_BYTES / copy,
            _COPY_BYTES / copy,
            _EXCHANGE_S,
            f"measured here on {len(os.sched_getaffinity(0))} cores with Baton's linear layers",
            adds_up=True,
            few_rows_share=row_s / few_row_s,
            attention_flops_per_s=(self._decode.flops / decode, self._prompt.flops / prompt),
        )

    def _layer_s(self, layers: Sequence[Linear], num_rows: int) -> float:
        """Seconds of one of the layers, in the mean, with so many rows."""
        rows = self._rows[:num_rows, : layers[0].num_in].contiguous()
        return self._seconds(lambda: [layer(rows) for layer in layers]) / len(layers)

    def _seconds(self, run: Callable[[], object]) -> float:
        started = self._clock()
        run()
        return self._clock() - started


class _Attention:
    """Attention of a layer, of num_seqs sequences that have num_new new tokens each and _CONTEXT in
    all. flops: see LayerSizes.pair_flops."""

    def __init__(self, heads: Heads, dtype: torch.dtype, num_seqs: int, num_new: int) -> None:
        num_blocks, start = _CONTEXT // _BLOCK_SIZE, _CONTEXT - num_new
        rows = num_seqs * num_new
        shape = (num_seqs * num_blocks, 1, 2, heads.num_kv, _BLOCK_SIZE, heads.dim)
        self._pool = torch.zeros(shape, dtype=dtype)
        self._query = torch.zeros(rows, heads.num, heads.dim, dtype=dtype)
        self._kv = torch.zeros(rows, heads.num_kv, heads.dim, dtype=dtype)
        slices = [
            AttentionSlice(i * num_new, num_new, start, range(i * num_blocks, (i + 1) * num_blocks))
            for i in range(num_seqs)
        ]
        scale = heads.dim**-0.5
        self._plan = plan_attention(slices, self._pool, heads.num, scale, None, dtype)
        pairs = num_seqs * num_pairs(start, num_new, None)
        self.flops = 4.0 * heads.num * heads.dim * pairs

    def run(self) -> None:
        paged_attention(self._query, self._kv, self._kv, self._pool, 0, self._plan)


def share_of(device: Device, num_ranks: int) -> Device:
    """What one of num_ranks ranks has of this machine."""
    attention = device.attention_flops_per_s
    return replace(
        device,
        memory_bytes=device.memory_bytes // num_ranks,
        read_bytes_per_s=device.read_bytes_per_s / num_ranks,
        flops_per_s=MappingProxyType(
            {dtype: peak / num_ranks for dtype, peak in device.flops_per_s.items()}
        ),
        link_bytes_per_s=device.link_bytes_per_s / num_ranks,
        attention_flops_per_s=attention and (attention[0] / num_ranks, attention[1] / num_ranks),
    )
