"""The KV ticket as it travels: its fields, its bytes, and the digest that makes it unforgeable."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from baton.errors import InvalidRequest
from baton.types import DTYPE_BYTES, KvLayout, WorkerIdentity
from baton.v1 import kv_pb2
from baton.wire import layout_from_proto, layout_to_proto
from kv_transfer.endpoint import Endpoint, endpoint_to_proto, endpoints_from_proto

MAX_TICKET_BYTES = 16 * 1024
_MAC_BYTES = 32


@dataclass(frozen=True, slots=True)
class KvTicket:
    """The right to write one sequence's KV into blocks that `owner` has reserved; see
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


def encode_ticket(ticket: KvTicket, secret: bytes) -> bytes:
    """The ticket's bytes, with a digest of all fields under `secret` (at most 64 bytes)."""
    message = kv_pb2.KvTicket(
        worker_id=ticket.owner.worker_id,
        generation=ticket.owner.generation,
        ticket_id=ticket.ticket_id,
        epoch=ticket.epoch,
        request_id=ticket.request_id,
        tenant=ticket.tenant,
        num_cached_tokens=ticket.num_cached_tokens,
        num_tokens=ticket.num_tokens,
        layout=layout_to_proto(ticket.layout),
        endpoints=[endpoint_to_proto(endpoint) for endpoint in ticket.endpoints],
        lease_ms=max(1, round(ticket.lease_s * 1000)),
        traceparent=ticket.traceparent,
    )
    message.mac = _mac(message, secret)
    return message.SerializeToString(deterministic=True)


def parse_ticket(data: bytes) -> KvTicket:
    """The fields of a ticket, whose genuineness its owner alone can check. Raises InvalidRequest if
    it is none."""
    message = _parse(data)
    layout = layout_from_proto(message.layout)
    if not (
        message.worker_id
        and message.ticket_id
        and message.lease_ms
        and message.num_cached_tokens <= message.num_tokens
        and layout.dtype in DTYPE_BYTES
        and min(layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size) > 0
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
        endpoints=endpoints_from_proto(list(message.endpoints)),
        lease_s=message.lease_ms / 1000,
        traceparent=message.traceparent,
    )


def ticket_id_of(data: bytes) -> int:
    """The number of a ticket. Raises InvalidRequest if it is none."""
    return _parse(data).ticket_id


def verify_ticket(data: bytes, owner: WorkerIdentity, secret: bytes) -> KvTicket:
    """The ticket, if `owner` made it under `secret` and not a bit of its meaning was changed.

    Raises InvalidRequest otherwise. Compares in constant time.
    """
    ticket = parse_ticket(data)
    if ticket.owner != owner:
        raise InvalidRequest(
            f"the ticket is of {ticket.owner.worker_id} generation {ticket.owner.generation}, "
            f"and this is {owner.worker_id} generation {owner.generation}"
        )
    message = _parse(data)
    if not hmac.compare_digest(message.mac, _mac(message, secret)):
        raise InvalidRequest("the ticket is not genuine")
    return ticket


def _parse(data: bytes) -> kv_pb2.KvTicket:
    if len(data) > MAX_TICKET_BYTES:
        raise InvalidRequest(f"a KV ticket of {len(data)} bytes; at most {MAX_TICKET_BYTES} may be")
    try:
        return kv_pb2.KvTicket.FromString(data)
    except DecodeError:
        raise InvalidRequest("the bytes given as a KV ticket are none") from None


def _mac(message: kv_pb2.KvTicket, secret: bytes) -> bytes:
    """Digest of every field but the digest; unknown fields count, so they cannot be added
    either."""
    bare = kv_pb2.KvTicket()
    bare.CopyFrom(message)
    bare.ClearField("mac")
    data = bare.SerializeToString(deterministic=True)
    return hashlib.blake2b(
        data, key=secret, digest_size=_MAC_BYTES, person=b"baton-kv-ticket"
    ).digest()
