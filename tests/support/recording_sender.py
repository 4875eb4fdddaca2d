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
    fetched: list[bytes] = field(default_factory=list)

    def begin(self, key: str, ticket: bytes) -> int:
        self.begun = (key, ticket)
        return 0

    def send(self, key: str, block_ids: tuple[int, ...], piece: KvRange) -> None:
        assert len(block_ids) * 4 >= piece.end_token
        for token in range(piece.first_token, piece.end_token):
            self.sent += [(key, token, i) for i in range(piece.first_layer, piece.end_layer)]

    def fetch_prefix(self, key: str, deliver_to: bytes) -> None:
        del key
        self.fetched.append(deliver_to)

    def commit(
        self, key: str, num_tokens: int, firsts: tuple[Sample, ...], prefill_end: float
    ) -> None:
        del num_tokens, firsts, prefill_end
        self.committed.append(key)

    def hand_off(
        self,
        key: str,
        ticket: bytes,
        block_ids: tuple[int, ...],
        num_tokens: int,
        prefill_end: float,
    ) -> None:
        del block_ids, num_tokens, prefill_end
        self.begun = (key, ticket)
        self.committed.append(key)

    def abort(self, key: str, reason: str, message: str) -> None:
        del reason, message
        self.aborted.append(key)

    def heartbeat(self) -> None:
        pass
