"""The KV channel of a worker with several ranks, each behind a link as in a process of its own."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton.errors import Cancelled, StartupError
from baton.types import KvLayout, Sample, Sampling, SequenceSpec, WorkerIdentity
from engine.interface import DeviceLost
from engine.kv.kv_ranks import KvRanks
from engine.kv.part import KvPart
from engine.kv.range import KvRange
from engine.kv.tensors.array import ArrayKvPool
from engine.kv.tensors.part import pool_part
from engine.ranks.link import Link
from kv_transfer.kv_secret import KvSecret
from kv_transfer.rank_port import PortConfig
from kv_transfer.remote_port import PORT_TIMEOUT_S, TO_RANK, serve
from kv_transfer.send_connection import Cancel, Finish, Send, SendDone
from kv_transfer.ticket import TicketAborted, TicketCommitted, TicketOffered
from tests.support.kv_ranks import grouped_pool, held, parts_of
from worker_core.kv_channel import KvChannel

pytestmark = pytest.mark.slow

NUM_BLOCKS, NUM_TOKENS = 12, 11
PATIENCE_S = 30.0
WINDOWS: dict[str, Any] = {"window": 4, "windowed_layers": (0, 2)}
SPEC = SequenceSpec("r", tuple(range(NUM_TOKENS)), Sampling())


def nothing() -> None:
    pass


class Ranked:
    """A worker: the whole pool of its engine, the pools of its ranks, and its channel."""

    def __init__(
        self,
        name: str,
        layout: KvLayout,
        grid: tuple[int, int],
        make_pool: Any,
        host: str = "127.0.0.1",
    ) -> None:
        """host: of the ranks other than 0."""
        self.layout = layout
        self.parts = parts_of(layout, *grid)
        self.whole = make_pool(layout, NUM_BLOCKS)
        self.pools = [make_pool(part.layout(layout), NUM_BLOCKS) for part in self.parts]
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.links: list[Link] = []
        own = []
        for rank, pool in enumerate(self.pools[1:], start=1):
            ours, theirs = (
                Link(end, f"{name} {rank}", nothing, nothing) for end in socket.socketpair()
            )
            serve(theirs, lambda _, pool=pool: pool, host)
            ours.start()
            theirs.start()
            self.links += (ours, theirs)
            own.append(ours)
        engine: Any = SimpleNamespace(
            kv=self.whole,
            kv_ranks=KvRanks(self.parts, self.pools[0], own),
            spec=SimpleNamespace(layout=layout),
        )
        secret = KvSecret(b"s" * 32).key.hex()
        config = PortConfig(WorkerIdentity(name, 1), kv_secret_key=secret, ticket_secret="77" * 32)
        try:
            self.channel = KvChannel(config, engine, self.events.put)
        except StartupError:
            self.close_links()
            raise

    def event(self) -> Any:
        return self.events.get(timeout=PATIENCE_S)

    def close(self) -> None:
        self.channel.close()
        self.close_links()

    def close_links(self) -> None:
        for link in self.links:
            link.close()


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> Iterator[tuple[Ranked, Ranked]]:
    sends, takes, layers, make_pool = request.param
    layouts = (KvLayout("m", 3, 4, 4, "int64", size, **layers) for size in (4, 3))
    pair = tuple(
        Ranked(name, layout, grid, make_pool)
        for name, layout, grid in zip(("p0", "d0"), layouts, (sends, takes), strict=True)
    )
    source, target = pair
    everything = KvRange(0, NUM_BLOCKS * 4, 0, 3)
    data = np.random.default_rng(0).integers(1, 1 << 50, NUM_BLOCKS * 3 * 2 * 4 * 4 * 4)
    source.whole.unpack(range(NUM_BLOCKS), everything, data.view(np.uint8).data)
    for part, pool in zip(source.parts, source.pools, strict=True):
        view = pool_part(source.whole, part)
        own = KvRange(0, NUM_BLOCKS * 4, 0, part.num_layers)
        packed = memoryview(bytearray(own.num_bytes(view.layout.token_layer_bytes)))
        view.pack(range(NUM_BLOCKS), own, packed)
        pool.unpack(range(NUM_BLOCKS), own, packed)
    yield source, target
    source.close()
    target.close()


def offered(target: Ranked) -> tuple[int, bytes]:
    ticket = target.channel.tickets.offer(SPEC, (4, 2, 7, 1), 0, NUM_TOKENS)
    if not ticket.is_known:
        assert target.event() == TicketOffered(ticket.ticket_id)
    return ticket.ticket_id, ticket.data


BLOCKS = (3, 0, 5)
CASES = [
    ((2, 1), (4, 1), {}, ArrayKvPool),
    ((1, 2), (2, 2), {}, ArrayKvPool),
    ((2, 2), (1, 3), WINDOWS, grouped_pool),
]


@pytest.mark.parametrize("workers", CASES, indirect=True)
def test_every_rank_gets_its_part(workers: tuple[Ranked, Ranked]) -> None:
    source, target = workers
    for _ in range(2):  # the second time over the same connections
        ticket_id, ticket = offered(target)
        sender = source.channel.sender
        assert sender.begin("k", ticket) == 0
        sender.submit(Send("k", BLOCKS, KvRange(0, 5, 0, 3)))
        sender.submit(Send("k", BLOCKS, KvRange(5, 6, 0, 3)))
        sender.submit(Finish("k", NUM_TOKENS, (Sample(7),), time.monotonic()))
        sender.heartbeat()
        done, event = source.event(), target.event()
        assert isinstance(done, SendDone)
        assert done.error is None
        assert isinstance(event, TicketCommitted)
        assert (event.num_tokens, event.first_tokens) == (NUM_TOKENS, (Sample(7),))
        assert event.num_bytes == done.num_bytes
        for part, pool in zip(target.parts, target.pools, strict=True):
            own = held(pool, KvPart.whole(pool.layout), NUM_TOKENS, (4, 2, 7, 1))
            assert own == held(source.whole, part, NUM_TOKENS, BLOCKS)
        target.channel.tickets.release(ticket_id)
    assert source.events.empty()
    assert target.events.empty()


@pytest.mark.parametrize("workers", CASES[:1], indirect=True)
def test_either_side_gives_up(workers: tuple[Ranked, Ranked]) -> None:
    source, target = workers
    for is_owner in (False, True):
        ticket_id, ticket = offered(target)
        source.channel.sender.begin("k", ticket)
        source.channel.sender.submit(Send("k", BLOCKS, KvRange(0, 5, 0, 3)))
        if is_owner:
            target.channel.tickets.abort(ticket_id, "CANCELLED", "enough")
        else:
            source.channel.sender.submit(Cancel("k", "CANCELLED", "enough"))
        done, event = source.event(), target.event()
        assert isinstance(done.error, Cancelled)
        assert isinstance(event, TicketAborted)
        target.channel.tickets.release(ticket_id)
    assert source.events.empty()
    assert target.events.empty()


def test_a_port_that_cannot_be_opened_is_an_error_at_once() -> None:
    layout, begin_s = KvLayout("m", 3, 4, 4, "int64", 4), time.monotonic()
    with pytest.raises(StartupError, match="rank 1 could not open its KV port: kv_host=203"):
        Ranked("d0", layout, (2, 1), ArrayKvPool, "203.0.113.9")  # of no machine
    assert time.monotonic() < begin_s + PORT_TIMEOUT_S / 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("workers", CASES[:1], indirect=True)
def test_a_port_that_fails_ends_the_worker(workers: tuple[Ranked, Ranked]) -> None:
    """Its tickets and handoffs would never end."""
    _, target = workers
    target.links[0].send(TO_RANK, b"Nothing\n{}")
    lost, begin_s = target.event(), time.monotonic()
    assert isinstance(lost, DeviceLost)
    assert "rank 1" in str(lost)
    target.channel.close()
    assert time.monotonic() < begin_s + PORT_TIMEOUT_S / 2
