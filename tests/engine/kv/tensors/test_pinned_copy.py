"""KV leaves a device and returns through pinned pieces, on the copying thread's own stream."""

from __future__ import annotations

from queue import SimpleQueue

import pytest
import torch

from baton.types import KvLayout
from engine.kv.range import KvRange
from engine.kv.tensors import pinned_staging
from engine.kv.tensors.copy_order import HostOrder, StreamOrder
from engine.kv.tensors.paged import TorchKvPool
from engine.kv.tensors.pinned_copy import PinnedCopy
from engine.kv.tensors.pinned_staging import PinnedStagingBuffer
from engine.kv.tiers.runner import ThreadRunner
from tests.support.fake_streams import FakeStream, stand_ins
from worker_core.swap import SwapDone, SwapSpace

CPU, DEVICE = torch.device("cpu"), torch.device("cuda:0")
NUM_BLOCKS = 8


class DevicePool(TorchKvPool):
    """A pool in host memory that copies as one on a device does, in pieces of 64 bytes."""

    def __init__(self, dtype: str, order: HostOrder | StreamOrder) -> None:
        super().__init__(KvLayout("m", 3, 2, 8, dtype, 4), NUM_BLOCKS, CPU)
        self._pinned = PinnedCopy(CPU, order)
        self.mark, self.follow, self.synchronize = order.mark, order.follow, order.synchronize


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_staging, "PIECE_BYTES", 64)


def fill(pool: TorchKvPool) -> None:
    generator = torch.Generator().manual_seed(1)
    pool._blocks.copy_(torch.randint(0, 256, pool._blocks.shape, generator=generator))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("piece", [KvRange(0, 16, 0, 3), KvRange(3, 7, 1, 1), KvRange(4, 0, 0, 2)])
def test_bytes_are_those_of_a_pool_in_host_memory(dtype: str, piece: KvRange) -> None:
    pool = DevicePool(dtype, HostOrder())
    fill(pool)
    plain = TorchKvPool(pool.layout, NUM_BLOCKS, CPU)
    plain._blocks.copy_(pool._blocks)
    wanted, found = (bytearray(piece.num_bytes(pool.layout.token_layer_bytes)) for _ in range(2))
    plain.pack((4, 0, 2, 5), piece, memoryview(wanted))
    pool.pack((4, 0, 2, 5), piece, memoryview(found))
    assert found == wanted
    # What arrives may be read-only.
    plain.unpack((1, 3, 7, 6), piece, memoryview(bytes(wanted)))
    pool.unpack((1, 3, 7, 6), piece, memoryview(bytes(wanted)))
    assert torch.equal(pool._blocks, plain._blocks)


def test_swapped_kv_is_copied_in_pinned_pieces_off_the_engines_thread_and_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine's stream gets marks alone; the swap's follows them, and each copy is complete
    before the next block's begins."""
    engine = stand_ins(monkeypatch)
    streams: list[FakeStream] = []
    for name in ("to_host", "to_device"):
        move = getattr(PinnedStagingBuffer, name)

        def noted(*copied: object, move: object = move) -> None:
            stream = torch.cuda.current_stream(DEVICE)
            assert isinstance(stream, FakeStream)
            stream.calls.append("copy")
            streams.append(stream)
            assert callable(move)
            move(*copied)

        monkeypatch.setattr(PinnedStagingBuffer, name, noted)
    pool = DevicePool("float32", StreamOrder(DEVICE))
    fill(pool)
    before = pool._blocks[:3].clone()
    done = SimpleQueue[SwapDone]()
    runner = ThreadRunner("kv-swap", lambda error: pytest.fail(repr(error)))
    swap = SwapSpace(pool, 1 << 20, runner, done.put, lambda: 0.0)
    engine.calls.append("a kernel that writes the blocks")
    swap.copy_out("k", (0, 1, 2), 12)
    assert done.get(timeout=60).is_out
    pool._blocks.zero_()
    swap.copy_in("k", (5, 6, 7), 0)
    assert not done.get(timeout=60).is_out
    swap.close()
    assert torch.equal(pool._blocks[5:], before)
    assert engine.calls == ["a kernel that writes the blocks", "record", "record"]
    (own,) = {id(stream): stream for stream in streams}.values()
    assert own is not engine
    copies = ["copy", "synchronize"] * 3
    assert own.calls == [("event", 2), *copies, "synchronize", ("event", 3), *copies, "synchronize"]
