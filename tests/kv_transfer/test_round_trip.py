"""KV arrives as it left, over every transport, whatever the ranges, chunks and block sizes."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from baton.types import KvLayout, Sample
from engine.kv.range import KvRange
from kv_transfer.send_connection import Finish, Send
from kv_transfer.ticket import TicketCommitted
from tests.support.kv_transports import ALL


def layout(block_size: int, num_layers: int, dtype: str = "int64") -> KvLayout:
    return KvLayout("m", num_layers, 2, 4, dtype, block_size)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_lent", [False, True])
@pytest.mark.parametrize("transport", ALL)
def test_every_missing_token_arrives_and_nothing_else_changes(
    make_rig, monkeypatch, transport, seed, is_lent
):
    if is_lent:
        monkeypatch.setattr("kv_transfer.codec.MIN_VIEW_BYTES", 1)
    rng = random.Random(seed)
    num_layers = rng.randint(1, 5)
    rig = make_rig(
        transport,
        source_layout=layout(rng.randint(1, 7), num_layers),
        target_layout=layout(rng.randint(1, 7), num_layers),
        sender_chunk_bytes=rng.choice([128, 200, 700, 5000]),
        receiver_chunk_bytes=rng.choice([128, 300, 4000]),
        num_credits=rng.choice([1, 2, 4, 9]),
    )
    num_handoffs, source_room = 3, rig.source.layout.block_size * 5
    target_size = rig.target.layout.block_size
    expected = np.full_like(rig.target.data, -1)
    rig.target.data[...] = -1
    free = rng.sample(range(16), 16)
    offered = {}
    for number in range(num_handoffs):
        num_tokens = rng.randint(1, min(source_room, target_size * 5))
        num_cached = rng.randint(0, num_tokens)
        source_blocks = tuple(rng.sample(range(16), 5))
        num_blocks = -(-num_tokens // target_size)
        target_blocks = tuple(free.pop() for _ in range(num_blocks))
        ticket = rig.offer(target_blocks, num_cached, num_tokens)
        for token in range(num_cached, num_tokens):
            expected[target_blocks[token // target_size], :, :, :, token % target_size] = rig.token(
                rig.source, source_blocks, token
            )
        key = f"k{number}"
        rig.sender.begin(key, ticket.data)
        cut = rng.randint(0, num_tokens)
        if cut:
            rig.sender.submit(Send(key, source_blocks, KvRange(0, cut, 0, num_layers)))
        if cut < num_tokens:
            split = rng.randint(0, num_layers - 1)
            if split:
                rig.sender.submit(
                    Send(key, source_blocks, KvRange(cut, num_tokens - cut, 0, split))
                )
            rig.sender.submit(
                Send(key, source_blocks, KvRange(cut, num_tokens - cut, split, num_layers - split))
            )
        rig.sender.submit(Finish(key, num_tokens, (Sample(number),), time.monotonic()))
        offered[ticket.ticket_id] = (num_tokens, num_cached, number)
    for _ in range(num_handoffs):
        event = rig.event()
        assert isinstance(event, TicketCommitted)
        num_tokens, num_cached, number = offered.pop(event.ticket_id)
        assert (event.num_tokens, event.first_tokens) == (num_tokens, (Sample(number),))
        assert event.num_bytes == (num_tokens - num_cached) * rig.source.layout.token_bytes
        assert event.transfer_exposed_ms >= 0
        rig.running.tickets.release(event.ticket_id)
        assert rig.done().error is None
    np.testing.assert_array_equal(rig.target.data, expected)
    assert rig.dones.empty()
    assert rig.events.empty()
    assert rig.sender.num_open == rig.running.tickets.num_open == 0
