"""The KV channel of a worker with several ranks, each behind a link as in a process of its own."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Iterator
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
from engine.ranks.step_marks import StepMarks
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


class Queue:
    """In place of a GPU's stream: what is launched runs when a copy follows a later mark, or at the
    end."""

    def __init__(self) -> None:
        self._launched: list[Callable[[], None]] = []
        self._num_run = 0

    def launch(self, kernel: Callable[[], None]) -> None:
        self._launched.append(kernel)

    def mark(self) -> int:
        return len(self._launched)

    def follow(self, mark: Any) -> None:
        for kernel in self._launched[self._num_run : mark]:
            kernel()
        self._num_run = max(self._num_run, mark)

    def order(self, pool: Any) -> None:
        """Have copies of the pool follow this device."""
        pool.mark, pool.follow = self.mark, self.follow


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
        marks: Any = None,
    ) -> None:
        """host, marks: of the ranks other than 0."""
        self.num_commands = 0
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
            serve(theirs, lambda _, pool=pool: pool, host, marks or StepMarks(pool.mark))
            ours.start()
            theirs.start()
            self.links += (ours, theirs)
            own.append(ours)
        engine: Any = SimpleNamespace(
            kv=self.whole,
            kv_ranks=KvRanks(self.parts, self.pools[0], own, lambda: self.num_commands),
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


def test_a_rank_on_a_gpu_sends_what_the_commands_before_have_written() -> None:
    """Messages come before the rank has launched the command that they are about, whose kernels run
    later still."""
    layout, device = KvLayout("m", 3, 4, 4, "int64", 4), Queue()
    marks = StepMarks(device.mark)
    source = Ranked("p0", layout, (2, 1), ArrayKvPool, marks=marks)
    target = Ranked("d0", layout, (2, 1), ArrayKvPool)
    pool = source.pools[1]
    device.order(pool)
    _, ticket = offered(target)
    source.channel.sender.begin("k", ticket)
    source.num_commands = 1
    source.channel.sender.submit(Send("k", BLOCKS, KvRange(0, NUM_TOKENS, 0, 1)))
    device.launch(lambda: written(pool, 0, 1, 5))
    marks.layer_done(0)
    source.channel.sender.submit(Send("k", BLOCKS, KvRange(0, NUM_TOKENS, 1, 2)))
    source.channel.sender.submit(Finish("k", NUM_TOKENS, (Sample(7),), time.monotonic()))
    device.launch(lambda: written(pool, 1, 2, 6))
    marks.command_done()
    device.launch(lambda: written(pool, 0, 3, 9))  # of a later step: not waited for
    assert isinstance(target.event(), TicketCommitted)
    assert source.event().error is None
    got, whole = target.pools[1], KvPart.whole(target.pools[1].layout)
    layers = np.frombuffer(held(got, whole, NUM_TOKENS, (4, 2, 7)), np.int64).reshape(3, -1)
    assert [set(layer) for layer in layers] == [{5}, {6}, {6}]
    source.close()
    target.close()


def test_a_rank_on_a_gpu_receives_behind_what_its_blocks_were_used_for() -> None:
    layout, device = KvLayout("m", 3, 4, 4, "int64", 4), Queue()
    marks = StepMarks(device.mark)
    source = Ranked("p0", layout, (2, 1), ArrayKvPool)
    target = Ranked("d0", layout, (2, 1), ArrayKvPool, marks=marks)
    pool = target.pools[1]
    device.order(pool)
    for each in source.pools:
        written(each, 0, 3, 5)
    target.num_commands = 1
    ticket = target.channel.tickets.offer(SPEC, (4, 2, 7, 1), 0, NUM_TOKENS)
    assert target.events.empty()  # until the rank has come to the command
    device.launch(lambda: written(pool, 0, 3, 9))
    marks.command_done()
    assert target.event() == TicketOffered(ticket.ticket_id)
    sender = source.channel.sender
    sender.begin("k", ticket.data)
    sender.submit(Send("k", BLOCKS, KvRange(0, NUM_TOKENS, 0, 3)))
    sender.submit(Finish("k", NUM_TOKENS, (Sample(7),), time.monotonic()))
    assert isinstance(target.event(), TicketCommitted)
    device.follow(device.mark())
    data = held(pool, KvPart.whole(pool.layout), NUM_TOKENS, (4, 2, 7))
    assert set(np.frombuffer(data, np.int64)) == {5}
    source.close()
    target.close()


def written(pool: Any, first_layer: int, num_layers: int, value: int) -> None:
    """Write a value into layers of all blocks."""
    piece = KvRange(0, NUM_BLOCKS * pool.layout.block_size, first_layer, num_layers)
    num_bytes = piece.num_bytes(pool.layout.token_layer_bytes)
    pool.unpack(range(NUM_BLOCKS), piece, np.full(num_bytes // 8, value).view(np.uint8).data)


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
