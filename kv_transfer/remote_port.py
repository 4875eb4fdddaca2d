"""The KV port of a rank in another process: rank 0's end, and the rank's own.

rank 0                                 rank
Open(config)              ---------->  opens its port
                          <----------  Opened(endpoints), or OpenFailed
Put(reservation)          ---------->  puts the ticket into its table
                          <----------  Acknowledged
Begin, Send ..., Finish   ---------->  its sender's tasks, in order
                          <----------  TicketCommitted, TicketAborted, Sent: what its table and
                                       sender report
Tick                      ---------->  the engine loop is alive; tickets that are over expire
Close                     ---------->  closes its port
                          <----------  Closed

Both ends are of one release. Put and Send name the last command of rank 0 that writes KV: copies of
their blocks follow the mark of the rank's device behind it, see KvMarks.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from baton.errors import BY_REASON, BatonError, HandoffFailed, StartupError
from baton.types import KvLayout, Sample
from engine.interface import DeviceLost
from engine.kv.interface import KvPool
from engine.kv.kv_ranks import KvMarks, RankLink
from engine.kv.part import KvPart
from engine.kv.range import ALL, KvRange
from engine.ranks.link import FIRST_SERVICE_KIND
from engine.ranks.step_marks import ALL_LAYERS
from kv_transfer import send_connection as tasks
from kv_transfer.rank_port import PortConfig, RankPort
from kv_transfer.send_connection import LaterTask, SendDone
from kv_transfer.ticket import (
    Endpoint,
    PrefixRequested,
    Reservation,
    TicketAborted,
    TicketCommitted,
    TicketEvent,
)
from kv_transfer.ticket_group import SenderGroup, TicketGroup

TO_RANK, FROM_RANK = FIRST_SERVICE_KIND, FIRST_SERVICE_KIND + 1
#: Seconds between two Ticks: shorter than any lease.
TICK_S = 0.25
#: Maximum wait for a rank to open or close its port, in seconds.
PORT_TIMEOUT_S = 30.0

#: By group apart from the blocks: the slot of each of a message's blocks, see KvPool.slot_tables.
Slots = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Open:
    """layout: of the whole model."""

    config: PortConfig
    layout: KvLayout


@dataclass(frozen=True, slots=True)
class Opened:
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class OpenFailed:
    message: str


@dataclass(frozen=True, slots=True)
class Put:
    """data: of the reservation, in hexadecimal digits. num_commands: see KvMarks."""

    reservation: Reservation
    data: str
    slots: Slots
    num_commands: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    ticket_id: int


@dataclass(frozen=True, slots=True)
class Abort:
    ticket_id: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Release:
    ticket_id: int


@dataclass(frozen=True, slots=True)
class Tick:
    pass


@dataclass(frozen=True, slots=True)
class Begin:
    """key: a number in the place of the handoff's. ticket: in hexadecimal digits."""

    key: int
    ticket: str


@dataclass(frozen=True, slots=True)
class Send:
    """block_ids: of the piece; the sequence's first_block blocks before them are left out.
    num_commands: see KvMarks."""

    key: int
    first_block: int
    block_ids: tuple[int, ...]
    piece: KvRange
    whole_start: int
    slots: Slots
    num_commands: int


@dataclass(frozen=True, slots=True)
class Finish:
    """age_s: seconds since the end of the prefill."""

    key: int
    num_tokens: int
    first_tokens: tuple[Sample, ...]
    age_s: float


@dataclass(frozen=True, slots=True)
class Close:
    pass


@dataclass(frozen=True, slots=True)
class Closed:
    pass


@dataclass(frozen=True, slots=True)
class Sent:
    """reason: empty without an error."""

    key: int
    reason: str
    message: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The rank's device is lost, or its port's thread has failed: the worker ends."""

    message: str


_KINDS = (
    *(Open, Opened, OpenFailed, Put, Acknowledged, Abort, Release, Tick, Begin, Send, Finish),
    *(tasks.Cancel, Close, Closed, TicketCommitted, TicketAborted, Sent, Lost),
)
_ADAPTERS: Mapping[str, TypeAdapter[Any]] = {kind.__name__: TypeAdapter(kind) for kind in _KINDS}


def encode(message: object) -> bytes:
    """A message: its kind's name, a line feed, JSON."""
    name = type(message).__name__
    return name.encode() + b"\n" + _ADAPTERS[name].dump_json(message)


def decode(payload: bytes) -> Any:
    name, _, body = payload.partition(b"\n")
    return _ADAPTERS[name.decode()].validate_json(body)


class RemotePort:
    """Rank 0's end. Implements RankTickets and KvSender. Thread-safe."""

    def __init__(
        self,
        rank: int,
        link: RankLink,
        pool: KvPool,
        on_device_lost: Callable[[DeviceLost], None],
        num_commands: Callable[[], int],
    ) -> None:
        """pool: the worker's, for its slots. num_commands: see KvRanks."""
        self._rank = rank
        self._num_commands = num_commands
        self._link = link
        self._pool = pool
        self._on_device_lost = on_device_lost
        self._lock = threading.Lock()
        self._answered = threading.Event()
        self._answer: Opened | OpenFailed | Closed | None = None
        self._is_lost = False
        self._numbers: dict[Hashable, int] = {}
        self._keys: dict[int, Hashable] = {}
        self._num_begun = 0
        self._ticked_s = -math.inf
        self._tickets: TicketGroup
        self._senders: SenderGroup
        link.handle(FROM_RANK, lambda payload: self._on_message(decode(payload)))

    def open(self, config: PortConfig, layout: KvLayout) -> tuple[Endpoint, ...]:
        """Have the rank open its port. Raises StartupError."""
        self._send(Open(replace(config, rank=self._rank), layout))
        answer = self._wait()
        if isinstance(answer, Opened):
            return answer.endpoints
        why = answer.message if isinstance(answer, OpenFailed) else "no answer"
        raise StartupError(f"rank {self._rank} could not open its KV port: {why}")

    def serve(self, tickets: TicketGroup, senders: SenderGroup) -> None:
        """Report to these from here on: before the first ticket or handoff."""
        self._tickets, self._senders = tickets, senders

    def close(self) -> None:
        """Have the rank close its port, and wait for that, unless it cannot answer any more."""
        self._answered.clear()
        if not self._is_lost:
            self._send(Close())
            self._wait()

    def _wait(self) -> Opened | OpenFailed | Closed | None:
        return self._answer if self._answered.wait(PORT_TIMEOUT_S) else None

    # Tickets

    def put(self, reservation: Reservation) -> bool:
        """See RankTickets: the rank acknowledges later."""
        data = reservation.data.hex()
        slots = self._slots(reservation.block_ids)
        self._send(Put(replace(reservation, data=b""), data, slots, self._num_commands()))
        return False

    def abort(self, ticket_id: int, reason: str, message: str) -> None:
        self._send(Abort(ticket_id, reason, message))

    def expire(self) -> None:
        self._tick()

    def release(self, ticket_id: int) -> None:
        self._send(Release(ticket_id))

    # Handoffs

    def begin(self, key: Hashable, ticket: bytes, *others: LaterTask) -> int:
        """See KvSender. The number of cached tokens is in the ticket, which rank 0 has read."""
        with self._lock:
            number = self._num_begun = self._num_begun + 1
            self._numbers[key], self._keys[number] = number, key
        self._send(Begin(number, ticket.hex()))
        for task in others:
            self.submit(task)
        return 0

    def submit(self, task: LaterTask) -> None:
        with self._lock:
            number = self._numbers.get(task.key)
        if number is None:
            return
        match task:
            case tasks.Send(_, block_ids, piece, _, whole_start):
                first, end = 0, 1  # the block with the slot of records
                if self._pool.groups.is_paged(piece):
                    size = self._pool.layout.block_size
                    first, end = piece.first_token // size, -(-piece.end_token // size)
                own = block_ids[first:end]
                slots, after = self._slots(own), self._num_commands()
                self._send(Send(number, first, own, piece, whole_start, slots, after))
            case tasks.Finish(_, num_tokens, first_tokens, prefill_end):
                age_s = time.monotonic() - prefill_end
                self._send(Finish(number, num_tokens, first_tokens, age_s))
            case tasks.Cancel():
                self._send(replace(task, key=number))

    def heartbeat(self) -> None:
        self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        if now >= self._ticked_s + TICK_S:
            self._ticked_s = now
            self._send(Tick())

    def _slots(self, block_ids: Sequence[int]) -> Slots:
        return {
            number: tuple(table.of_block[block_id] for block_id in block_ids)
            for number, table in self._pool.slot_tables.items()
        }

    def _send(self, message: object) -> None:
        # A rank that is gone ends the worker.
        with suppress(OSError):
            self._link.send(TO_RANK, encode(message))

    # Reports, in the link's thread

    def _on_message(self, message: object) -> None:
        match message:
            case Opened() | OpenFailed() | Closed():
                self._answer = message
                self._answered.set()
            case Acknowledged(ticket_id):
                self._tickets.on_rank_offered(ticket_id)
            case TicketCommitted():
                # Times of another clock.
                event = replace(message, reserved_s=math.inf, receiving_s=math.inf)
                self._tickets.on_rank_event(self._rank, event)
            case TicketAborted():
                self._tickets.on_rank_event(self._rank, message)
            case Sent(number, reason, text, num_bytes):
                with self._lock:
                    key = self._keys.pop(number)
                    del self._numbers[key]
                error = BY_REASON.get(reason, HandoffFailed)(text) if reason else None
                self._senders.on_rank_done(SendDone(key, error, num_bytes))
            case Lost(text):
                self._is_lost = True
                self._answered.set()
                self._on_device_lost(DeviceLost(f"rank {self._rank}: {text}"))


class PortServer:
    """The rank's own end. Messages are handled in a thread of their own, in order, because opening
    a port takes longer than the link may be silent."""

    def __init__(
        self, link: RankLink, make_pool: Callable[[KvLayout], KvPool], host: str, marks: KvMarks
    ) -> None:
        """See `serve`."""
        self._link = link
        self._host = host
        self._marks = marks
        self._make_pool = make_pool
        self._pool: KvPool
        self._part: KvPart | None
        self._port: RankPort
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        link.handle(TO_RANK, self._messages.put)
        threading.Thread(target=self._run, name="baton-kv-port", daemon=True).start()

    def _run(self) -> None:
        is_closed = False
        try:
            while not is_closed:
                message = decode(self._messages.get())
                self._on_message(message)
                is_closed = isinstance(message, Close)
        finally:
            if not is_closed:
                # Without this thread, tickets and handoffs of all ranks would wait for ever.
                self._report(Lost("the thread of the KV port has failed"))

    def _report(self, message: object) -> None:
        # Without rank 0 this rank ends.
        with suppress(OSError):
            self._link.send(FROM_RANK, encode(message))

    def _on_message(self, message: object) -> None:
        match message:
            case Open(config, layout):
                self._open(config, layout)
            case Put(reservation, data, slots, num_commands):
                self._set_slots(reservation.block_ids, slots)
                mark = self._marks.after(num_commands)
                self._port.tickets.put(replace(reservation, data=bytes.fromhex(data)), mark)
                self._report(Acknowledged(reservation.ticket_id))
            case Abort(ticket_id, reason, text):
                self._port.tickets.abort(ticket_id, reason, text)
            case Release(ticket_id):
                self._port.tickets.release(ticket_id)
            case Tick():
                self._port.sender.heartbeat()
                self._port.tickets.expire()
            case Begin(key, ticket):
                self._port.sender.begin(key, bytes.fromhex(ticket))
            case Send(key, first_block, block_ids, piece, whole_start, slots, num_commands):
                self._set_slots(block_ids, slots)
                # Nothing before the piece is read.
                table = (-1,) * first_block + block_ids
                mark = self._marks.after(num_commands, self._num_own_layers(piece))
                self._port.sender.submit(tasks.Send(key, table, piece, mark, whole_start))
            case Finish(key, num_tokens, first_tokens, age_s):
                end = time.monotonic() - age_s
                self._port.sender.submit(tasks.Finish(key, num_tokens, first_tokens, end))
            case tasks.Cancel():
                self._port.sender.submit(message)
            case Close():
                self._port.close()
                self._report(Closed())

    def _open(self, config: PortConfig, layout: KvLayout) -> None:
        self._pool, self._part = self._make_pool(layout), config.part
        # Address and port of the options are rank 0's.
        config = replace(config, host=self._host, port=0, advertise_address="")
        try:
            self._port = RankPort(
                config, self._pool, self._on_ticket, self._on_sent, self._on_device_lost
            )
        except BatonError as error:
            self._report(OpenFailed(error.message))
            return
        self._report(Opened(self._port.endpoints))

    def _num_own_layers(self, piece: KvRange) -> int:
        """The rank's layers up to the end of a piece, which counts the model's."""
        part = self._part
        if not part or piece.group != ALL:
            return ALL_LAYERS
        return max(0, piece.end_layer - part.first_layer)

    def _set_slots(self, block_ids: Sequence[int], slots: Slots) -> None:
        """Rank 0 assigns the slots of blocks, before they are used here."""
        for number, of_blocks in slots.items():
            if table := self._pool.slot_tables.get(number):
                for block_id, slot in zip(block_ids, of_blocks, strict=True):
                    table.of_block[block_id] = slot

    def _on_ticket(self, event: TicketEvent) -> None:
        match event:
            case TicketCommitted() | TicketAborted():
                self._report(event)
            case PrefixRequested():
                _log.warning("a prefix is asked for at a rank other than 0: not served")

    def _on_sent(self, done: SendDone) -> None:
        reason, text = (done.error.reason, done.error.message) if done.error else ("", "")
        if not isinstance(done.key, int):
            raise TypeError(f"{done.key!r} is no handoff of rank 0")
        self._report(Sent(done.key, reason, text, done.num_bytes))

    def _on_device_lost(self, lost: DeviceLost) -> None:
        self._report(Lost(str(lost)))


def serve(
    link: RankLink, make_pool: Callable[[KvLayout], KvPool], host: str, marks: KvMarks
) -> None:
    """Serve the KV port of this process's rank from now on; see engine.follower.

    make_pool: the rank's pool, for the layout of the whole model. host: the rank's address. marks:
    of that pool.
    """
    PortServer(link, make_pool, host, marks)


_log = logging.getLogger("baton.kv")
