"""Conversion between a pool's dtype and a wire format, run by run; see WireFormat and KvLayout.

A scale is the largest magnitude among its elements, divided by the largest value of the type: 127
(int8) or 448 (fp8). The error is half a step: for int8 at most 1/254 of the largest magnitude; for
fp8 1/16 of the element, or 1/458,752 of the largest magnitude for tiny elements. A non-finite
element makes all elements of its scale NaN, so that it cannot be mistaken for KV.

bfloat16 is the upper half of a float32. fp8 is e4m3 of the OCP 8-bit floating point specification
(2023): no infinities, one NaN, +-448 at most. Conversions round to nearest, ties to even, and
preserve non-finite values. They write into the caller's arrays, because fresh memory costs more
than the conversion.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.types import SCALE_BYTES, SCALED_DTYPES
from kv_transfer.wire_format import WireFormat

FP8_MAX = 448.0
_FP8_NAN = 0x7F
_FP8_ALIGN = np.float32(2.0**-120)

#: numpy type of the bits, by dtype. int64 is used by the oracle engine, and is not numeric.
BITS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "float32": np.dtype("<f4"),
        "bfloat16": np.dtype("<u2"),
        "float16": np.dtype("<f2"),
        "int64": np.dtype("<i8"),
    }
)

Floats = NDArray[np.float32]
_Bits = NDArray[Any]


def widen(bits: _Bits, dtype: str, out: Floats) -> None:
    """Write the values of elements of `dtype`, one of CONVERTIBLE_DTYPES, into `out`. Exact."""
    if dtype == "bfloat16":
        np.left_shift(bits, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[...] = bits


def narrow(values: Floats, dtype: str, out: _Bits, work: Floats) -> None:
    """Round `values` to `dtype`, one of CONVERTIBLE_DTYPES, into `out`. Values beyond float16
    become infinite.

    work: as large as values; overwritten.
    """
    if dtype == "bfloat16":
        _to_bfloat16(values, out, work.view(np.uint32))
        return
    with np.errstate(over="ignore"):
        out[...] = values


def fp8_of(values: Floats, out: NDArray[np.uint8], work: Floats) -> None:
    """Round finite values within +-FP8_MAX to fp8. Overwrites `values` and `work`, which must be
    equally large.

    A float32 times 2^-120 has the exponent bits of its fp8, including subnormals; what remains is
    to round the mantissa from 23 bits to 3. If the CPU flushes subnormals, fp8 values below 2^-6
    become zero.
    """
    values *= _FP8_ALIGN
    bits, rounded = values.view(np.uint32), work.view(np.uint32)
    np.right_shift(bits, 20, out=rounded)
    rounded &= 1
    rounded += 0x7FFFF
    # The sign is included; it ends up four bits above the code.
    rounded += bits
    rounded >>= 20
    np.bitwise_and(rounded, 0x7F, out=out, casting="unsafe")
    rounded >>= 4
    rounded &= 0x80
    np.bitwise_or(out, rounded, out=out, casting="unsafe")


def from_fp8(bits: NDArray[np.uint8], out: Floats) -> None:
    """Write the values of fp8 elements. Exact."""
    # mode="clip" has no effect on values, and avoids a copy in numpy.
    np.take(_float_of_fp8(), bits, out=out, mode="clip")


def _to_bfloat16(values: Floats, out: _Bits, work: NDArray[np.uint32]) -> None:
    bits = values.view(np.uint32)
    np.right_shift(bits, 16, out=work)
    work &= 1
    work += 0x7FFF
    work += bits
    work >>= 16
    out[...] = work
    if not np.isfinite(values).all():
        # The addition above carries NaNs with long mantissas into the sign.
        out[np.isnan(values)] = 0x7FC0


@functools.cache
def _float_of_fp8() -> Floats:
    """Values of the 256 bit patterns."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7).astype(np.float32)
    size = np.where(
        exponent == 0,
        np.ldexp(mantissa, -9),
        np.ldexp(8 + mantissa, exponent.astype(np.int32) - 10),
    )
    size[(code & _FP8_NAN) == _FP8_NAN] = np.nan
    return np.where(code & 0x80, -size, size).astype(np.float32)


_INT8_MAX = 127.0
#: Below this a scale is treated as zero, because its inverse would overflow.
_LEAST_PEAK = np.float32(2.0**-100)
_SCALE = np.dtype("<f4")
#: Elements per conversion: few enough for the L2 cache, many enough to amortise numpy's call
#: overhead.
_GROUP_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class _Run:
    """Views of a run's bytes, without a copy.

    elements: [layers, parts, kv_heads, tokens, head_dim]; int8 for both scaled types.
    scales: [layers, parts, kv_heads, tokens or 1, 1], or none.
    """

    dtype: str
    elements: NDArray[Any]
    scales: Floats | None

    def read(self, layers: slice, values: Floats) -> None:
        """Write the values of these layers into `values`."""
        elements = self.elements[layers]
        if self.scales is None:
            widen(elements, self.dtype, values)
            return
        if self.dtype == "fp8":
            from_fp8(elements.view(np.uint8), values)
        else:
            values[...] = elements
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(values, self.scales[layers], out=values)

    def write(self, layers: slice, values: Floats, work: Floats) -> None:
        """Round `values` into these layers. Overwrites `values` and `work`, which must be equally
        large."""
        elements = self.elements[layers]
        if self.scales is None:
            narrow(values, self.dtype, elements, work)
            return
        self._scale(values, self.scales[layers])
        if self.dtype == "fp8":
            fp8_of(values, elements.view(np.uint8), work)
        else:
            np.copyto(elements, np.rint(values, out=values), casting="unsafe")

    def _scale(self, values: Floats, scales: Floats) -> None:
        """Compute `scales` and divide `values` by them; values with a non-finite scale become
        zero."""
        most = np.float32(FP8_MAX if self.dtype == "fp8" else _INT8_MAX)
        axes = (3, 4) if scales.shape[3] == 1 else (4,)
        peaks = np.maximum(
            values.max(axis=axes, keepdims=True), -values.min(axis=axes, keepdims=True)
        )
        np.divide(np.maximum(peaks, _LEAST_PEAK), most, out=scales)
        is_lost = ~np.isfinite(scales)
        if is_lost.any():
            scales[is_lost] = np.nan
            np.copyto(values, 0, where=is_lost)
        values *= np.divide(1, scales, out=np.zeros_like(scales), where=~is_lost)


class Transcoder:
    """Converts runs between a pool of `dtype` and the wire. Used by one thread at a time."""

    def __init__(self, dtype: str, wire: WireFormat) -> None:
        self._dtype = dtype
        self._wire = wire
        self._memory = np.empty((2, 0), np.float32)

    def encode(self, run: memoryview, num_tokens: int, num_layers: int, out: memoryview) -> None:
        """Convert a run [num_layers, parts, kv_heads, num_tokens, head_dim] of the pool into `out`,
        which has its wire size."""
        self._turn(
            self._in_pool(run, num_tokens, num_layers), self._on_wire(out, num_tokens, num_layers)
        )

    def decode(self, data: memoryview, num_tokens: int, num_layers: int, out: memoryview) -> None:
        """Convert the wire bytes `data` of a run into `out`, in the pool's dtype."""
        self._turn(
            self._on_wire(data, num_tokens, num_layers), self._in_pool(out, num_tokens, num_layers)
        )

    def _turn(self, source: _Run, target: _Run) -> None:
        for layers, values, work in self._groups(source.elements.shape):
            source.read(layers, values)
            target.write(layers, values, work)

    def _groups(self, shape: tuple[int, ...]) -> Iterator[tuple[slice, Floats, Floats]]:
        """Yield slices of layers to convert at once, with two arrays of their shape, reused."""
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
        wire = self._wire
        return (num_layers, wire.num_parts, wire.num_kv_heads, num_tokens, wire.head_dim)

    def _in_pool(self, run: memoryview, num_tokens: int, num_layers: int) -> _Run:
        shape = self._shape(num_tokens, num_layers)
        if self._dtype in SCALED_DTYPES:
            return _with_row_scales(self._dtype, run, shape)
        return _Run(self._dtype, np.frombuffer(run, BITS[self._dtype]).reshape(shape), None)

    def _on_wire(self, run: memoryview, num_tokens: int, num_layers: int) -> _Run:
        shape, wire = self._shape(num_tokens, num_layers), self._wire
        if wire.has_row_scales:
            return _with_row_scales(wire.dtype, run, shape)
        if wire.dtype not in SCALED_DTYPES:
            return _Run(wire.dtype, np.frombuffer(run, BITS[wire.dtype]).reshape(shape), None)
        num_scale_bytes = SCALE_BYTES * shape[0] * shape[1] * shape[2]
        scales = np.frombuffer(run[:num_scale_bytes], _SCALE).reshape(*shape[:3], 1, 1)
        elements = np.frombuffer(run[num_scale_bytes:], np.int8).reshape(shape)
        return _Run(wire.dtype, elements, scales)


def _with_row_scales(dtype: str, run: memoryview, shape: tuple[int, ...]) -> _Run:
    """Views of a run with a scale per row: for each layer, part and head, its elements, then their
    scales. See WireFormat."""
    *heads, num_tokens, head_dim = shape
    data = np.frombuffer(run, np.int8).reshape(*heads, num_tokens * (head_dim + SCALE_BYTES))
    num_elements = num_tokens * head_dim
    elements = data[..., :num_elements].reshape(shape)
    return _Run(dtype, elements, data[..., num_elements:].view(_SCALE)[..., None])
