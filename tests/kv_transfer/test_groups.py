"""KV in two pools, that of windowed layers apart: chunks of one group each go straight between a
pool and the wire, and workers with all KV in one pool take and send the same."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.types import KvLayout, Sample
from baton.v1 import kv_pb2
from engine.kv.groups.full import FULL
from engine.kv.groups.group import SlotTable
from engine.kv.groups.window import WINDOWED, WindowSlots
from engine.kv.layout import groups_of
from engine.kv.part import KvPart
from engine.kv.range import ALL, KvRange
from engine.kv.tensors.array import ArrayKvPool
from engine.kv.tensors.grouped import GroupedKvPool
from engine.kv.tensors.packed import PackedPool
from engine.kv.tensors.paged import GroupedTensorPool, TorchKvPool, host_pool
from kv_transfer.codec import ChunkCodec
from kv_transfer.frame import FrameError, place_checksum
from kv_transfer.receiver import place_of
from kv_transfer.send_connection import Finish, Send
from kv_transfer.ticket import Reservation, Ticket, TicketCommitted
from kv_transfer.wire_format import wire_format

CPU, NUM_BLOCKS, NUM_LAYERS = torch.device("cpu"), 16, 5


def layout_of(
    windowed: tuple[int, ...], dtype: str = "float32", block_size: int = 4, window: int = 6
) -> KvLayout:
    shape = ("m", NUM_LAYERS, 2, 16, dtype, block_size)
    return KvLayout(*shape, window=window, windowed_layers=windowed)


def grouped_pool(layout: KvLayout) -> GroupedTensorPool:
    """All blocks have slots, in another order."""
    pool = GroupedTensorPool(layout, NUM_BLOCKS, NUM_BLOCKS, host_pool)
    slots = WindowSlots(SlotTable(NUM_BLOCKS, pool.slot_tables[WINDOWED].of_block))
    for block_id in reversed(range(NUM_BLOCKS)):
        slots.take(block_id)
    return pool


class GroupedArrayPool(GroupedKvPool[ArrayKvPool]):
    """Over arrays: see grouped_pool."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        super().__init__(layout, num_blocks, num_blocks, ArrayKvPool)
        slots = WindowSlots(SlotTable(num_blocks, self.slot_tables[WINDOWED].of_block))
        for block_id in reversed(range(num_blocks)):
            slots.take(block_id)


def read(pool: TorchKvPool | GroupedTensorPool, table: tuple[int, ...], piece: KvRange) -> bytes:
    data = bytearray(piece.num_bytes(pool.layout.token_layer_bytes))
    pool.pack(table, piece, memoryview(data))
    return bytes(data)


windows = st.sets(st.integers(0, NUM_LAYERS - 1), min_size=1, max_size=NUM_LAYERS - 1)


@settings(deadline=None)
@given(
    windowed=windows,
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
    sizes=st.tuples(st.sampled_from([4, 4, 8]), st.sampled_from([4, 4, 8])),
    is_grouped=st.tuples(st.booleans(), st.booleans()),
    data=st.data(),
)
def test_a_chunk_of_one_group_lands_where_its_layers_are(
    windowed: set[int],
    dtype: str,
    sizes: tuple[int, int],
    is_grouped: tuple[bool, bool],
    data: st.DataObject,
) -> None:
    """Whatever its group, wherever either side keeps it, with and without checksums."""
    source, target = (
        grouped_pool(layout) if apart else TorchKvPool(layout, NUM_BLOCKS, CPU)
        for layout, apart in zip(
            (layout_of(tuple(sorted(windowed)), dtype, size) for size in sizes),
            is_grouped,
            strict=True,
        )
    )
    tables = [tuple(data.draw(st.permutations(range(NUM_BLOCKS))))[:6] for _ in range(2)]
    whole = KvRange(0, 24, 0, NUM_LAYERS)
    random_bytes = np.random.default_rng(data.draw(st.integers(0, 9))).bytes(
        whole.num_bytes(source.layout.token_layer_bytes)
    )
    source.unpack(tables[0], whole, memoryview(random_bytes))
    group = data.draw(st.sampled_from((ALL, FULL, WINDOWED)))
    num_layers = groups_of(source.layout).num_layers(group)
    first, layer = data.draw(st.integers(0, 23)), data.draw(st.integers(0, num_layers - 1))
    count = data.draw(st.integers(1, 24 - first))
    piece = KvRange(first, count, layer, data.draw(st.integers(1, num_layers - layer)), group)
    codecs = [ChunkCodec(pool, wire_format(dtype, source.layout)) for pool in (source, target)]
    payload = memoryview(bytearray(codecs[0].wire.num_bytes(piece)))
    checksum = codecs[0].pack_checked(tables[0], piece, payload, 3)
    plain = memoryview(bytearray(len(payload)))
    codecs[0].pack(tables[0], piece, plain)
    assert payload == plain
    assert checksum == xxhash.xxh3_64_intdigest(payload, 3)
    assert codecs[1].unpack_checked(tables[1], piece, payload, 3, checksum)
    layers = groups_of(source.layout).layers(group)[piece.first_layer : piece.end_layer]
    for number in range(NUM_LAYERS):
        one = KvRange(first, count, number, 1)
        expected = (
            read(source, tables[0], one)
            if number in layers
            else bytes(one.num_bytes(source.layout.token_layer_bytes))
        )
        assert read(target, tables[1], one) == expected


def test_whole_blocks_of_a_group_are_lent_as_they_lie_in_its_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kv_transfer.codec.MIN_VIEW_BYTES", 1)
    pool = grouped_pool(layout_of((0, 2, 3)))
    codec, table = ChunkCodec(pool, wire_format("float32", pool.layout)), (5, 2)
    for group in (FULL, WINDOWED):
        own = pool.pools[group]
        own.tensor.normal_()
        piece = KvRange(0, 8, 0, own.layout.num_layers, group)
        lent = codec.views(table, piece)
        assert [view.nbytes for view in lent] == [own.layout.block_bytes] * 2
        payload = memoryview(bytearray(codec.wire.num_bytes(piece)))
        codec.pack(table, piece, payload)
        assert b"".join(lent) == payload
    assert codec.views(table, KvRange(0, 8, 0, NUM_LAYERS)) == (), "it is in two pools"


def test_blocks_without_a_slot_are_neither_lent_nor_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.codec.MIN_VIEW_BYTES", 1)
    pool = GroupedTensorPool(layout_of((0, 2, 3)), NUM_BLOCKS, 4, host_pool)
    codec = ChunkCodec(pool, wire_format("float32", pool.layout))
    piece = KvRange(0, 8, 0, 3, WINDOWED)
    payload = memoryview(bytearray(codec.wire.num_bytes(piece)))
    checksum = xxhash.xxh3_64_intdigest(payload, 0)
    with pytest.raises(ValueError, match="no slot"):
        codec.views((5, 2), piece)
    with pytest.raises(ValueError, match="no slot"):
        codec.pack_checked((5, 2), piece, payload, 0)
    with pytest.raises(ValueError, match="no slot"):
        codec.unpack_checked((5, 2), piece, payload, 0, checksum)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_lent", [False, True])
@pytest.mark.parametrize("is_grouped", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("transport", ["loopback", "shm", "tcp"])
def test_a_sequence_arrives_with_its_window_and_no_more(
    make_rig, monkeypatch, transport, is_grouped, is_lent, seed
) -> None:
    if is_lent:
        monkeypatch.setattr("kv_transfer.codec.MIN_VIEW_BYTES", 1)
    rng = random.Random(seed)
    windowed = tuple(sorted(rng.sample(range(NUM_LAYERS), rng.randint(1, NUM_LAYERS - 1))))
    make_source, make_target = (GroupedArrayPool if apart else ArrayKvPool for apart in is_grouped)
    sizes = rng.choice([(4, 4), (4, 3), (3, 4)])
    source_layout, target_layout = (layout_of(windowed, "int64", size) for size in sizes)
    rig = make_rig(
        transport,
        source_layout=source_layout,
        target_layout=target_layout,
        make_source=make_source,
        make_target=make_target,
        sender_chunk_bytes=rng.choice([600, 5000, 1 << 16]),
        receiver_chunk_bytes=1 << 16,
    )
    num_tokens = rng.randint(1, 20)
    tables = [tuple(rng.sample(range(NUM_BLOCKS), 7)) for _ in range(2)]
    ticket = rig.offer(tables[1][: -(-num_tokens // sizes[1])], 0, num_tokens)
    rig.sender.begin("k", ticket.data)
    start = groups_of(source_layout).whole_start(num_tokens)
    cut = rng.randint(0, num_tokens)
    for first, end in ((0, cut), (cut, num_tokens)):
        if first < end:
            piece = KvRange(first, end - first, 0, NUM_LAYERS)
            rig.sender.submit(Send("k", tables[0], piece, whole_start=start))
    rig.sender.submit(Finish("k", num_tokens, (Sample(7),), time.monotonic()))
    event, done = rig.event(), rig.done()
    assert isinstance(event, TicketCommitted), event
    assert done.error is None
    first_sent = max(start, groups_of(target_layout).whole_start(num_tokens))
    assert event.whole_start == first_sent
    cells = NUM_LAYERS * num_tokens - len(windowed) * first_sent
    assert event.num_bytes == done.num_bytes == cells * source_layout.token_layer_bytes
    for layer in range(NUM_LAYERS):
        first = first_sent if layer in windowed else 0
        one = KvRange(first, num_tokens - first, layer, 1)
        read_here, sent = (
            bytearray(one.num_bytes(source_layout.token_layer_bytes)) for _ in range(2)
        )
        rig.source.pack(tables[0], one, memoryview(sent))
        rig.target.pack(tables[1], one, memoryview(read_here))
        assert read_here == sent


@pytest.mark.parametrize(
    ("make_source", "groups"),
    [(GroupedArrayPool, {FULL, WINDOWED}), (ArrayKvPool, {ALL})],
)
def test_a_chunk_lies_in_one_pool_of_its_sender(make_rig, monkeypatch, make_source, groups) -> None:
    seen: set[int] = set()

    def pack(pool: PackedPool, table: tuple[int, ...], piece: KvRange, out: memoryview) -> None:
        seen.add(piece.group)
        plain(pool, table, piece, out)

    plain = PackedPool.pack
    monkeypatch.setattr(PackedPool, "pack", pack)
    layout = layout_of((0, 2), "int64")
    rig = make_rig("loopback", source_layout=layout, target_layout=layout, make_source=make_source)
    rig.sender.begin("k", rig.offer((3, 1, 2), 0, 11).data)
    rig.send_all("k", (0, 4, 5), 11)
    assert isinstance(rig.event(), TicketCommitted)
    assert seen == groups


def test_windowed_layers_are_not_written_before_the_window_of_the_ticket() -> None:
    """There the owner holds no slots."""
    layout = layout_of((0, 2), window=4)
    assert groups_of(layout).whole_start(12) == 8

    def is_taken(piece: KvRange) -> bool:
        reserved = Reservation(7, b"", (0, 1, 2), 0, 12, 12, 30.0)
        ticket = Ticket(reserved, layout, KvPart.whole(layout), 5.0)
        ticket.present(1, KvPart.whole(layout), None, 2.0)
        return not ticket.pin(1, piece, 3.0)

    assert is_taken(KvRange(0, 12, 0, 3, FULL))
    assert is_taken(KvRange(8, 4, 0, 2, WINDOWED))
    assert is_taken(KvRange(8, 4, 0, NUM_LAYERS))
    assert is_taken(KvRange(4, 4, 3, 2))
    assert not is_taken(KvRange(7, 5, 0, 2, WINDOWED))
    assert not is_taken(KvRange(4, 8, 2, 1))
    assert not is_taken(KvRange(0, 12, 0, 4, FULL)), "there are three"


def test_a_chunks_place_says_its_group() -> None:
    chunk = kv_pb2.KvChunk(ticket_id=1, num_tokens=4, num_layers=2)
    plain = place_checksum(chunk)
    chunk.group = kv_pb2.KV_GROUP_WINDOWED
    assert place_checksum(chunk) != plain
    assert place_of(chunk) == KvRange(0, 4, 0, 2, WINDOWED)
    for unknown in (99, -1):
        chunk.group = unknown  # type: ignore[assignment]
        assert place_checksum(chunk) != plain
        with pytest.raises(FrameError, match=f"unknown group {unknown}"):
            place_of(chunk)
