"""A device packs, unpacks and sums payloads as the host's codec does, whatever the pool; and in
which order it all runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from baton.types import KvLayout
from baton_kernels.word_sum import host_checksum
from engine.kv.range import KvRange
from engine.kv.tensors import paged as torch_kv_pool
from engine.kv.tensors import pinned_copy
from engine.kv.tensors.copy_order import HostOrder
from engine.kv.tensors.device_copy import PagedDeviceCopy
from engine.kv.tensors.paged import TorchKvPool
from engine.kv.tensors.pinned_staging import PinnedStagingBuffer
from kv_transfer.codec import ChunkCodec
from kv_transfer.wire_format import WireFormat, wire_format
from tests.support.device_double import DoubleMemory

CPU = torch.device("cpu")
SENT, RECEIVED = (4, 0, 2, 5), (1, 3, 0, 5, 2, 4, 6, 7)
SEED = 77


def layout_of(dtype: str, block_size: int = 4, head_dim: int = 8) -> KvLayout:
    return KvLayout("m", 3, 2, head_dim, dtype, block_size)


def plain(dtype: str, head_dim: int = 8) -> WireFormat:
    """Payloads of the pool's own type."""
    return wire_format(dtype, layout_of(dtype, head_dim=head_dim))


def pool_of(
    layout: KvLayout, order: HostOrder | None = None
) -> tuple[TorchKvPool, PagedDeviceCopy]:
    """A pool of random bytes, and what would copy it were it on a device."""
    pool = TorchKvPool(layout, 8, CPU)
    generator = torch.Generator().manual_seed(layout.block_size)
    pool._blocks.copy_(torch.randint(0, 256, pool._blocks.shape, generator=generator))
    return pool, PagedDeviceCopy(layout, pool._blocks, order or HostOrder(), DoubleMemory())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "fp8"])
@pytest.mark.parametrize("target_block_size", [4, 3, 8])
@pytest.mark.parametrize(
    "piece", [KvRange(0, 16, 0, 3), KvRange(4, 8, 1, 2), KvRange(3, 7, 1, 1), KvRange(5, 2, 0, 3)]
)
def test_payloads_are_those_of_the_host(dtype, target_block_size, piece):
    source, copy = pool_of(layout_of(dtype))
    target, back = pool_of(layout_of(dtype, target_block_size))
    wire = wire_format(dtype, source.layout)
    payload = torch.zeros(wire.num_bytes(piece), dtype=torch.uint8)
    is_whole = piece.first_token % 4 == piece.num_tokens % 4 == 0
    is_scaled = dtype in ("int8", "fp8")
    assert copy.fits(piece, wire) == (is_whole or not is_scaled)
    if not copy.fits(piece, wire):
        with pytest.raises(ValueError, match="whole words"):
            copy.pack(SENT, piece, wire, payload, SEED)
        return
    wanted = memoryview(bytearray(payload.nbytes))
    ChunkCodec(source, wire).pack(SENT, piece, wanted)
    checksum = copy.pack(SENT, piece, wire, payload, SEED)
    assert payload.numpy().tobytes() == wanted
    assert checksum == host_checksum(payload, SEED)

    assert back.fits(piece, wire) == (not is_scaled or target_block_size == 4)
    if not back.fits(piece, wire):
        return
    other, _ = pool_of(target.layout)
    ChunkCodec(other, wire).unpack(RECEIVED, piece, wanted)
    assert back.unpack(RECEIVED, piece, wire, payload, SEED) == checksum
    assert torch.equal(target._blocks, other._blocks)
    passed = bytearray(payload.nbytes)
    copy.pack_to_host(SENT, piece, wire, memoryview(passed))
    assert passed == wanted
    target._blocks.zero_()
    other._blocks.zero_()
    ChunkCodec(other, wire).unpack(RECEIVED, piece, wanted)
    back.unpack_from_host(RECEIVED, piece, wire, wanted)
    assert torch.equal(target._blocks, other._blocks)
    payload[9] ^= 1
    assert back.unpack(RECEIVED, piece, wire, payload, SEED) != checksum


@pytest.mark.parametrize(
    ("dtype", "wire_dtype"),
    [("bfloat16", "fp8"), ("float16", "int8"), ("float32", "bfloat16"), ("int8", "fp8")],
)
@pytest.mark.parametrize("piece", [KvRange(0, 16, 0, 3), KvRange(3, 7, 1, 2)])
def test_kv_is_converted_as_the_host_does(dtype, wire_dtype, piece):
    """Before it leaves, and where it arrives: over the device's own memory, and through the
    host."""
    source, copy = pool_of(layout_of(dtype))
    target, back = pool_of(layout_of(dtype, block_size=8))
    expected, _ = pool_of(target.layout)
    for pool in (source, target, expected):
        generator = torch.Generator().manual_seed(3)
        for part in (pool.tensor, pool.scales):
            if part is not None:
                values = torch.randint(-9, 9, part.shape, generator=generator)
                part.copy_(values.to(part.dtype))
    wire = wire_format(wire_dtype, source.layout)
    wanted = memoryview(bytearray(wire.num_bytes(piece)))
    ChunkCodec(source, wire).pack(SENT, piece, wanted)
    ChunkCodec(expected, wire).unpack(RECEIVED, piece, wanted)

    payload = torch.zeros(len(wanted), dtype=torch.uint8)
    checksum = copy.pack(SENT, piece, wire, payload, SEED)
    assert payload.numpy().tobytes() == wanted
    assert checksum == host_checksum(payload, SEED)
    before = target._blocks.clone()
    assert back.unpack(RECEIVED, piece, wire, payload, SEED) == checksum
    assert torch.equal(target._blocks, expected._blocks)

    passed = memoryview(bytearray(len(wanted)))
    copy.pack_to_host(SENT, piece, wire, passed)
    assert passed == wanted
    target._blocks.copy_(before)
    back.unpack_from_host(RECEIVED, piece, wire, wanted)
    assert torch.equal(target._blocks, expected._blocks)
    payload[9] ^= 1
    assert back.unpack(RECEIVED, piece, wire, payload, SEED) != checksum


@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 3), ("int8", 5), ("float16", 1)])
def test_rows_that_are_no_whole_words_are_left_to_the_host(dtype, head_dim):
    _, copy = pool_of(layout_of(dtype, 4, head_dim))
    is_word = dtype == "int8" and not (4 * head_dim + 16) % 8
    assert copy.fits(KvRange(0, 4, 0, 3), plain(dtype, head_dim=head_dim)) == is_word


@pytest.mark.parametrize(
    ("block_ids", "piece", "num_bytes"),
    [
        ((0, 8), KvRange(0, 8, 0, 1), 1024),
        ((0, -1), KvRange(0, 8, 0, 1), 1024),
        ((0,), KvRange(0, 8, 0, 1), 1024),
        ((0, 1), KvRange(0, 8, 3, 1), 1024),
        ((0, 1), KvRange(0, 8, 0, 1), 1016),
    ],
)
def test_ranges_that_are_not_there_are_refused(block_ids, piece, num_bytes):
    _, copy = pool_of(layout_of("float32"))
    for call in (copy.pack, copy.unpack):
        with pytest.raises(ValueError, match=r"."):
            call(block_ids, piece, plain("float32"), torch.zeros(num_bytes).byte(), SEED)


def test_bytes_go_to_the_device_and_back_with_their_checksum():
    _, copy = pool_of(layout_of("float32"))
    data = bytearray(range(77))
    payload = torch.zeros(77, dtype=torch.uint8)
    assert copy.put(memoryview(data), payload, SEED) == host_checksum(payload, SEED)
    again = bytearray(77)
    assert copy.take(payload, memoryview(again), SEED) == host_checksum(payload, SEED)
    assert again == data


@dataclass
class LateOrder(HostOrder):
    """A device that does nothing before it must: what the engine has started runs when a copy
    begins that follows it."""

    started: list[torch.Tensor] = field(default_factory=list)
    num_followed: int = 0

    def mark(self) -> int:
        return len(self.started)

    def follow(self, mark: object) -> None:
        assert isinstance(mark, int)
        self.num_followed = mark

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.run(self.num_followed)
        yield

    def start(self, rows: torch.Tensor) -> None:
        """A kernel that fills `rows` with ones."""
        self.started.append(rows)

    def run(self, count: int) -> None:
        for rows in self.started[:count]:
            rows.fill_(1)
        del self.started[:count]
        self.num_followed = 0


def test_what_is_sent_was_written_before_its_mark():
    order = LateOrder()
    pool, copy = pool_of(layout_of("float32"), order)
    payload = torch.zeros(1024, dtype=torch.uint8)
    order.start(pool._blocks[0, 0])
    mark = order.mark()
    order.start(pool._blocks[0, 1])
    order.follow(mark)
    copy.pack((0, 1), KvRange(0, 8, 0, 1), plain("float32"), payload, SEED)
    assert (payload[:512] == 1).all()
    assert len(order.started) == 1, "packing waits for nothing else"


def test_what_arrives_is_not_overwritten_by_an_earlier_owner():
    order = LateOrder()
    pool, copy = pool_of(layout_of("float32"), order)
    order.start(pool._blocks[0])
    mark = order.mark()
    order.start(pool._blocks[1])
    order.follow(mark)
    copy.unpack((0,), KvRange(0, 4, 0, 1), plain("float32"), torch.full((512,), 9).byte(), SEED)
    assert len(order.started) == 1, "unpacking waits for nothing else"
    order.run(1)
    assert (pool._blocks[0, 0] == 9).all()
    assert (pool._blocks[0, 1] == 1).all()


def test_a_pool_on_a_device_orders_what_passes_the_host(monkeypatch):
    """torch's meta device stands for one: it runs nothing."""
    order, seen = LateOrder(), []
    monkeypatch.setattr(torch_kv_pool, "copy_order", lambda _: order)
    monkeypatch.setattr(torch_kv_pool, "cuda_memory", lambda _: None)
    monkeypatch.setattr(pinned_copy, "kv_pack", lambda *_: seen.append(len(order.started)))
    monkeypatch.setattr(pinned_copy, "kv_unpack", lambda *_: seen.append(len(order.started)))
    for name in ("to_host", "to_device"):
        monkeypatch.setattr(PinnedStagingBuffer, name, lambda *_: None)
    pool = TorchKvPool(layout_of("float32"), 2, torch.device("meta"))
    assert pool.device_copy is None
    order.start(torch.zeros(1))
    mark = pool.mark()
    order.start(torch.zeros(1))
    data = memoryview(bytearray(512))
    pool.follow(mark)
    pool.pack((0,), KvRange(0, 4, 0, 1), data)
    pool.follow(pool.mark())
    pool.unpack((0,), KvRange(0, 4, 0, 1), data)
    assert seen == [1, 0]
