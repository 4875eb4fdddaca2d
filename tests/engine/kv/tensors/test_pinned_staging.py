"""Bytes pass the host whole and in order, however many pieces they take, and no piece is used
before its last copy is over."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from engine.kv.tensors import pinned_staging
from engine.kv.tensors.pinned_staging import PinnedStagingBuffer

CPU = torch.device("cpu")


class LateBuffer(PinnedStagingBuffer):
    """A device that copies when somebody waits for it: until then a piece holds what it held."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(CPU)
        self._queued: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.most_queued = 0
        copy = torch.Tensor.copy_

        def late(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
            assert non_blocking
            self._queued.append((target, source))
            self.most_queued = max(self.most_queued, len(self._queued))

        patch.setattr(torch.Tensor, "copy_", late)
        self._copy = copy

    def _fence(self) -> Callable[[], None]:
        last = self._queued[-1]

        def wait() -> None:
            while any(one is last for one in self._queued):
                target, source = self._queued.pop(0)
                self._copy(target, source)

        return wait


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_staging, "PIECE_BYTES", 8)


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 16, 23, 64])
def test_bytes_arrive_as_they_were(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    sent = torch.arange(num_bytes, dtype=torch.uint8)
    back = torch.zeros(num_bytes, dtype=torch.uint8)
    data = bytearray(num_bytes)
    with monkeypatch.context() as patch:
        buffer = LateBuffer(patch)
        buffer.to_host(sent, memoryview(data))
        buffer.to_device(memoryview(data), back)
    assert data == bytes(range(num_bytes))
    assert torch.equal(back, sent)
    assert buffer.most_queued == min(2, -(-num_bytes // 8)), "one is copied beside the other"


def test_staging_is_the_threads_own_and_grows() -> None:
    buffer = PinnedStagingBuffer(CPU)
    first = buffer.staging(8)
    assert buffer.staging(4).data_ptr() == first.data_ptr()
    assert len(buffer.staging(32)) == 32


def test_each_thread_has_memory_of_its_own() -> None:
    buffer, found = PinnedStagingBuffer(CPU), list[set[int]]()

    def use() -> None:
        tensors = (buffer.staging(8), *buffer._pieces())
        found.append({tensor.data_ptr() for tensor in tensors})

    use()
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert [len(pointers) for pointers in found] == [3, 3]
    assert found[0].isdisjoint(found[1])
