"""Particulars of cuda_ipc, on a double of the device: payloads in shared slots, and memory that
outlives the processes that have it mapped."""

from __future__ import annotations

import os
import select
import socket
import time
from typing import Any

import numpy as np
import pytest

from baton.errors import ConfigError, HandoffFailed
from baton.kv_transports import DEVICE_MAX_CHUNK_BYTES, DEVICE_NUM_CREDITS, listened_on
from baton.types import KvLayout, WorkerIdentity
from baton.v1 import kv_pb2
from baton.wire import layout_to_proto
from engine.kv.range import KvRange
from engine.kv.tensors.array import ArrayKvPool
from engine.kv.tensors.device_copy import PagedDeviceCopy
from engine.kv.tensors.packed import PackedPool
from kv_transfer.device_memory import warm_up_copies
from kv_transfer.frame import encode
from kv_transfer.handshake import ReceiverConfig
from kv_transfer.kv_secret import KvSecret
from kv_transfer.send_connection import Send
from kv_transfer.ticket import Endpoint, TicketAborted, TicketCommitted
from kv_transfer.transport.connection import TransportError
from kv_transfer.transport.connector import make_connector, usable
from kv_transfer.transport.cuda_ipc import CudaIpcConnection, RetiredAreas
from kv_transfer.transport.listeners import (
    DEFAULT_MAX_CHUNK_BYTES,
    DEFAULT_NUM_CREDITS,
    open_receiver,
)
from tests.support.device_double import DeviceArrayPool, DoubleMemory

PATIENCE_S = 30.0
INTS = KvLayout("m", 3, 2, 4, "int64", 4)
SECRET = KvSecret(b"0123456789abcdef")


def hand_over(rig: Any, key: str = "k") -> HandoffFailed | None:
    """One sequence of 11 tokens, in blocks 5, 2, 9 of the source and 3, 1, 0, 7 of the target."""
    offered = rig.offer((3, 1, 0, 7), 0, 11)
    rig.sender.begin(key, offered.data)
    rig.send_all(key, (5, 2, 9), 11)
    return rig.done().error


def is_whole(rig: Any) -> bool:
    return all(
        np.array_equal(rig.token(rig.source, (5, 2, 9), t), rig.token(rig.target, (3, 1, 0, 7), t))
        for t in range(11)
    )


@pytest.mark.parametrize("target_block_size", [4, 3, 8])
@pytest.mark.parametrize("secret", [None, SECRET])
def test_kv_passes_no_host(make_rig, monkeypatch, target_block_size, secret):
    """Whatever the block sizes, and with a secret, too."""
    for name in ("pack", "unpack"):
        monkeypatch.delattr(PackedPool, name)
    target = KvLayout("m", 3, 2, 4, "int64", target_block_size)
    rig = make_rig(
        "cuda_ipc",
        source_layout=INTS,
        target_layout=target,
        source_secret=secret,
        target_secret=secret,
    )
    assert hand_over(rig) is None
    assert isinstance(rig.event(), TicketCommitted)
    assert is_whole(rig)


@pytest.mark.parametrize("wire_dtype", ["float16", "fp8", "int8"])
def test_kv_is_converted_without_passing_the_host(make_rig, monkeypatch, wire_dtype):
    for name in ("pack", "unpack"):
        monkeypatch.delattr(PackedPool, name)
    layout = KvLayout("m", 3, 2, 4, "float32", 4)
    rig = make_rig("cuda_ipc", source_layout=layout, target_layout=layout, wire_dtype=wire_dtype)
    rig.source.data[...] = 448 if wire_dtype == "fp8" else 127
    assert hand_over(rig) is None
    assert isinstance(rig.event(), TicketCommitted)
    assert is_whole(rig)


def test_kv_that_the_device_cannot_pack_is_packed_by_the_host(make_rig, monkeypatch):
    """Rows that are no whole words."""
    for name in ("pack", "unpack"):
        monkeypatch.delattr(PagedDeviceCopy, name)
    layout = KvLayout("m", 3, 2, 3, "bfloat16", 4)
    rig = make_rig("cuda_ipc", source_layout=layout, target_layout=layout)
    rig.source.data[...] = 1
    assert hand_over(rig) is None
    assert isinstance(rig.event(), TicketCommitted)
    assert is_whole(rig)


@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_a_payload_that_is_changed_in_its_slot_kills_its_ticket(make_rig, monkeypatch, dtype):
    """By whichever way it is unpacked: float32 travels as float16."""
    layout = KvLayout("m", 3, 2, 4, dtype, 4)
    rig = make_rig("cuda_ipc", source_layout=layout, target_layout=layout, wire_dtype="float16")
    send = CudaIpcConnection.send

    def damage(self, frame, staged=None, *, more=False):
        if staged:
            staged.device[17] ^= 4
        send(self, frame, staged, more=more)

    monkeypatch.setattr(CudaIpcConnection, "send", damage)
    assert isinstance(hand_over(rig), HandoffFailed)
    event = rig.event()
    assert isinstance(event, TicketAborted)
    assert "wrong checksum" in event.message


def test_the_area_is_one_per_connection_and_large_enough(make_rig):
    rig = make_rig("cuda_ipc", num_credits=3, receiver_chunk_bytes=5000)
    assert hand_over(rig) is None
    (area,) = rig.target.memory.allocated
    area.part(2 * 8192, 8192)
    with pytest.raises(AssertionError):
        area.part(2 * 8192, 8193)
    assert len(rig.source.memory.opened) == 1
    assert not rig.source.memory.allocated


def test_memory_is_not_freed_while_a_sender_has_it_mapped(make_rig):
    rig = make_rig("cuda_ipc")
    (listener,) = rig.running.listeners
    (endpoint,) = rig.running.endpoints
    connect = make_connector("cuda_ipc", memory=rig.source.memory)
    connection = connect([endpoint], PATIENCE_S)
    connection.send(_hello(rig.source.layout))
    while not isinstance(connection.receive(), kv_pb2.KvAccept):
        select.select([connection.fileno()], [], [])
    # A second greeting ends the connection, at the receiver's end only.
    connection.send(_hello(rig.source.layout))
    while listener._peers:
        time.sleep(0.001)
    assert len(listener.retired) == len(rig.target.memory.allocated) == 1
    listener.retired.sweep()
    assert len(rig.target.memory.allocated) == 1
    connection.close()
    listener.retired.sweep()
    assert len(listener.retired) == len(rig.target.memory.allocated) == 0
    assert not rig.source.memory.opened


def test_a_sender_that_goes_frees_the_memory_at_the_next_connection(make_rig):
    rig = make_rig("cuda_ipc", idle_timeout_s=0.01)
    for number in range(3):
        assert hand_over(rig, str(number)) is None
        rig.running.tickets.release(rig.event().ticket_id)
        while rig.source.memory.opened or rig.running.listeners[0]._peers:
            time.sleep(0.001)
    # The sender lets go of its end of the pipe a moment after it has unmapped the memory.
    while rig.target.memory.allocated:
        time.sleep(0.001)
        rig.running.listeners[0].retired.sweep()


def test_closing_waits_for_senders_that_let_go(make_rig):
    rig = make_rig("cuda_ipc")
    assert hand_over(rig) is None
    rig.running.close()
    assert not rig.target.memory.allocated


def test_what_nobody_lets_go_of_stays():
    memory, lent = DoubleMemory(), RetiredAreas()
    ours, theirs = os.pipe()
    lent.keep(memory.allocate(4096), ours)
    lent.drain(0.01)
    assert len(lent) == len(memory.allocated) == 1
    os.close(theirs)
    lent.drain(PATIENCE_S)
    assert not memory.allocated


def test_where_the_memory_cannot_be_mapped_the_next_way_is_taken(make_rig, caplog):
    """As in another container: it costs one handoff, and then this way is tried last."""

    class Foreign(DoubleMemory):
        def open(self, handle, num_bytes):  # noqa: ARG002
            raise OSError("CUresult 801")

    rig = make_rig("cuda_ipc")
    both = open_receiver(
        ReceiverConfig(WorkerIdentity("d0", 7), rig.target, max_chunk_bytes=512),
        rig.events.put,
        time.monotonic,
        transports=("cuda_ipc", "tcp"),
    )
    connect = make_connector("auto", memory=Foreign(), clock=lambda: 0.0)
    first = connect(both.endpoints, PATIENCE_S)
    first.send(_hello(rig.source.layout))
    select.select([first.fileno()], [], [])
    with pytest.raises(TransportError, match="CUresult 801"):
        first.receive()
    first.close()
    assert "cuda_ipc to" in caplog.text
    second = connect(both.endpoints, PATIENCE_S)
    assert second._endpoint.transport == "tcp"
    second.close()
    both.close()
    assert not rig.target.memory.allocated


def _hello(layout: KvLayout) -> kv_pb2.KvHello:
    return kv_pb2.KvHello(
        min_version=1, max_version=1, worker_id="p0", layout=layout_to_proto(layout)
    )


@pytest.mark.parametrize(
    ("change", "is_taken"),
    [
        ({}, True),
        ({"payload_checksum": kv_pb2.KV_PAYLOAD_CHECKSUM_UNSPECIFIED}, False),
        ({"max_chunk_bytes": 4097}, False),
        ({"num_credits": 1 << 30}, False),
        ({"num_credits": 3}, False),
        ({"num_credits": 0}, False),
        ({"device_memory": kv_pb2.KvDeviceMemory(handle=b"0 0", stride=4096)}, False),
    ],
    ids=["fits", "checksum", "stride", "too many", "too small", "none", "handle"],
)
def test_an_acceptance_that_does_not_fit_ends_the_connection(change, is_taken):
    receivers, memory = DoubleMemory(), DoubleMemory()
    area = receivers.allocate(2 * 4096)
    fields = {
        "version": 1,
        "num_credits": 2,
        "max_chunk_bytes": 512,
        "payload_checksum": kv_pb2.KV_PAYLOAD_CHECKSUM_WORD_SUM,
        "device_memory": kv_pb2.KvDeviceMemory(handle=area.handle, stride=4096),
    }
    ours, theirs = socket.socketpair()
    with theirs, open(os.devnull) as held:
        connection = CudaIpcConnection(ours, 1.0, memory)
        socket.send_fds(theirs, [encode(kv_pb2.KvAccept(**(fields | change)))], [held.fileno()])
        if is_taken:
            assert connection.receive() is not None
            assert len(memory.opened) == 1
        else:
            with pytest.raises(HandoffFailed):
                connection.receive()
        connection.close()
    assert not memory.opened
    area.close()


def test_an_acceptance_without_a_descriptor_is_none():
    ours, theirs = socket.socketpair()
    with theirs:
        connection = CudaIpcConnection(ours, 1.0, DoubleMemory())
        kind = kv_pb2.KV_PAYLOAD_CHECKSUM_WORD_SUM
        theirs.sendall(encode(kv_pb2.KvAccept(version=1, payload_checksum=kind)))
        with pytest.raises(HandoffFailed, match="without device memory"):
            connection.receive()
        connection.close()


def test_it_is_the_first_choice_where_both_sides_are_on_devices():
    on_host = listened_on("auto", has_device=False)
    assert listened_on("auto", has_device=True) == ("cuda_ipc", *on_host)
    assert "cuda_ipc" not in on_host
    assert listened_on("cuda_ipc", has_device=False) == ("cuda_ipc",)
    offered = [Endpoint(name, "a") for name in ("tcp", "shm", "cuda_ipc")]
    assert list(usable(offered, "auto", lambda _: True)) == offered[::-1]
    assert list(usable(offered, "cuda_ipc", lambda _: True)) == offered[2:]


def test_a_worker_without_a_device_is_refused_by_the_options_name(make_rig):
    pool = ArrayKvPool(INTS, 2)
    with pytest.raises(ConfigError, match=r"kv_transport.*CUDA device"):
        open_receiver(
            ReceiverConfig(WorkerIdentity("d0", 7), pool),
            print,
            time.monotonic,
            transports=("cuda_ipc",),
        )
    rig = make_rig("cuda_ipc")
    connect = make_connector("cuda_ipc")
    with pytest.raises(TransportError, match="no connection over cuda_ipc"):
        connect(rig.running.endpoints, PATIENCE_S)


def test_staging_on_a_device_is_larger():
    for pool, wanted in (
        (DeviceArrayPool(INTS, 2), (DEVICE_NUM_CREDITS, DEVICE_MAX_CHUNK_BYTES)),
        (ArrayKvPool(INTS, 2), (DEFAULT_NUM_CREDITS, DEFAULT_MAX_CHUNK_BYTES)),
    ):
        running = open_receiver(
            ReceiverConfig(WorkerIdentity("d0", 7), pool),
            print,
            time.monotonic,
            transports=("tcp",),
        )
        receiver = running.receiver
        assert (receiver.num_credits, receiver.max_chunk_bytes) == wanted
        running.close()


def test_blocks_that_are_not_there_end_the_handoff_alone(make_rig):
    rig = make_rig("cuda_ipc")
    ticket = rig.offer((0, 1), 0, 6)
    rig.sender.begin("k", ticket.data)
    rig.sender.submit(Send("k", (99,), KvRange(0, 3, 0, 3)))
    error = rig.done().error
    assert error is not None
    assert error.reason == "ENGINE_FAULT"
    assert isinstance(rig.event(), TicketAborted)
    rig.sender.begin("again", rig.offer((0, 1), 0, 6).data)
    rig.send_all("again", (2, 3), 6)
    assert rig.done().error is None


#: What two workers can agree on that differ in dtype alone: its name, and whether rows have scales.
_ALL_FORMS = {
    *((dtype, False) for dtype in ("float32", "float16", "bfloat16", "fp8", "int8")),
    *((dtype, True) for dtype in ("fp8", "int8")),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64"])
def test_every_form_is_packed_and_unpacked_before_the_first_handoff(monkeypatch, dtype):
    """Compiling on a device takes long: no handoff waits for it."""
    pool = DeviceArrayPool(KvLayout("m", 3, 2, 8, dtype, 4), num_blocks=1)
    seen: dict[str, list[tuple[str, bool]]] = {"pack": [], "unpack": []}
    for name, forms in seen.items():
        whole = getattr(PagedDeviceCopy, name)

        def noted(self, block_ids, piece, wire, payload, seed, whole=whole, forms=forms):
            forms.append((wire.dtype, wire.has_row_scales))
            return whole(self, block_ids, piece, wire, payload, seed)

        monkeypatch.setattr(PagedDeviceCopy, name, noted)
    warm_up_copies(pool)
    expected = {("int64", False)} if dtype == "int64" else _ALL_FORMS
    assert sorted(seen["pack"]) == sorted(seen["unpack"]) == sorted(expected)
    assert not pool.memory.allocated


def test_a_pool_in_host_memory_has_nothing_to_warm_up():
    pool = ArrayKvPool(INTS, 1)
    before = pool.data.copy()
    warm_up_copies(pool)
    assert np.array_equal(pool.data, before)
