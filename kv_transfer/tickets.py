"""What an engine loop's core asks of a ticket table."""

from __future__ import annotations

from typing import Protocol

from baton.types import SequenceSpec
from kv_transfer.ticket import OfferedTicket


class Tickets(Protocol):
    """See kv_transfer.ticket_table.TicketTable."""

    def offer(
        self,
        spec: SequenceSpec,
        block_ids: tuple[int, ...],
        num_cached_tokens: int,
        num_tokens: int,
        lease_s: float = ...,
    ) -> OfferedTicket: ...

    def abort(self, ticket_id: int, reason: str, message: str) -> None: ...

    def expire(self) -> None: ...

    def release(self, ticket_id: int) -> None: ...
