"""A device that fails for good ends the worker; a copy that fails on one that works, its ticket."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from baton.types import KvLayout, Sample, Sampling, SequenceSpec, WorkerIdentity
from engine.interface import DeviceLost
from engine.kv.range import KvRange
from engine.kv.tensors.array import ArrayKvPool
from kv_transfer.handshake import ReceiverConfig, SenderConfig
from kv_transfer.send_connection import Finish, Send, SendDone
from kv_transfer.sender import Sender
from kv_transfer.ticket import TicketAborted, TicketEvent
from kv_transfer.transport.base import TransportConfig
from kv_transfer.transport.connector import make_connector
from kv_transfer.transport.listeners import open_receiver
from kv_transfer.transport.loopback import LoopbackHub
from kv_transfer.transport.tcp_stream import TcpServerStream
from tests.support.sim_tiers import SimDecode
from worker_core.commands import Command, StreamEvent
from worker_core.loop import EngineLoop, Heartbeat

PATIENCE_S = 30.0
NUM_TOKENS = 6


class StubDevicePool(ArrayKvPool):
    """Pool of a device that fails at a copy, and, once its context is dead, at everything else."""

    fails = False
    is_dead = False

    def _fail(self) -> None:
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def pack(self, block_ids: Sequence[int], piece: KvRange, out: memoryview) -> None:
        self._fail()
        super().pack(block_ids, piece, out)

    def unpack(self, block_ids: Sequence[int], piece: KvRange, data: memoryview) -> None:
        self._fail()
        super().unpack(block_ids, piece, data)

    def synchronize(self) -> None:
        if self.is_dead:
            self._fail()


def hand_off(
    transport: str,
    source: StubDevicePool,
    target: StubDevicePool,
    on_device_lost: Callable[[DeviceLost], None],
    *,
    is_begun: bool = True,
) -> tuple[TicketEvent | None, SendDone]:
    """What both ends report of one handoff; nothing comes of a ticket that is never presented."""
    events: queue.SimpleQueue[TicketEvent] = queue.SimpleQueue()
    dones: queue.SimpleQueue[SendDone] = queue.SimpleQueue()
    hub = LoopbackHub()
    running = open_receiver(
        ReceiverConfig(WorkerIdentity("d0", 7), target, on_device_lost=on_device_lost),
        events.put,
        time.monotonic,
        transports=(transport,),
        listen=TransportConfig(hub=hub),
    )
    config = SenderConfig(
        WorkerIdentity("p0", 3),
        source,
        make_connector(transport, hub),
        time.monotonic,
        on_device_lost=on_device_lost,
    )
    sender = Sender(config, dones.put, is_inline=transport == "loopback")
    try:
        spec = SequenceSpec("r", tuple(range(NUM_TOKENS)), Sampling())
        offered = running.tickets.offer(spec, (3, 5), 0, NUM_TOKENS)
        sender.begin("a", offered.data)
        sender.submit(Send("a", (1, 2), KvRange(0, NUM_TOKENS, 0, source.layout.num_layers)))
        sender.submit(Finish("a", NUM_TOKENS, (Sample(7),), time.monotonic()))
        done = dones.get(timeout=PATIENCE_S)
        return events.get(timeout=PATIENCE_S) if is_begun else None, done
    finally:
        sender.close()
        running.close()
        # An exception that ends a connection's thread belongs to this test.
        for thread in threading.enumerate():
            if thread.name.startswith("baton-kv"):
                thread.join(PATIENCE_S)


@pytest.mark.parametrize("transport", ["loopback", "tcp", "shm"])
@pytest.mark.parametrize("failing", ["source", "target"])
@pytest.mark.parametrize("is_dead", [False, True])
def test_only_a_device_that_fails_again_is_lost(
    transport: str, failing: str, is_dead: bool
) -> None:
    pools = {
        "source": StubDevicePool(KvLayout("m", 2, 2, 4, "float32", 4), 8),
        "target": StubDevicePool(KvLayout("m", 2, 2, 4, "float32", 3), 8),
    }
    pools[failing].fails, pools[failing].is_dead = True, is_dead
    lost: list[DeviceLost] = []
    event, done = hand_off(transport, pools["source"], pools["target"], lost.append)
    assert isinstance(event, TicketAborted), "the ticket ends either way"
    assert done.error is not None
    assert [str(error) for error in lost] == (
        ["CUDA error: an illegal memory access was encountered"] if is_dead else []
    )


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_a_refused_range_does_not_ask_the_device(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = KvLayout("m", 2, 2, 4, "float32", 4)
    source, target = StubDevicePool(layout, 8), StubDevicePool(layout, 8)
    asked: list[None] = []

    def refuse(*_: object) -> None:
        raise ValueError("outside the blocks")

    monkeypatch.setattr(target, "unpack", refuse)
    monkeypatch.setattr(target, "synchronize", lambda: asked.append(None))
    event, _ = hand_off(transport, source, target, lambda _: None)
    assert isinstance(event, TicketAborted)
    assert not asked


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_device_that_has_no_memory_for_a_connection_is_asked_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = KvLayout("m", 2, 2, 4, "float32", 4)
    source, target = StubDevicePool(layout, 8), StubDevicePool(layout, 8)
    target.fails = target.is_dead = True

    def accept(_stream: TcpServerStream, _frame: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(TcpServerStream, "accept", accept)
    lost: list[DeviceLost] = []
    _, done = hand_off("tcp", source, target, lost.append, is_begun=False)
    assert done.error is not None
    assert len(lost) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_idle_worker_ends_when_a_transfer_finds_its_device_lost() -> None:
    sim = SimDecode(LoopbackHub(), lambda: 0.0)
    loop: EngineLoop[Command, StreamEvent] = EngineLoop(
        sim.core, lambda *_: None, Heartbeat(1.5), name="test-engine"
    )
    loop.start()
    loop.submit(DeviceLost("CUDA error"))
    async with asyncio.timeout(PATIENCE_S):
        await loop.ended.wait()
    await loop.stop()
    assert not loop.is_running


def test_the_core_raises_what_a_transfer_found() -> None:
    worker = SimDecode(LoopbackHub(), lambda: 0.0)
    worker.submit(DeviceLost("CUDA error"))
    with pytest.raises(DeviceLost, match="CUDA error"):
        worker.step()
