"""A loopback channel that flips bits of payloads, loses, repeats and swaps frames, and breaks
connections."""

from __future__ import annotations

import random
from collections import Counter

from baton.v1 import kv_pb2
from kv_transfer.frame import Frame
from kv_transfer.transport.connection import Connection, Staged, TransportError
from kv_transfer.transport.loopback import LoopbackHub

FAULTS = ("flip", "stale", "lose", "repeat", "break")


class FaultyHub(LoopbackHub):
    """Each frame of a sender meets one of FAULTS with probability `rate`. `counts`: how often each
    happened."""

    def __init__(self, rng: random.Random, rate: float) -> None:
        super().__init__()
        self.rng = rng
        self.rate = rate
        self.counts: Counter[str] = Counter()

    def connect(self, name: str) -> FaultyConnection:  # type: ignore[override]
        return FaultyConnection(super().connect(name), self)


class FaultyConnection:
    """See Connection."""

    def __init__(self, inner: Connection, hub: FaultyHub) -> None:
        self._inner = inner
        self._hub = hub
        self._last_payload = b""

    def stage(self, num_bytes: int) -> Staged | None:
        return self._inner.stage(num_bytes)

    def unstage(self, staged: Staged) -> None:
        self._inner.unstage(staged)

    def send(self, frame: Frame, staged: Staged | None = None, *, more: bool = False) -> None:
        rng, hub = self._hub.rng, self._hub
        fault = rng.choice(FAULTS) if rng.random() < hub.rate else ""
        payload = bytes(staged.buffer) if staged else b""
        match fault:
            case "flip" if staged and payload:
                hub.counts["flip"] += 1
                staged.buffer[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
            case "stale" if staged and len(self._last_payload) == len(payload):
                if self._last_payload != payload:
                    hub.counts["stale"] += 1
                    staged.buffer[:] = self._last_payload
            case "lose" if not isinstance(frame, kv_pb2.KvHello):
                hub.counts["lose"] += 1
                return
            case "repeat" if not isinstance(frame, kv_pb2.KvHello):
                hub.counts["repeat"] += 1
                self._inner.send(frame, staged, more=more)
            case "break":
                hub.counts["break"] += 1
                self._inner.close()
                raise TransportError("the test broke the connection")
        self._last_payload = payload
        self._inner.send(frame, staged, more=more)

    def flush(self) -> None:
        self._inner.flush()

    def seal(self, key: bytes) -> None:
        self._inner.seal(key)

    def receive(self) -> Frame | None:
        return self._inner.receive()

    def fileno(self) -> int:
        return self._inner.fileno()

    def close(self) -> None:
        self._inner.close()
