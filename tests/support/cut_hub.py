"""A loopback hub as one worker sees it, from which some of the others cannot be reached, or do not
answer."""

from __future__ import annotations

from kv_transfer.frame import Frame
from kv_transfer.transport.connection import Staged, TransportError
from kv_transfer.transport.loopback import LoopbackConnection, LoopbackHub, LoopbackListener


class CutHub(LoopbackHub):
    """refused: connecting there fails at once. mute: whoever connects there hears nothing, ever."""

    def __init__(
        self,
        hub: LoopbackHub,
        refused: frozenset[str] = frozenset(),
        mute: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self._hub = hub
        self._refused = refused
        self._mute = mute

    def listen(self, name: str) -> LoopbackListener:
        return self._hub.listen(name)

    def has(self, name: str) -> bool:
        return self._hub.has(name)

    def forget(self, name: str) -> None:
        self._hub.forget(name)

    def connect(self, name: str) -> LoopbackConnection:
        if name in self._refused:
            raise TransportError(f"{name} refuses")
        connection = self._hub.connect(name)
        return _Mute(connection) if name in self._mute else connection


class _Mute(LoopbackConnection):
    def __init__(self, connection: LoopbackConnection) -> None:
        self._connection = connection

    def send(self, frame: Frame, staged: Staged | None = None, *, more: bool = False) -> None:
        pass

    def receive(self) -> Frame | None:
        return None

    def close(self) -> None:
        self._connection.close()
