"""Tickets that no table has made."""

from __future__ import annotations

from collections.abc import Iterable

from baton.types import KvLayout, WorkerIdentity
from kv_transfer.ticket import Endpoint, common_fields, signed_ticket


def ticket_of(
    owner: WorkerIdentity,
    layout: KvLayout,
    num_tokens: int,
    *,
    ticket_id: int = 1,
    endpoints: Iterable[Endpoint] = (),
) -> bytes:
    message = common_fields(owner, layout, endpoints)
    message.ticket_id = ticket_id
    message.epoch = 1
    message.request_id = "r"
    message.num_tokens = num_tokens
    message.lease_ms = 30_000
    return signed_ticket(message, b"s" * 32)
