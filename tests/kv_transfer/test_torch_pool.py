"""The torch engine's pool takes part in handoffs between unlike types as the numpy one does."""

from __future__ import annotations

import pytest
import torch

from baton.engine.torch_kv_pool import TorchKvPool
from baton.types import KvLayout
from kv_transfer.codec import ChunkCodec
from kv_transfer.coverage import KvRange
from kv_transfer.wire_format import wire_format


def pool_of(dtype: str, block_size: int) -> TorchKvPool:
    layout = KvLayout("m", 3, 2, 8, dtype, block_size)
    return TorchKvPool(layout, 4, torch.device("cpu"))


@pytest.mark.parametrize(
    ("source", "wire", "target", "tolerance"),
    [
        ("float32", "bfloat16", "bfloat16", 2.0**-7),
        ("bfloat16", "bfloat16", "float32", 0.0),
        ("bfloat16", "int8", "float32", 0.03),
        ("float16", "fp8", "bfloat16", 0.5),
    ],
)
def test_a_tensor_arrives_as_another(source, wire, target, tolerance):
    ours, theirs = pool_of(source, 4), pool_of(target, 5)
    values = torch.randn(ours.tensor.shape, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    ours.tensor.copy_(values)
    piece = KvRange(1, 10, 0, 3)
    format_ = wire_format(wire, ours.layout)
    payload = memoryview(bytearray(format_.num_bytes(piece)))
    ChunkCodec(ours, format_).pack((2, 0, 3), piece, payload)
    ChunkCodec(theirs, format_).unpack((1, 3, 0), piece, payload)
    for token in range(1, 11):
        sent = ours.tensor[(2, 0, 3)[token // 4], :, :, :, token % 4].float()
        got = theirs.tensor[(1, 3, 0)[token // 5], :, :, :, token % 5].float()
        torch.testing.assert_close(got, sent, rtol=0, atol=tolerance)
