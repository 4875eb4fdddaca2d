"""Certificates that are renewed while processes run: the next connection sees the new ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.client import TlsFiles
from baton.errors import ConfigError
from baton.rpc.channel import aio_channel
from baton.rpc.file_watch import MadeOfFiles
from baton.v1 import worker_pb2, worker_pb2_grpc
from kv_transfer.transport.tls import client_contexts, connect_tls
from tests.support.certificates import Authority, as_options
from tests.support.live_tiers import decode_worker


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> TlsFiles:
    """A copy of a certificate made out to old.test."""
    made = TlsFiles(tmp_path / "ca.pem", tmp_path / "own.crt", tmp_path / "own.key")
    put(authority.files("old.test"), made)
    return made


def put(source: TlsFiles, target: TlsFiles) -> None:
    for name in ("ca_certs", "certfile", "keyfile"):
        shutil.copy(getattr(source, name), getattr(target, name))


async def is_shown(address: str, name: str, own: TlsFiles) -> bool:
    """Whether the server shows a certificate made out to `name`."""
    asking = TlsFiles(own.ca_certs, own.certfile, own.keyfile, name)
    async with aio_channel(address, asking) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        call = stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=30.0)
        return await call.code() is grpc.StatusCode.OK


async def test_a_worker_shows_its_new_certificate(files: TlsFiles, authority: Authority) -> None:
    asking = authority.files("asking.test")
    async with decode_worker(worker_id="d0", **as_options(files)) as address:
        assert await is_shown(address, "old.test", asking)
        put(authority.files("new.test"), files)
        assert await is_shown(address, "new.test", asking)
        assert not await is_shown(address, "old.test", asking)


def test_so_does_a_receiver_of_kv_and_a_sender(
    make_listener: Any, files: TlsFiles, stranger: Authority
) -> None:
    address, contexts = make_listener(files, ()), client_contexts(files)
    connect_tls(address, 10.0, 10.0, contexts(), "old.test").close()
    assert contexts() is contexts(), "nothing is read anew without need"
    put(stranger.files("strange.test"), files)
    connect_tls(address, 10.0, 10.0, contexts(), "strange.test").close()


def test_what_cannot_be_used_changes_nothing(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "number"

    def make() -> int:
        try:
            return int(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError.of("number", path, "no number") from error

    with pytest.raises(ConfigError):
        MadeOfFiles([path], make)
    path.write_text("1")
    made = MadeOfFiles([path], make)
    assert (made.current(), made.renewed()) == (1, None)
    path.write_text("torn")
    assert [made.current(), made.renewed(), made.current()] == [1, None, 1]
    assert caplog.text.count("kept as they were") == 1
    path.unlink()
    assert made.current() == 1
    path.write_text("23")
    assert (made.renewed(), made.renewed(), made.current()) == (23, None, 23)
