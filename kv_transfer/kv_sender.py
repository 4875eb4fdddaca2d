"""What an engine loop's core asks of the sending half of the KV channel."""

from __future__ import annotations

from typing import Protocol

from baton.types import KvRange, Sample


class KvSender(Protocol):
    """See kv_transfer.sender.Sender. No call blocks."""

    def begin(self, key: str, ticket: bytes) -> None: ...

    def send(self, key: str, block_ids: tuple[int, ...], piece: KvRange) -> None: ...

    def borrow(self, key: str, lend_to: bytes) -> None: ...

    def commit(
        self, key: str, num_tokens: int, firsts: tuple[Sample, ...], prefill_end: float
    ) -> None: ...

    def abort(self, key: str, reason: str, message: str) -> None: ...

    def heartbeat(self) -> None: ...
