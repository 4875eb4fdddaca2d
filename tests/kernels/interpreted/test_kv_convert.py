"""KV turned on the device: the bits of the host's transcoder, by the twins and by the kernels."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from baton.types import SCALED_DTYPES, KvLayout
from baton_kernels import kv_convert as twins
from baton_kernels.gpu import kv_convert as kernels
from baton_kernels.kv_convert import DTYPES, Conversion
from baton_kernels.kv_pack import Runs
from engine.kv.range import KvRange
from engine.kv.tensors.paged import TorchKvPool
from kv_transfer.codec import ChunkCodec
from kv_transfer.wire_format import WireFormat, wire_format

CPU = torch.device("cpu")
SENT, RECEIVED = (4, 0, 2, 5), (1, 3, 0, 5, 2, 4)
PIECES = [KvRange(0, 8, 0, 2), KvRange(3, 7, 1, 1)]
ODD = [0.0, -0.0, 1e-40, -1e-38, 3e38, -(2.0**-100), 2.0**-9, float("inf"), float("nan")]


def pool_of(dtype: str, block_size: int, head_dim: int, *, is_empty: bool = False) -> TorchKvPool:
    """Heads with elements of different size, and some that are no numbers."""
    pool = TorchKvPool(KvLayout("m", 3, 2, head_dim, dtype, block_size), 6, CPU)
    if is_empty:
        return pool
    generator = torch.Generator().manual_seed(block_size)
    values = torch.randn(pool.tensor.shape, generator=generator)
    values *= 10.0 ** torch.randint(-4, 4, values.shape[:4], generator=generator)[..., None, None]
    for odd, place in zip(ODD, itertools.count(5), strict=False):
        values.view(-1)[place * 31 :: 601] = odd
    if pool.scales is None:
        pool.tensor.copy_(values.to(pool.tensor.dtype))
        return pool
    codes = torch.randint(-128, 128, values.shape, generator=generator, dtype=torch.int8)
    pool.tensor.view(torch.int8).copy_(codes)
    pool.scales.copy_(values[..., 0])
    return pool


def conversion_of(pool: TorchKvPool, wire: WireFormat) -> Conversion:
    return Conversion(pool.layout.dtype, wire.dtype, wire.has_row_scales, wire.head_dim)


def numbers(data: np.ndarray, dtype: str) -> np.ndarray:
    """Bits, the same for all that is no number."""
    bits = torch.from_numpy(data.copy()).view(DTYPES[dtype])
    whole = bits.view({4: torch.int32, 2: torch.int16, 1: torch.int8}[bits.dtype.itemsize])
    return torch.where(bits.isnan(), 0x7F, whole).numpy()


#: A pool, its payloads' type, and the sender's: its own where it is the sender, too.
CASES = [
    ("float32", "bfloat16", "float32"),
    ("float32", "int8", "float32"),
    ("bfloat16", "fp8", "bfloat16"),
    ("bfloat16", "float32", "bfloat16"),
    ("float16", "int8", "float16"),
    ("float16", "bfloat16", "float16"),
    ("int8", "float16", "int8"),
    ("int8", "fp8", "int8"),
    ("fp8", "bfloat16", "fp8"),
    ("bfloat16", "fp8", "fp8"),
    ("int8", "fp8", "fp8"),
]


# Values too large for float16 become infinite; numpy, which interprets, warns of it.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("package", [twins, kernels], ids=["twin", "kernel"])
@pytest.mark.parametrize(("dtype", "wire_dtype", "sender"), CASES)
def test_bits_are_those_of_the_host(package, dtype, wire_dtype, sender):
    block_size, head_dim = 8, 6
    wire = wire_format(wire_dtype, KvLayout("m", 3, 2, head_dim, sender, 4))
    pool = pool_of(dtype, 4 if sender == dtype else block_size, head_dim)
    conversion = conversion_of(pool, wire)
    for piece in PIECES:
        runs = Runs(
            piece.first_token,
            piece.num_tokens,
            piece.first_layer,
            piece.num_layers,
            wire.block_size,
        )
        payload = memoryview(bytearray(wire.num_bytes(piece)))
        if sender == dtype:
            ChunkCodec(pool, wire).pack(SENT, piece, payload)
            got = torch.full((payload.nbytes,), 77, dtype=torch.uint8)
            package.kv_encode(pool._blocks, SENT, runs, conversion, got)
            same_payload(got.numpy(), np.frombuffer(payload, np.uint8), wire)
        else:
            ChunkCodec(pool_of(sender, 4, head_dim), wire).pack(SENT, piece, payload)
        target, expected = (pool_of(dtype, block_size, head_dim, is_empty=True) for _ in range(2))
        ChunkCodec(expected, wire).unpack(RECEIVED, piece, payload)
        data = torch.frombuffer(payload, dtype=torch.uint8)
        package.kv_decode(target._blocks, RECEIVED, runs, conversion, data)
        same_pool(target, expected)


def same_payload(got: np.ndarray, wanted: np.ndarray, wire: WireFormat) -> None:
    if wire.dtype in SCALED_DTYPES:
        # Codes are numbers, scales are NaN where one was not: the same bits for all of those.
        assert np.array_equal(got, wanted)
    else:
        assert np.array_equal(numbers(got, wire.dtype), numbers(wanted, wire.dtype))


def same_pool(got: TorchKvPool, wanted: TorchKvPool) -> None:
    dtype = got.layout.dtype
    flat = [pool.tensor.contiguous().view(torch.uint8).flatten().numpy() for pool in (got, wanted)]
    assert np.array_equal(*(numbers(each, dtype) for each in flat))
    if got.scales is not None and wanted.scales is not None:
        scales = [pool.scales.contiguous().view(torch.int32) for pool in (got, wanted)]
        assert torch.equal(*scales)
