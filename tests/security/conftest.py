"""Certificates that tests of one session share: making keys takes time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from baton.rpc.tls import TlsFiles
from baton.types import KvLayout, WorkerIdentity
from engine.kv.tensors.array import ArrayKvPool
from kv_transfer.handshake import ReceiverConfig
from kv_transfer.transport.base import TransportConfig
from kv_transfer.transport.listeners import RunningReceiver, open_receiver
from tests.support.certificates import Authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Nobody trusts it."""
    return Authority(tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="session")
def own(authority: Authority) -> TlsFiles:
    """A good certificate of this host."""
    return authority.files("127.0.0.1", "localhost")


@pytest.fixture
def make_listener() -> Iterator[Callable[[TlsFiles, tuple[str, ...]], str]]:
    """A receiver of KV over TCP with TLS, and the peer names that it wants: its address. Closed at
    the end."""
    running: list[RunningReceiver] = []

    def make(tls: TlsFiles, peer_names: tuple[str, ...]) -> str:
        layout = KvLayout("m", 2, 1, 2, "int64", 4)
        running.append(
            open_receiver(
                ReceiverConfig(WorkerIdentity("d0", 7), ArrayKvPool(layout, 8)),
                lambda _: None,
                time.monotonic,
                transports=("tcp",),
                listen=TransportConfig(tls=tls, peer_names=peer_names),
            )
        )
        return running[-1].endpoints[0].address

    yield make
    for receiver in running:
        receiver.close()
