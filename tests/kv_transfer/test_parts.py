"""Workers of several ranks hand over rank to rank, as two workers of one rank do."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.errors import HandoffFailed, PeerMismatch
from baton.types import KvLayout
from engine.kv.part import KvPart, covers
from engine.kv.range import KvRange
from engine.kv.tensors.array import ArrayKvPool
from engine.kv.tensors.grouped import GroupedKvPool
from engine.kv.tensors.paged import host_pool
from kv_transfer.kv_secret import KvSecret
from kv_transfer.routes import routes_from
from kv_transfer.send_connection import Cancel, Send
from kv_transfer.ticket import Rejection, TicketAborted, TicketCommitted, TicketState
from kv_transfer.transport.connection import TransportError
from kv_transfer.transport.loopback import LoopbackConnection, LoopbackHub
from tests.support.faulty_hub import FaultyHub
from tests.support.kv_ranks import (
    LEASE_S,
    NUM_BLOCKS,
    Ranks,
    fill_alike,
    grouped_pool,
    held,
    parts_of,
    whole_of,
)

GRIDS = [(tensor, stages) for tensor in (1, 2, 4) for stages in (1, 2)]
PATIENCE_S = 30.0


def layout_of(block_size: int, **changes: Any) -> KvLayout:
    fields: dict[str, Any] = {
        "fingerprint": "m",
        "num_layers": 3,
        "num_kv_heads": 4,
        "head_dim": 4,
        "dtype": "int64",
        "block_size": block_size,
    }
    return KvLayout(**(fields | changes))


def fill(pool: Any) -> None:
    """Random numbers, none of them 0."""
    rng = np.random.default_rng(0)
    if isinstance(pool, GroupedKvPool):
        for own in (pool.in_blocks, pool.in_slots):
            fill(own)
    elif isinstance(pool, ArrayKvPool):
        most = 1 << (50 if pool.layout.dtype == "int64" else 15)
        pool.data[...] = rng.integers(1, most, pool.data.shape)
    else:
        whole = KvRange(0, NUM_BLOCKS * pool.layout.block_size, 0, pool.layout.num_layers)
        numbers = torch.randint(1, 100, (NUM_BLOCKS * pool.layout.block_bytes,), dtype=torch.uint8)
        if pool.scales is None:
            numbers = torch.randn(numbers.shape).to(pool.tensor.dtype).view(torch.uint8)
            numbers = numbers[: NUM_BLOCKS * pool.layout.block_bytes]
        pool.unpack(range(NUM_BLOCKS), whole, numbers.numpy().data)


def check_as_of_one_rank(ranks: Ranks, *, num_cached: int = 0, num_tokens: int = 11) -> None:
    """A handoff of the ranks leaves the bytes that one between two ranks does, and says the
    same."""
    whole = whole_of(ranks)
    fill_alike(ranks, whole, fill)
    target_blocks = (4, 2, 7, 1, 9, 0)[: -(-num_tokens // ranks.target.block_size)]
    source_blocks = (3, 0, 5, 1, 8, 2)[: -(-num_tokens // ranks.source.block_size)]
    found = []
    try:
        for one in (ranks, whole):
            offered = one.offer(target_blocks, num_cached, num_tokens)
            assert one.sender.begin("k", offered.data) == num_cached
            one.send_all("k", source_blocks, num_tokens)
            done = one.dones.get(timeout=PATIENCE_S)
            assert done.error is None, done.error
            event = one.events.get(timeout=PATIENCE_S)
            assert isinstance(event, TicketCommitted), event
            found.append((event.num_tokens, event.first_tokens, event.whole_start))
            one.tickets.release(event.ticket_id)
            assert one.tickets.num_open == one.sender.num_open == 0
        assert found[0] == found[1]
        assert event.num_bytes == done.num_bytes
        (wanted,) = whole.target_pools
        for part, pool in zip(ranks.targets, ranks.target_pools, strict=True):
            own = held(pool, KvPart.whole(pool.layout), num_tokens, target_blocks)
            assert own == held(wanted, part, num_tokens, target_blocks)
            assert any(own)
    finally:
        ranks.close()
        whole.close()


def ranks_of(
    source: KvLayout, target: KvLayout, sends: tuple[int, int], takes: tuple[int, int], **more: Any
) -> Ranks:
    return Ranks(source, target, parts_of(source, *sends), parts_of(target, *takes), **more)


@pytest.mark.parametrize("takes", GRIDS)
@pytest.mark.parametrize("sends", GRIDS)
def test_any_grid_hands_over_to_any(sends: tuple[int, int], takes: tuple[int, int]) -> None:
    check_as_of_one_rank(ranks_of(layout_of(4), layout_of(3), sends, takes))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("sends", "takes"), [((2, 1), (4, 2)), ((2, 2), (1, 1)), ((4, 1), (2, 1))])
def test_over_sockets(transport: str, sends: tuple[int, int], takes: tuple[int, int]) -> None:
    source, target = layout_of(4), layout_of(4)
    more: dict[str, Any] = {"transport": transport}
    check_as_of_one_rank(ranks_of(source, target, sends, takes, **more))
    secret = KvSecret(b"s" * 32)
    check_as_of_one_rank(ranks_of(source, target, sends, takes, **more, secret=secret))


@pytest.mark.parametrize("sizes", [(4, 4), (4, 3), (2, 6)])
@pytest.mark.parametrize(("sends", "takes"), [((2, 1), (4, 1)), ((2, 2), (1, 2)), ((1, 2), (2, 1))])
def test_windowed_layers_go_as_far_as_they_are_needed(
    sizes: tuple[int, int], sends: tuple[int, int], takes: tuple[int, int]
) -> None:
    layers: dict[str, Any] = {"num_layers": 5, "window": 4, "windowed_layers": (0, 1, 3)}
    source, target = (layout_of(size, **layers) for size in sizes)
    for make_source in (ArrayKvPool, grouped_pool):
        for make_target in (ArrayKvPool, grouped_pool):
            more: dict[str, Any] = {"make_source": make_source, "make_target": make_target}
            check_as_of_one_rank(ranks_of(source, target, sends, takes, **more))


@pytest.mark.parametrize(("sends", "takes"), [((2, 1), (4, 1)), ((1, 1), (2, 2)), ((4, 1), (1, 2))])
def test_a_latent_goes_to_every_rank_that_holds_it(
    sends: tuple[int, int], takes: tuple[int, int]
) -> None:
    source, target = (layout_of(size, num_kv_heads=1, parts=("latent",)) for size in (4, 3))
    check_as_of_one_rank(ranks_of(source, target, sends, takes))


@pytest.mark.parametrize(
    ("dtypes", "wire"),
    [
        (("float32", "bfloat16"), "auto"),
        (("bfloat16", "float32"), "fp8"),
        (("fp8", "fp8"), "auto"),
        (("int8", "bfloat16"), "auto"),
        (("float32", "int8"), "auto"),
    ],
)
def test_types_are_converted_as_of_one_rank(dtypes: tuple[str, str], wire: str) -> None:
    source, target = (
        layout_of(size, dtype=dtype) for size, dtype in zip((4, 8), dtypes, strict=True)
    )
    ranks = ranks_of(
        *(source, target, (4, 1), (2, 2)),
        make_source=host_pool,
        make_target=host_pool,
        wire_dtype=wire,
    )
    check_as_of_one_rank(ranks)


def test_a_cached_prefix_is_not_sent_and_a_ticket_without_kv_is_committed() -> None:
    for num_cached in (5, 11):
        ranks = ranks_of(layout_of(4), layout_of(3), (2, 1), (4, 1))
        offered = ranks.offer((0, 1, 2, 3), num_cached, 11)
        ranks.sender.begin("k", offered.data)
        ranks.send_all("k", (0, 1, 2), 11)
        event = ranks.events.get_nowait()
        assert isinstance(event, TicketCommitted)
        tokens = 11 - num_cached
        assert event.num_bytes == tokens * ranks.source.token_bytes
        ranks.close()


GRID = st.tuples(st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 2, 4, 8]))


@given(GRID, GRID, st.sampled_from([1, 2, 4, 8]))
def test_every_rank_gets_all_of_its_part_once(
    sends: tuple[int, int], takes: tuple[int, int], num_heads: int
) -> None:
    """As many layers have a state as have KV; each rank has all states of its stage."""
    layout = layout_of(
        4, num_layers=6, num_kv_heads=num_heads, num_state_layers=6, state_layer_bytes=8
    )
    sources, targets = (parts_of(layout, *reversed(grid)) for grid in (sends, takes))
    routes = [routes_from(rank, sources, targets) for rank in range(len(sources))]
    assert routes[0][0].target == 0, "rank 0 asks the owner's rank 0 for prefixes"
    for number, target in enumerate(targets):
        parts = [route.part for own in routes for route in own if route.target == number]
        assert covers(parts, target)


# Refusals


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_layers": 4}, "num_layers"),
        ({"num_kv_heads": 2}, "num_kv_heads"),
        ({"fingerprint": "other"}, "fingerprint"),
        ({"head_dim": 8}, "head_dim"),
        ({"window": 4, "windowed_layers": (0,)}, "window"),
    ],
)
def test_another_model_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    ranks = ranks_of(layout_of(4), layout_of(4, **changes), (2, 1), (1, 2))
    ranks.sender.begin("k", ranks.offer((0, 1, 2), 0, 11).data)
    done = ranks.dones.get_nowait()
    assert isinstance(done.error, PeerMismatch)
    assert field in done.error.message
    ranks.close()


# Faults


class WithoutRank1(LoopbackHub):
    def connect(self, name: str) -> LoopbackConnection:
        if name == "d0 rank 1":
            raise TransportError(f"{name} refuses")
        return super().connect(name)


@pytest.mark.parametrize("sends", [(1, 1), (2, 1), (4, 1)])
def test_a_rank_that_cannot_be_reached_ends_the_handoff_at_once(sends: tuple[int, int]) -> None:
    ranks = ranks_of(layout_of(4), layout_of(3), sends, (2, 1), hub=WithoutRank1())
    ranks.sender.begin("k", ranks.offer((0, 1, 2, 3), 0, 11).data)
    assert isinstance(ranks.dones.get_nowait().error, HandoffFailed)
    assert isinstance(ranks.events.get_nowait(), TicketAborted)
    ranks.send_all("k", (0, 1, 2), 11)
    assert not any(pool.data.any() for pool in ranks.target_pools)
    ranks.close()


NUM_TOKENS, SOURCE_BLOCKS, TARGET_BLOCKS = 11, (3, 0, 5), (4, 2, 7, 1)


class Handoff:
    """One handoff between ranks, over connections with faults, on a virtual clock."""

    def __init__(self, sends: tuple[int, int], takes: tuple[int, int], hub: FaultyHub) -> None:
        self.now = 0.0
        self.hub = hub
        self.ranks = ranks_of(
            *(layout_of(4), layout_of(3), sends, takes),
            clock=lambda: self.now,
            hub=hub,
            wait_s=2.0,
        )
        self.whole = whole_of(self.ranks)
        fill_alike(self.ranks, self.whole, fill)
        self.num_sent = 0
        self.events: list[Any] = []
        self.at_end: list[list[bytes]] = []
        self.ticket = self.ranks.offer(TARGET_BLOCKS, 0, NUM_TOKENS)
        self.ranks.sender.begin("k", self.ticket.data)

    def blocks(self) -> list[bytes]:
        return [pool.data.tobytes() for pool in self.ranks.target_pools]

    def do(self, name: str, number: int) -> None:
        ranks = self.ranks
        match name:
            case "send" if self.num_sent < NUM_TOKENS:
                self.send(min(NUM_TOKENS, self.num_sent + 1 + number))
            case "wait":
                self.wait(number)
            case "cancel":
                ranks.sender.submit(Cancel("k", "CANCELLED", "enough"))
            case "abort":
                ranks.tickets.abort(self.ticket.ticket_id, "CANCELLED", "enough")
            case "present":
                self.present_again(number)
            case "lose":
                listener: Any = ranks.receivers[number % len(ranks.receivers)].listeners[0]
                for connection in listener._connections[:1]:
                    connection.lose("lost")
        self.look()

    def send(self, end: int) -> None:
        piece = KvRange(self.num_sent, end - self.num_sent, 0, 3)
        self.ranks.send("k", SOURCE_BLOCKS, piece, NUM_TOKENS)
        self.num_sent = end
        if end == NUM_TOKENS:
            self.ranks.finish("k", NUM_TOKENS)

    def present_again(self, number: int) -> None:
        """Another sender has the ticket, too, and presents a part that was presented."""
        rank = number % len(self.ranks.receivers)
        table, part = self.ranks.receivers[rank].tickets, self.ranks.targets[rank]
        if table.state(self.ticket.ticket_id) is not TicketState.OFFERED:
            assert isinstance(table.begin(self.ticket.data, -1, None, part), Rejection)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.ranks.sender.heartbeat()
        self.ranks.tickets.expire()

    def look(self) -> None:
        while not self.ranks.events.empty():
            self.events.append(self.ranks.events.get_nowait())
            self.at_end.append(self.blocks())

    def settle(self) -> None:
        """Until both ends are over: by themselves, if they can."""
        self.hub.rate = 0.0
        for is_given_up in (False, True):
            if is_given_up:
                self.ranks.sender.submit(Cancel("k", "CANCELLED", "it is over"))
            for _ in range(8):
                self.wait(LEASE_S / 2)
                self.look()

    def check(self) -> bool:
        """What must hold at the end. Return whether the ticket is committed."""
        ranks = self.ranks
        ranks.sender.submit(Send("k", SOURCE_BLOCKS, KvRange(0, NUM_TOKENS, 0, 3)))
        (event,) = self.events
        assert ranks.dones.qsize() == 1
        assert ranks.sender.num_open == ranks.tickets.num_open == 0
        assert self.at_end == [self.blocks()], "written after the end"
        others = [block for block in range(NUM_BLOCKS) if block not in TARGET_BLOCKS]
        assert not any(pool.data[others].any() for pool in ranks.target_pools)
        ranks.tickets.release(self.ticket.ticket_id)
        for running in ranks.receivers:
            assert running.tickets.state(self.ticket.ticket_id) is None
        done = ranks.dones.get_nowait()
        if isinstance(event, TicketCommitted):
            self.check_kv()
            return True
        assert isinstance(event, TicketAborted)
        assert done.error is not None
        return False

    def check_kv(self) -> None:
        whole = self.whole
        whole.sender.begin("k", whole.offer(TARGET_BLOCKS, 0, NUM_TOKENS).data)
        whole.send_all("k", SOURCE_BLOCKS, NUM_TOKENS)
        (wanted,) = whole.target_pools
        for part, pool in zip(self.ranks.targets, self.ranks.target_pools, strict=True):
            own = held(pool, KvPart.whole(pool.layout), NUM_TOKENS, TARGET_BLOCKS)
            assert own == held(wanted, part, NUM_TOKENS, TARGET_BLOCKS)

    def close(self) -> None:
        self.ranks.close()
        self.whole.close()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["send", "send", "send", "send", "wait", "cancel", "abort", "lose", "present"]
        ),
        st.integers(0, 5),
    ),
    max_size=12,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sends=st.sampled_from(GRIDS),
    takes=st.sampled_from(GRIDS),
    rate=st.sampled_from([0.0, 0.02, 0.1]),
    seed=st.integers(0, 1 << 32),
    operations=OPERATIONS,
)
def test_a_ticket_ends_once_and_whole_whatever_happens_to_its_parts(
    sends: tuple[int, int],
    takes: tuple[int, int],
    rate: float,
    seed: int,
    operations: list[tuple[str, int]],
) -> None:
    """Frames are flipped, lost, repeated; connections break; either side gives up; the lease
    passes."""
    hub = FaultyHub(random.Random(seed), 0.0)
    handoff = Handoff(sends, takes, hub)
    hub.rate = rate
    for name, number in operations:
        handoff.do(name, number)
    handoff.settle()
    handoff.check()
    handoff.close()


def test_faults_of_every_kind_end_some_handoffs_and_spare_others() -> None:
    """The property above looks at both."""
    outcomes = []
    for seed in range(24):
        hub = FaultyHub(random.Random(seed), 0.0)
        handoff = Handoff((2, 1), (4, 2), hub)
        hub.rate = 0.02
        for _ in range(3):
            handoff.do("send", 4)
        handoff.settle()
        outcomes.append(handoff.check())
        handoff.close()
    assert {True, False} == set(outcomes)
