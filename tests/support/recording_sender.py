"""A KV sender that sends nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.types import KvRange, Sample


@dataclass
class RecordingSender:
    """Notes each (key, token, layer) that is sent."""

    sent: list[tuple[str, int, int]] = field(default_factory=list)
    committed: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    begun: tuple[str, bytes] = ("", b"")
    borrowed: list[bytes] = field(default_factory=list)

    def begin(self, key: str, ticket: bytes) -> None:
        self.begun = (key, ticket)

    def send(self, key: str, block_ids: tuple[int, ...], piece: KvRange) -> None:
        assert len(block_ids) * 4 >= piece.end_token
        for token in range(piece.first_token, piece.end_token):
            self.sent += [(key, token, i) for i in range(piece.first_layer, piece.end_layer)]

    def borrow(self, key: str, lend_to: bytes) -> None:
        del key
        self.borrowed.append(lend_to)

    def commit(
        self, key: str, num_tokens: int, firsts: tuple[Sample, ...], prefill_end: float
    ) -> None:
        del num_tokens, firsts, prefill_end
        self.committed.append(key)

    def abort(self, key: str, reason: str, message: str) -> None:
        del reason, message
        self.aborted.append(key)

    def heartbeat(self) -> None:
        pass
