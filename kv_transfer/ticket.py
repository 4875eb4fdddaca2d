"""Tickets: the right of one sender to write one sequence's KV into reserved blocks until a
deadline, the data that it gets for this, and the owner's endpoints.

    OFFERED ----> RESERVED ----> RECEIVING ----> COMMITTED ----> (forgotten)
       |   begin     |   pin         |   commit              release
       |             |               |
       +-------------+---------------+
             | abort, lease over, connection lost, broken rule
             v
          ABORTED ------------> (forgotten)
                     release

A ticket that needs no KV (all is cached) goes from RESERVED to COMMITTED. OFFERED waits for a
sender, RESERVED belongs to the sender's connection, RECEIVING has accepted a chunk. A sender must
present its ticket within `offer_s`, which it does on receipt, before any queue. From then on each
transition but the last has the lease as its deadline; the sender renews the lease while its own
work is queued.

Block ownership: the table owns the blocks from `offer` until the ticket's one event; then the
receiver of the event does. A writer holds a pin, and may write unverified data, because nobody
reads the blocks before the commit. An abort refuses further pins at once; TicketAborted is reported
when the last pin is released.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from baton.errors import HandoffFailed, InvalidRequest
from baton.kv_transports import KV_TRANSPORTS
from baton.types import KvLayout, Sample, WorkerIdentity
from baton.v1 import kv_pb2
from baton.wire import layout_from_proto, layout_to_proto
from engine.kv.layout import LayerGroups, is_sound
from engine.kv.range import KvRange
from kv_transfer.frame import CHECKSUM_MASK

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_NUMBERS = {
    each.name: kv_pb2.KvTransport.Value(f"KV_TRANSPORT_{each.name.upper()}")
    for each in KV_TRANSPORTS
}
_NAMES = {number: name for name, number in _NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address at which a worker receives KV.

    transport: name in baton.kv_transports.
    address: by the transport's scope: path of a Unix socket, host:port, or name within the process.
    host_id: only for socket paths.
    """

    transport: str
    address: str
    host_id: str = ""

    def __str__(self) -> str:
        """Representation for messages."""
        return f"{self.transport} to {self.address}"


def local_host_id() -> str:
    """The kernel's boot id: equal for processes that may share memory; empty if unavailable."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


MAX_TICKET_BYTES = 16 * 1024
_MAC_BYTES = 32


@dataclass(frozen=True, slots=True)
class KvTicket:
    """The right to write one sequence's KV into blocks reserved by `owner`; see
    baton.v1.KvTicket."""

    owner: WorkerIdentity
    ticket_id: int
    epoch: int
    request_id: str
    tenant: bytes
    num_cached_tokens: int
    num_tokens: int
    layout: KvLayout
    endpoints: tuple[Endpoint, ...]
    lease_s: float
    traceparent: str = ""


def common_fields(
    owner: WorkerIdentity, layout: KvLayout, endpoints: Iterable[Endpoint]
) -> kv_pb2.KvTicket:
    """Fields common to all tickets of one boot of a worker."""
    return kv_pb2.KvTicket(
        worker_id=owner.worker_id,
        generation=owner.generation,
        layout=layout_to_proto(layout),
        endpoints=[
            kv_pb2.KvEndpoint(
                transport=_NUMBERS[each.transport], address=each.address, host_id=each.host_id
            )
            for each in endpoints
        ],
    )


def signed_ticket(message: kv_pb2.KvTicket, secret: bytes) -> bytes:
    """Serialise a ticket with a digest of all its fields under `secret` (at most 64 bytes)."""
    message.mac = _mac(message, secret)
    return message.SerializeToString(deterministic=True)


def parse_ticket(data: bytes) -> KvTicket:
    """Parse a ticket without checking its digest, which only the owner can do. Raises
    InvalidRequest for invalid data."""
    message = ticket_message(data)
    layout = layout_from_proto(message.layout)
    if not (
        message.worker_id
        and message.ticket_id
        and message.lease_ms
        and message.num_cached_tokens <= message.num_tokens
        and is_sound(layout)
    ):
        raise InvalidRequest("the KV ticket lacks fields, or they contradict each other")
    return KvTicket(
        owner=WorkerIdentity(message.worker_id, message.generation),
        ticket_id=message.ticket_id,
        epoch=message.epoch,
        request_id=message.request_id,
        tenant=message.tenant,
        num_cached_tokens=message.num_cached_tokens,
        num_tokens=message.num_tokens,
        layout=layout,
        # Skip transports of newer owners that this version does not support.
        endpoints=tuple(
            Endpoint(_NAMES[each.transport], each.address, each.host_id)
            for each in message.endpoints
            if each.transport in _NAMES
        ),
        lease_s=message.lease_ms / 1000,
        traceparent=message.traceparent,
    )


def verify_ticket(data: bytes, owner: WorkerIdentity, secret: bytes) -> KvTicket:
    """Parse a ticket and verify that `owner` signed it under `secret`, in constant time.

    Raises InvalidRequest otherwise.
    """
    ticket = parse_ticket(data)
    if ticket.owner != owner:
        raise InvalidRequest(
            f"the ticket is of {ticket.owner.worker_id} generation {ticket.owner.generation}, "
            f"and this is {owner.worker_id} generation {owner.generation}"
        )
    message = ticket_message(data)
    if not hmac.compare_digest(message.mac, _mac(message, secret)):
        raise InvalidRequest("the ticket is not genuine")
    return ticket


def ticket_message(data: bytes) -> kv_pb2.KvTicket:
    """Decode a ticket's message, unverified. Raises InvalidRequest for invalid data."""
    if len(data) > MAX_TICKET_BYTES:
        raise InvalidRequest(f"a KV ticket of {len(data)} bytes; at most {MAX_TICKET_BYTES} may be")
    try:
        return kv_pb2.KvTicket.FromString(data)
    except DecodeError:
        raise InvalidRequest("the bytes given as a KV ticket are none") from None


def _mac(message: kv_pb2.KvTicket, secret: bytes) -> bytes:
    """Digest of all fields except the digest, including unknown fields, so that none can be
    added."""
    bare = kv_pb2.KvTicket()
    bare.CopyFrom(message)
    bare.ClearField("mac")
    data = bare.SerializeToString(deterministic=True)
    return hashlib.blake2b(
        data, key=secret, digest_size=_MAC_BYTES, person=b"baton-kv-ticket"
    ).digest()


class TicketState(enum.Enum):
    """States of the drawing above."""

    OFFERED = "offered"
    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class OfferedTicket:
    """A new ticket: its number, and its bytes for the sender."""

    ticket_id: int
    data: bytes


@dataclass(frozen=True, slots=True)
class TicketCommitted:
    """All KV of `num_tokens` tokens is in the blocks, which the receiver of this event owns.

    first_tokens: the following token of each choice; empty if known already.
    whole_start: first token that all groups received; groups that keep fewer than all tokens may
    lack KV before it.
    """

    ticket_id: int
    num_tokens: int
    first_tokens: tuple[Sample, ...]
    transfer_exposed_ms: float
    num_bytes: int
    reserved_s: float = 0.0
    """Time when the sender presented the ticket, on the table's clock."""
    receiving_s: float = 0.0
    """Time of its first chunk; reserved_s if no KV was needed."""
    whole_start: int = 0


@dataclass(frozen=True, slots=True)
class TicketAborted:
    """The ticket will not be committed, and nothing writes its blocks any more. reason: a key of
    baton.errors.BY_REASON."""

    ticket_id: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PrefixRequested:
    """The sender of this open ticket asks its owner to send the KV that it holds to the ticket
    `deliver_to`."""

    ticket_id: int
    deliver_to: bytes


TicketEvent = TicketCommitted | TicketAborted | PrefixRequested


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a sender's frame was dropped: a reply, not an event of the ticket."""

    reason: str
    message: str


#: Called when a ticket is aborted, to notify its sender. Arguments: number, epoch, reason.
OnAborted = Callable[[int, int, Rejection], None]


@dataclass(frozen=True, slots=True)
class Commit:
    """The sender's commit. checksum: sum of its chunks' checksums modulo 2^64."""

    ticket_id: int
    epoch: int
    num_tokens: int
    first_tokens: tuple[Sample, ...]
    checksum: int
    exposed_ms: float


@dataclass(slots=True)
class Ticket:
    """State and transitions of a ticket. Times on the caller's clock.

    block_ids: blocks of tokens [num_cached_tokens, num_tokens).
    min_tokens: minimum tokens of a commit.
    held_start: first token with a block.
    connection, on_aborted: of the sender that presented it.
    checksum, num_bytes: sums over all written chunks.
    data: the ticket's bytes.
    mark: see KvPool; of the time when the ticket got the blocks.
    """

    ticket_id: int
    block_ids: tuple[int, ...]
    groups: LayerGroups
    min_tokens: int
    num_cached_tokens: int
    num_tokens: int
    coverage: Coverage
    lease_s: float
    deadline: float
    state: TicketState = TicketState.OFFERED
    connection: int | None = None
    on_aborted: OnAborted | None = None
    num_pins: int = 0
    checksum: int = 0
    num_bytes: int = 0
    aborted: TicketAborted | None = None
    reserved_s: float = 0.0
    receiving_s: float = 0.0
    data: bytes = b""
    mark: object = None
    held_start: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it may still be committed."""
        return self.state in _OPEN

    @property
    def is_settled(self) -> bool:
        """Whether its event has been, or is being, reported."""
        return self.state not in _OPEN and not self.num_pins

    @property
    def refusal(self) -> Rejection | None:
        """Why no further frame of its sender is accepted; None while it is open."""
        if self.aborted:
            return Rejection(self.aborted.reason, self.aborted.message)
        if self.state is TicketState.COMMITTED:
            return Rejection(HandoffFailed.reason, "the ticket is committed")
        return None

    def present(
        self, connection: int, on_aborted: OnAborted | None, now_s: float
    ) -> Rejection | None:
        """Bind the ticket to its sender's connection. Return the rejection, if any."""
        if self.aborted:
            return self.refusal
        if self.state is not TicketState.OFFERED:
            return Rejection(HandoffFailed.reason, "the ticket has been used")
        self.state = TicketState.RESERVED
        self.connection = connection
        self.on_aborted = on_aborted
        self.reserved_s = self.receiving_s = now_s
        self.renew(now_s)
        return None

    def renew(self, now_s: float) -> None:
        self.deadline = now_s + self.lease_s

    def pin(self, piece: KvRange, now_s: float) -> str:
        """Record `piece` as arrived and pin the blocks until unpin. Return the fault, or an empty
        string."""
        if not (
            piece.num_tokens > 0
            and piece.num_layers > 0
            and max(self.num_cached_tokens, self.held_start) <= piece.first_token
            and piece.end_token <= self.num_tokens
            and piece.first_layer >= 0
            and piece.end_layer <= self.groups.num_layers(piece.group)
            and self._has_place(piece)
        ):
            return f"a chunk outside of the reservation: {piece}"
        if not self.coverage.add(piece):
            return f"a chunk that came before: {piece}"
        if self.state is TicketState.RESERVED:
            self.receiving_s = now_s
        self.state = TicketState.RECEIVING
        self.num_pins += 1
        self.renew(now_s)
        return ""

    def _has_place(self, piece: KvRange) -> bool:
        """Whether `piece` has blocks in all its groups."""
        groups = self.groups
        if not groups.has_partial or piece.first_token >= groups.whole_start(self.num_tokens):
            return True
        return all(groups[part.group].keeps_all_tokens for part in groups.split(piece))

    def unpin(self, checksum: int, num_bytes: int) -> TicketAborted | None:
        """Release one pin. Return the pending abort event after the last one, else None."""
        self.num_pins -= 1
        self.checksum = (self.checksum + checksum) & CHECKSUM_MASK
        self.num_bytes += num_bytes
        return None if self.num_pins else self.aborted

    def commit(self, commit: Commit) -> TicketCommitted | str:
        """Commit if all KV has arrived. Return the event, or the fault."""
        if not self.min_tokens <= commit.num_tokens <= self.num_tokens:
            return (
                f"a commit of {commit.num_tokens} tokens for {self.min_tokens} to {self.num_tokens}"
            )
        first, end = self.num_cached_tokens, commit.num_tokens
        whole_start = self.coverage.whole_start(first, end)
        if self.num_pins or whole_start is None:
            return "a commit of KV that has not all arrived"
        if self.checksum != commit.checksum:
            return "the checksum of all chunks is not what the sender says"
        self.state = TicketState.COMMITTED
        return TicketCommitted(
            self.ticket_id,
            commit.num_tokens,
            commit.first_tokens,
            commit.exposed_ms,
            self.num_bytes,
            self.reserved_s,
            self.receiving_s,
            whole_start,
        )

    def abort(self, reason: str, message: str) -> TicketAborted | None:
        """Abort the open ticket. Return the event; None while a writer holds a pin."""
        self.state = TicketState.ABORTED
        self.aborted = TicketAborted(self.ticket_id, reason, message)
        return None if self.num_pins else self.aborted


_OPEN = frozenset({TicketState.OFFERED, TicketState.RESERVED, TicketState.RECEIVING})


class Coverage:
    """Arrived token intervals per run of layers: disjoint, sorted and maximal.

    Layers are numbered within their group, so that a group's layers form one run even if others lie
    between them in the model. A run is split only where a piece requires it; most pieces span all
    layers, and cost as much as one layer.
    """

    def __init__(self, groups: LayerGroups) -> None:
        self._groups = groups
        self._runs = {
            group.number: [_LayerRun(0, group.num_layers, [], [])] for group in groups.all
        }

    def add(self, piece: KvRange) -> bool:
        """Record `piece` as arrived. Return False, without any change, if part of it had arrived
        before."""
        start, end = piece.first_token, piece.end_token
        runs = [run for part in self._groups.split(piece) for run in self._runs_of(part)]
        if any(run.overlaps(start, end) for run in runs):
            return False
        for run in runs:
            run.insert(start, end)
        return True

    def whole_start(self, first_token: int, end_token: int) -> int | None:
        """The first token that arrived in every group; None unless exactly the tokens that a
        sequence of end_token tokens lacks from first_token on have arrived; see
        LayerGroup.arrived_from."""
        latest = first_token
        for group in self._groups.all:
            for run in self._runs[group.number]:
                start = group.arrived_from(run.starts, run.ends, first_token, end_token)
                if start is None:
                    return None
                latest = max(latest, start)
        return latest

    def _runs_of(self, part: KvRange) -> list[_LayerRun]:
        """The runs within a range of one group. ALL stands for the only group."""
        number = part.group if part.group in self._runs else self._groups.paged[0].number
        runs = self._runs[number]
        for layer in (part.first_layer, part.end_layer):
            _split(runs, layer)
        return [
            run
            for run in runs
            if part.first_layer <= run.first_layer and run.end_layer <= part.end_layer
        ]


def _split(runs: list[_LayerRun], layer: int) -> None:
    """Split the run that contains `layer`, so that one starts there."""
    for index, run in enumerate(runs):
        if run.first_layer < layer < run.end_layer:
            rest = _LayerRun(layer, run.end_layer, run.starts.copy(), run.ends.copy())
            run.end_layer = layer
            runs.insert(index + 1, rest)
            return


@dataclass(slots=True)
class _LayerRun:
    """Layers [first_layer, end_layer) of a group with equal arrivals: starts[i] <= token < ends[i],
    and ends[i] < starts[i + 1]."""

    first_layer: int
    end_layer: int
    starts: list[int]
    ends: list[int]

    def overlaps(self, start: int, end: int) -> bool:
        after = bisect_left(self.starts, end)
        return after > 0 and self.ends[after - 1] > start

    def insert(self, start: int, end: int) -> None:
        starts, ends = self.starts, self.ends
        at = bisect_left(starts, start)
        joins_next = at < len(starts) and starts[at] == end
        joins_previous = at > 0 and ends[at - 1] == start
        if joins_previous and joins_next:
            del starts[at], ends[at - 1]
        elif joins_previous:
            ends[at - 1] = end
        elif joins_next:
            starts[at] = start
        else:
            starts.insert(at, start)
            ends.insert(at, end)
