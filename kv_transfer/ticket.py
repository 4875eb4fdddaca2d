"""Tickets: the right of one worker to write one sequence's KV into reserved blocks until a
deadline, the data that it gets for this, and the owner's endpoints.

    OFFERED ----> RESERVED ----> RECEIVING ----> COMMITTED ----> (forgotten)
       |   begin     |   pin         |   commit of   |       release
       |             |               |   the last    |
       |             |               |   part        |
       +-------------+---------------+               |
             | abort, lease over, connection lost,   |
             v broken rule, of any part              |
          ABORTED ------------> (forgotten) <--------+
                     release

    each part:    presented ----> complete
                     begin   commit

A sender with several ranks sends its KV in parts, each over a connection of its own. Parts that
were presented are disjoint. The ticket is committed once complete parts cover what the owner's rank
holds; a single rank presents one part, which is all. Each part has its own coverage, checksum and
lease; its sender learns at once that it is complete.

A ticket that needs no KV (all is cached) goes from RESERVED to COMMITTED. OFFERED waits for a
sender, RESERVED belongs to the connections of its parts, RECEIVING has accepted a chunk. All parts
must be presented within `offer_s`, which senders do on receipt, before any queue. From then on each
part has the lease as its deadline until it is complete; its sender renews the lease while its own
work is queued.

An owner with several ranks has one ticket in the table of each; see kv_transfer.ticket_group.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError

from baton.errors import HandoffFailed, InvalidRequest
from baton.kv_transports import KV_TRANSPORTS
from baton.types import KvLayout, Sample, WorkerIdentity
from baton.v1 import kv_pb2
from baton.wire import layout_from_proto, layout_to_proto
from engine.kv.layout import LayerGroups, groups_of, is_sound
from engine.kv.part import KvPart, are_of_ranks, covers
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
class OwnerRank:
    """A rank that receives a part of a ticket's KV; part: as the model counts layers and heads."""

    part: KvPart
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class KvTicket:
    """The right to write one sequence's KV into blocks reserved by `owner`; see baton.v1.KvTicket.

    ranks: of the owner; empty if it receives all at `endpoints`.
    """

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
    ranks: tuple[OwnerRank, ...] = ()

    @property
    def receivers(self) -> tuple[OwnerRank, ...]:
        """The owner's ranks; a single one if it has no others."""
        return self.ranks or (OwnerRank(KvPart.whole(self.layout), self.endpoints),)


def common_fields(
    owner: WorkerIdentity,
    layout: KvLayout,
    endpoints: Iterable[Endpoint],
    ranks: Iterable[OwnerRank] = (),
) -> kv_pb2.KvTicket:
    """Fields common to all tickets of one boot of a worker. layout: of all its ranks together."""
    return kv_pb2.KvTicket(
        worker_id=owner.worker_id,
        generation=owner.generation,
        layout=layout_to_proto(layout),
        endpoints=map(_endpoint_to_proto, endpoints),
        ranks=[
            kv_pb2.KvRank(
                part=part_to_proto(rank.part), endpoints=map(_endpoint_to_proto, rank.endpoints)
            )
            for rank in ranks
        ],
    )


def _endpoint_to_proto(endpoint: Endpoint) -> kv_pb2.KvEndpoint:
    number = _NUMBERS[endpoint.transport]
    return kv_pb2.KvEndpoint(transport=number, address=endpoint.address, host_id=endpoint.host_id)


def _endpoints_of(messages: Iterable[kv_pb2.KvEndpoint]) -> tuple[Endpoint, ...]:
    """Skips transports of newer owners that this version does not support."""
    return tuple(
        Endpoint(_NAMES[each.transport], each.address, each.host_id)
        for each in messages
        if each.transport in _NAMES
    )


def part_to_proto(part: KvPart) -> kv_pb2.KvPart:
    return kv_pb2.KvPart(**asdict(part))


def part_from_proto(message: kv_pb2.KvPart) -> KvPart:
    states = message.first_state, message.num_states
    return KvPart(
        *(message.first_layer, message.num_layers, message.first_head, message.num_heads), *states
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
    ranks = tuple(
        OwnerRank(part_from_proto(rank.part), _endpoints_of(rank.endpoints))
        for rank in message.ranks
    )
    if not (
        message.worker_id
        and message.ticket_id
        and message.lease_ms
        and message.num_cached_tokens <= message.num_tokens
        and is_sound(layout)
        and (not ranks or are_of_ranks((rank.part for rank in ranks), KvPart.whole(layout)))
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
        endpoints=_endpoints_of(message.endpoints),
        lease_s=message.lease_ms / 1000,
        traceparent=message.traceparent,
        ranks=ranks,
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
    """A new ticket: its number, and its bytes for the sender.

    is_known: whether it can be presented; if not yet, TicketOffered follows.
    """

    ticket_id: int
    data: bytes
    is_known: bool = True


@dataclass(frozen=True, slots=True)
class TicketOffered:
    """The ticket can be presented: all ranks of its owner know it."""

    ticket_id: int


@dataclass(frozen=True, slots=True)
class ParkedChunk:
    """Verified KV in host memory. write: copies it into the sequence's blocks; used by one thread
    at a time."""

    first_token: int
    num_bytes: int
    write: Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class TicketCommitted:
    """All KV of `num_tokens` tokens is in the blocks, which the receiver of this event owns, or in
    `parked`.

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
    parked: tuple[ParkedChunk, ...] = ()
    """Chunks that came before their blocks; empty unless the ticket was late."""
    checksum: int = 0
    """Sum of the checksums of all chunks, modulo 2**64."""


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


TicketEvent = TicketOffered | TicketCommitted | TicketAborted | PrefixRequested


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

    @property
    def end(self) -> tuple[int, tuple[Sample, ...]]:
        """How the sequence goes on; equal in the commits of all parts of a ticket."""
        return self.num_tokens, self.first_tokens


@dataclass(frozen=True, slots=True)
class Reservation:
    """A new ticket, and the blocks of one of the owner's ranks.

    data: for the sender. block_ids: blocks of tokens [num_cached_tokens, num_tokens); of a late
    ticket the first of them, or none. min_tokens: minimum tokens of a commit. held_start: first
    token with a block.
    """

    ticket_id: int
    data: bytes
    block_ids: tuple[int, ...]
    num_cached_tokens: int
    num_tokens: int
    min_tokens: int
    lease_s: float
    held_start: int = 0


@dataclass(slots=True)
class TicketPart:
    """A part of a ticket's KV, on the connection that presented it.

    part: as the model counts layers and heads; groups: of this part alone.
    checksum, num_bytes: sums over all written chunks.
    commit: the sender's, once the part is complete; whole_start: see TicketCommitted.
    """

    part: KvPart
    groups: LayerGroups
    coverage: Coverage
    deadline: float
    on_aborted: OnAborted | None = None
    num_pins: int = 0
    checksum: int = 0
    num_bytes: int = 0
    commit: Commit | None = None
    whole_start: int = 0


@dataclass(slots=True)
class Ticket:
    """State and transitions of a ticket at one rank of its owner. Times on the caller's clock.

    layout, own: of the rank; own as the model counts layers and heads.
    offer_deadline: time by which all parts must be presented.
    parts: by connection. is_presented: whether they cover `own`.
    mark: see KvPool; of the time when the ticket got its last blocks.
    block_ids: more of them come while the KV of a late ticket arrives.
    parked: chunks that came before their blocks. arrived_end: end of the last token that arrived.
    """

    reserved: Reservation
    layout: KvLayout
    own: KvPart
    offer_deadline: float
    state: TicketState = TicketState.OFFERED
    parts: dict[int, TicketPart] = field(default_factory=dict)
    is_presented: bool = False
    aborted: TicketAborted | None = None
    reserved_s: float = 0.0
    receiving_s: float = 0.0
    mark: object = None
    block_ids: tuple[int, ...] = field(init=False)
    parked: list[ParkedChunk] = field(default_factory=list)
    arrived_end: int = 0

    def __post_init__(self) -> None:
        self.block_ids = self.reserved.block_ids

    @property
    def ticket_id(self) -> int:
        return self.reserved.ticket_id

    def has_blocks(self, piece: KvRange) -> bool:
        return piece.end_token <= len(self.block_ids) * self.layout.block_size

    @property
    def is_open(self) -> bool:
        """Whether it may still be committed."""
        return self.state in _OPEN

    @property
    def num_pins(self) -> int:
        return sum(part.num_pins for part in self.parts.values())

    @property
    def is_settled(self) -> bool:
        """Whether its event has been, or is being, reported."""
        return self.state not in _OPEN and not self.num_pins

    @property
    def deadline(self) -> float:
        """Deadline of the next transition of an open ticket."""
        if not self.is_presented:
            return self.offer_deadline
        return min(part.deadline for part in self.parts.values() if part.commit is None)

    def refusal(self, connection: int) -> Rejection | None:
        """Why no further frame of this connection is accepted; None if it is."""
        if self.aborted:
            return Rejection(self.aborted.reason, self.aborted.message)
        if self.state is TicketState.COMMITTED or self.parts[connection].commit:
            return Rejection(HandoffFailed.reason, "the ticket is committed")
        return None

    def present(
        self, connection: int, part: KvPart, on_aborted: OnAborted | None, now_s: float
    ) -> Rejection | None:
        """Bind a part of the ticket, within the rank's, to its sender's connection. Return the
        rejection, if any."""
        if self.aborted:
            return Rejection(self.aborted.reason, self.aborted.message)
        if any(part.overlap(other.part) for other in self.parts.values()):
            return Rejection(HandoffFailed.reason, "the ticket has been used")
        if self.state is TicketState.OFFERED:
            self.state = TicketState.RESERVED
            self.reserved_s = self.receiving_s = now_s
        is_all = part == self.own  # from a sender with one rank
        groups = groups_of(self.layout if is_all else part.within(self.own).layout(self.layout))
        self.parts[connection] = TicketPart(
            part, groups, Coverage(groups), now_s + self.reserved.lease_s, on_aborted
        )
        self.is_presented = is_all or covers((each.part for each in self.parts.values()), self.own)
        return None

    def renew(self, connection: int, now_s: float) -> None:
        self.parts[connection].deadline = now_s + self.reserved.lease_s

    def pin(self, connection: int, piece: KvRange, now_s: float) -> str:
        """Record `piece` of the connection's part as arrived and pin the blocks until unpin. Return
        the fault, or an empty string."""
        part, reserved = self.parts[connection], self.reserved
        if not (
            piece.num_tokens > 0
            and piece.num_layers > 0
            and max(reserved.num_cached_tokens, reserved.held_start) <= piece.first_token
            and piece.end_token <= reserved.num_tokens
            and piece.first_layer >= 0
            and piece.end_layer <= part.groups.num_layers(piece.group)
            and self._has_place(part.groups, piece)
        ):
            return f"a chunk outside of the reservation: {piece}"
        if not part.coverage.add(piece):
            return f"a chunk that came before: {piece}"
        if self.state is TicketState.RESERVED:
            self.receiving_s = now_s
        self.state = TicketState.RECEIVING
        part.num_pins += 1
        self.arrived_end = max(self.arrived_end, piece.end_token)
        self.renew(connection, now_s)
        return ""

    def _has_place(self, groups: LayerGroups, piece: KvRange) -> bool:
        """Whether `piece` has blocks in all its groups."""
        num_tokens = self.reserved.num_tokens
        if not groups.has_partial or piece.first_token >= groups.whole_start(num_tokens):
            return True
        return all(groups[part.group].keeps_all_tokens for part in groups.split(piece))

    def unpin(self, connection: int, checksum: int, num_bytes: int) -> TicketAborted | None:
        """Release one pin. Return the pending abort event after the last one, else None."""
        part = self.parts[connection]
        part.num_pins -= 1
        part.checksum = (part.checksum + checksum) & CHECKSUM_MASK
        part.num_bytes += num_bytes
        return None if self.num_pins else self.aborted

    def commit(self, connection: int, commit: Commit) -> TicketCommitted | str | None:
        """Complete the connection's part if all its KV has arrived. Return the event after the last
        part, None after another one, or the fault."""
        part, reserved = self.parts[connection], self.reserved
        if not reserved.min_tokens <= commit.num_tokens <= reserved.num_tokens:
            least, most = reserved.min_tokens, reserved.num_tokens
            return f"a commit of {commit.num_tokens} tokens for {least} to {most}"
        first, end = reserved.num_cached_tokens, commit.num_tokens
        whole_start = part.coverage.whole_start(first, end)
        if part.num_pins or whole_start is None:
            return "a commit of KV that has not all arrived"
        if part.checksum != commit.checksum:
            return "the checksum of all chunks is not what the sender says"
        part.commit, part.whole_start = commit, whole_start
        parts = self.parts.values()
        commits = [each.commit for each in parts if each.commit]
        if any(each.end != commit.end for each in commits):
            return "a commit that ends otherwise than that of another part"
        if not self.is_presented or len(commits) < len(parts):
            return None
        self.state = TicketState.COMMITTED
        return TicketCommitted(
            self.ticket_id,
            *commit.end,
            max(each.exposed_ms for each in commits),
            sum(each.num_bytes for each in parts),
            self.reserved_s,
            self.receiving_s,
            max(each.whole_start for each in parts),
            tuple(self.parked),
            sum(each.checksum for each in parts) & CHECKSUM_MASK,
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
