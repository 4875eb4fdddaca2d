"""A KV sender that sends nothing."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from kv_transfer.send_connection import Cancel, FetchPrefix, Finish, LaterTask, Send


@dataclass
class RecordingSender:
    """Notes each (key, token, layer) that is sent."""

    sent: list[tuple[Hashable, int, int]] = field(default_factory=list)
    committed: list[Hashable] = field(default_factory=list)
    aborted: list[Hashable] = field(default_factory=list)
    begun: tuple[Hashable, bytes] = ("", b"")
    fetched: list[bytes] = field(default_factory=list)

    def begin(self, key: Hashable, ticket: bytes, *others: LaterTask) -> int:
        self.begun = (key, ticket)
        for task in others:
            self.submit(task)
        return 0

    def submit(self, task: LaterTask) -> None:
        match task:
            case Send(key, block_ids, piece):
                assert len(block_ids) * 4 >= piece.end_token
                for token in range(piece.first_token, piece.end_token):
                    layers = range(piece.first_layer, piece.end_layer)
                    self.sent += [(key, token, layer) for layer in layers]
            case Finish(key):
                self.committed.append(key)
            case Cancel(key):
                self.aborted.append(key)
            case FetchPrefix(_, deliver_to):
                self.fetched.append(deliver_to)

    def heartbeat(self) -> None:
        pass
