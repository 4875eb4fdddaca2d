"""From a pool's element type into a wire format, and back, run by run; see WireFormat.

A scale is the largest size among a head's elements of a run, over the largest size of the type: 127 (int8) or 448 (fp8). So
an element is off by half a step: of int8 by 1/254 of the largest at most, of fp8 by 1/16 of itself, or by 1/458,752 of
the largest where it is tiny. What is not finite makes all of its head's elements of the run NaN: it cannot pass for KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_transfer.elements import BITS, FP8_MAX, Floats, fp8_of, from_fp8, narrow, widen
from kv_transfer.wire_format import SCALE_BYTES, SCALED_DTYPES, WireFormat

_INT8_MAX = 127.0
#: Below this no scale is told apart from zero: its inverse would overflow.
_LEAST_PEAK = np.float32(2.0**-100)
_SCALE = np.dtype("<f4")
#: Elements that are turned at a time: few enough for the second cache, many enough that calling numpy costs little.
_GROUP_ELEMENTS = 1 << 16


class Transcoder:
    """Between runs of elements of `dtype` and of the wire. Used by one thread at a time."""

    def __init__(self, dtype: str, wire: WireFormat) -> None:
        self._dtype = dtype
        self._wire = wire
        self._memory = np.empty((2, 0), np.float32)

    def encode(self, run: memoryview, num_tokens: int, num_layers: int, out: memoryview) -> None:
        """Write a run [num_layers, 2, kv_heads, num_tokens, head_dim] of `dtype` into `out`, which has its size on the wire."""
        shape = self._shape(num_tokens, num_layers)
        source = np.frombuffer(run, BITS[self._dtype]).reshape(shape)
        scales, target = self._split(out, shape)
        for layers, values, work in self._groups(shape):
            widen(source[layers], self._dtype, values)
            if scales is None:
                narrow(values, self._wire.dtype, target[layers], work)
            else:
                self._scale(values, scales[layers])
                self._round(values, target[layers], work)

    def decode(self, data: memoryview, num_tokens: int, num_layers: int, out: memoryview) -> None:
        """The inverse: write the run whose bytes on the wire are `data` into `out`."""
        shape = self._shape(num_tokens, num_layers)
        scales, source = self._split(data, shape)
        target = np.frombuffer(out, BITS[self._dtype]).reshape(shape)
        for layers, values, work in self._groups(shape):
            if scales is None:
                widen(source[layers], self._wire.dtype, values)
            else:
                self._unround(source[layers], values)
                with np.errstate(over="ignore", invalid="ignore"):
                    np.multiply(values, scales[layers][..., None, None], out=values)
            narrow(values, self._dtype, target[layers], work)

    def _scale(self, values: Floats, scales: Floats) -> None:
        """Choose `scales`, and have `values` told in them; those of heads that are not finite are zero."""
        most = np.float32(FP8_MAX if self._wire.dtype == "fp8" else _INT8_MAX)
        peaks = np.maximum(values.max(axis=(3, 4)), -values.min(axis=(3, 4)))
        np.divide(np.maximum(peaks, _LEAST_PEAK), most, out=scales)
        is_lost = ~np.isfinite(scales)
        if is_lost.any():
            scales[is_lost] = np.nan
            values[is_lost] = 0
        factors = np.divide(1, scales, out=np.zeros_like(scales), where=~is_lost)
        values *= factors[..., None, None]

    def _round(self, values: Floats, codes: NDArray[np.int8], work: Floats) -> None:
        if self._wire.dtype == "fp8":
            fp8_of(values, codes.view(np.uint8), work)
        else:
            np.copyto(codes, np.rint(values, out=values), casting="unsafe")

    def _unround(self, codes: NDArray[np.int8], values: Floats) -> None:
        if self._wire.dtype == "fp8":
            from_fp8(codes.view(np.uint8), values)
        else:
            values[...] = codes

    def _groups(self, shape: tuple[int, ...]) -> Iterator[tuple[slice, Floats, Floats]]:
        """Layers to turn at a time, and two arrays of their shape; the same memory each time."""
        num_layers, *rest = shape
        num_elements = int(np.prod(rest))
        most = max(1, _GROUP_ELEMENTS // num_elements)
        if self._memory.shape[1] < most * num_elements:
            self._memory = np.empty((2, most * num_elements), np.float32)
        for first in range(0, num_layers, most):
            count = min(most, num_layers - first)
            values, work = self._memory[:, : count * num_elements].reshape(2, count, *rest)
            yield slice(first, first + count), values, work

    def _shape(self, num_tokens: int, num_layers: int) -> tuple[int, ...]:
        return (num_layers, 2, self._wire.num_kv_heads, num_tokens, self._wire.head_dim)

    def _split(self, run: memoryview, shape: tuple[int, ...]) -> tuple[Floats | None, NDArray[Any]]:
        """Scales [layers, 2, kv_heads], if there are any, and elements of a run on the wire, without a copy."""
        dtype = self._wire.dtype
        if dtype not in SCALED_DTYPES:
            return None, np.frombuffer(run, BITS[dtype]).reshape(shape)
        num_scale_bytes = SCALE_BYTES * shape[0] * shape[1] * shape[2]
        scales = np.frombuffer(run[:num_scale_bytes], _SCALE).reshape(shape[:3])
        return scales, np.frombuffer(run[num_scale_bytes:], np.int8).reshape(shape)
