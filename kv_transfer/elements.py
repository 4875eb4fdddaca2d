"""Element types of KV, in numpy: what their bits mean as float32, and the nearest bits of a
float32.

bfloat16 is the upper half of a float32. fp8 is e4m3 of the OCP 8-bit floating point specification
(2023): no infinities, one NaN, +-448 at most. Conversions round to nearest, ties to even, and keep
what is not finite so. They write into arrays of the caller's: fresh memory costs more than the
conversion.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

FP8_MAX = 448.0
_FP8_NAN = 0x7F
_FP8_ALIGN = np.float32(2.0**-120)

#: The numpy type of the bits, by element type. int64 is the oracle engine's and means nothing as a
#: number.
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
    """Write the nearest elements of `dtype`, one of CONVERTIBLE_DTYPES, into `out`. Too large for
    float16 is infinite.

    work: as large as values; overwritten.
    """
    if dtype == "bfloat16":
        _to_bfloat16(values, out, work.view(np.uint32))
        return
    with np.errstate(over="ignore"):
        out[...] = values


def fp8_of(values: Floats, out: NDArray[np.uint8], work: Floats) -> None:
    """Write the nearest fp8 of finite values within +-FP8_MAX. `values` and `work`, as large, are
    overwritten.

    Times 2^-120 a float32 has the exponent bits of its fp8, subnormal ones included: what is left
    is to round its mantissa from 23 bits to 3. Where the CPU takes subnormals for zero, fp8 below
    2^-6 are zero.
    """
    values *= _FP8_ALIGN
    bits, rounded = values.view(np.uint32), work.view(np.uint32)
    np.right_shift(bits, 20, out=rounded)
    rounded &= 1
    rounded += 0x7FFFF
    # The sign is carried along, and comes to lie four bits above the code.
    rounded += bits
    rounded >>= 20
    np.bitwise_and(rounded, 0x7F, out=out, casting="unsafe")
    rounded >>= 4
    rounded &= 0x80
    np.bitwise_or(out, rounded, out=out, casting="unsafe")


def from_fp8(bits: NDArray[np.uint8], out: Floats) -> None:
    """Write the values of fp8 elements. Exact."""
    # Clipping changes nothing, and spares numpy a copy.
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
        # The sum above carries NaNs with long mantissas into the sign.
        out[np.isnan(values)] = 0x7FC0


@functools.cache
def _float_of_fp8() -> Floats:
    """Value of each of the 256 bit patterns."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7).astype(np.float32)
    size = np.where(
        exponent == 0,
        np.ldexp(mantissa, -9),
        np.ldexp(8 + mantissa, exponent.astype(np.int32) - 10),
    )
    size[(code & _FP8_NAN) == _FP8_NAN] = np.nan
    return np.where(code & 0x80, -size, size).astype(np.float32)
