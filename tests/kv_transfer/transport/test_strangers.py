"""Strangers at the KV door: they leave soon, cost little, and leave places for others."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import kv_pb2
from kv_transfer.frame import encode
from kv_transfer.kv_secret import KvSecret
from kv_transfer.transport import stream
from kv_transfer.transport.base import TransportConfig
from kv_transfer.transport.shm import TRANSPORT
from kv_transfer.transport.unix_stream import UnixListener, sweep

SECRET = KvSecret(b"known to both of these workers")
PATIENCE_S = 30.0


def knock(rig: Any) -> socket.socket:
    """A stranger's connection."""
    host, port = rig.running.endpoints[0].address.split(":")
    sock = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    sock.settimeout(PATIENCE_S)
    return sock


def hello() -> bytes:
    layout = kv_pb2.KvLayout(
        fingerprint="m", num_layers=3, num_kv_heads=2, head_dim=4, dtype="int64", block_size=4
    )
    return encode(
        kv_pb2.KvHello(
            min_version=1, max_version=1, worker_id="stranger", layout=layout, nonce=b"n" * 32
        )
    )


def is_hung_up(sock: socket.socket) -> bool:
    """Whether the peer ends the connection, after whatever it still says."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(4096):
            pass
    return True


def check_open(rig: Any) -> None:
    """A worker that knows the secret is served."""
    ticket = rig.offer((0, 1), 0, 6)
    rig.sender.begin("k", ticket.data)
    rig.send_all("k", (3, 2), 6)
    assert rig.done().error is None


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "GREETING_TIMEOUT_S", 0.2)


def drip(sock: socket.socket, data: bytes) -> None:
    """A byte now and then, until the peer has enough of it."""
    with contextlib.suppress(OSError):
        for byte in data:
            sock.sendall(bytes([byte]))
            time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("says", ["nothing", "a byte now and then", "all but the proof"])
def test_who_does_not_prove_itself_in_time_leaves(make_rig: Any, says: str) -> None:
    rig = make_rig("tcp", source_secret=SECRET, target_secret=SECRET)
    with knock(rig) as stranger:
        if says == "a byte now and then":
            drip(stranger, hello())
        elif says == "all but the proof":
            stranger.sendall(hello())
        assert is_hung_up(stranger)
    check_open(rig)


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("says", ["nothing", "a part", "a greeting"])
def test_what_a_stranger_makes_a_worker_log_is_limited(
    make_rig: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Lines at warning and above are: see AlikeLimit."""
    caplog.set_level(logging.INFO)
    rig = make_rig("tcp")
    with knock(rig) as stranger:
        if says == "a part":
            stranger.sendall(hello()[:20])
            reset(stranger)
        elif says == "a greeting":
            stranger.sendall(hello())
            assert stranger.recv(4096), "it is accepted"
            reset(stranger)
        else:
            assert is_hung_up(stranger)
    end_s = time.monotonic() + PATIENCE_S
    while not caplog.records and time.monotonic() < end_s:
        time.sleep(0.01)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def reset(sock: socket.socket) -> None:
    """Leave without a word."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_who_has_greeted_may_be_silent_for_longer(make_rig: Any) -> None:
    rig = make_rig("tcp")
    with knock(rig) as worker:
        worker.sendall(hello())
        assert worker.recv(4096), "it is accepted"
        worker.settimeout(0.6)
        with pytest.raises(TimeoutError):
            worker.recv(1)


def test_one_address_cannot_take_all_places(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_CONNECTIONS_PER_ADDRESS", 3)
    rig = make_rig("tcp")
    host, port = rig.running.endpoints[0].address.split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(knock(rig)).sendall(hello()[:1])
        refused = stack.enter_context(knock(rig))
        assert is_hung_up(refused), "the fourth of 127.0.0.1"
        other = stack.enter_context(
            socket.create_connection((host, int(port)), PATIENCE_S, source_address=("127.0.0.2", 0))
        )
        other.sendall(hello())
        assert other.recv(4096), "another address has a place"


def test_a_stranger_costs_no_staging(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []

    def touch(num_bytes: int) -> bytearray:
        touched.append(num_bytes)
        return bytearray(num_bytes)

    monkeypatch.setattr("kv_transfer.transport.tcp_stream._touched", touch)
    rig = make_rig("tcp", source_secret=SECRET, target_secret=SECRET)
    with knock(rig) as stranger:
        stranger.sendall(hello())
        assert stranger.recv(4096), "the receiver's proof, but no memory"
        assert not touched
    check_open(rig)
    assert rig.running.receiver.max_chunk_bytes in touched


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of sockets; short, because socket paths are limited."""
    with tempfile.TemporaryDirectory(prefix="s") as short:
        monkeypatch.setenv("TMPDIR", short)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(short)


def test_the_folder_of_a_killed_worker_is_swept_at_the_next_start(folder: Path) -> None:
    code = (
        "from kv_transfer.transport.base import TransportConfig\n"
        "from kv_transfer.transport.shm import TRANSPORT; import sys, time\n"
        "listener = TRANSPORT.listen(TransportConfig())\n"
        "sys.stdout.write(listener.endpoint.address); sys.stdout.flush()\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ}) as killed:
        assert killed.stdout
        path = Path(os.read(killed.stdout.fileno(), 4096).decode())
        sweep(folder)
        assert path.exists(), "it lives"
        killed.send_signal(signal.SIGKILL)
    assert path.exists()
    listener = TRANSPORT.listen(TransportConfig())
    try:
        assert not path.parent.exists()
        assert isinstance(listener, UnixListener)
        assert Path(listener.endpoint.address).exists()
    finally:
        listener.close()
    assert not list(folder.iterdir()), "nothing is left"


@pytest.mark.parametrize("entries", [(), ("lock",), ("lock", "kv.sock")])
def test_what_a_worker_did_not_finish_removing_is_swept(
    folder: Path, entries: tuple[str, ...]
) -> None:
    left = folder / "baton-kv-left"
    left.mkdir()
    for name in entries:
        (left / name).touch()
    sweep(folder)
    assert not left.exists()


def test_a_folder_that_was_never_locked_is_swept_after_a_minute(folder: Path) -> None:
    young, old = folder / "baton-new-young", folder / "baton-new-old"
    for each in (young, old):
        each.mkdir()
        (each / "lock").touch()
    os.utime(old, (0, 0))
    sweep(folder)
    assert young.exists()
    assert not old.exists()


@pytest.mark.parametrize("name", ["baton-kv-link", "baton-new-link"])
def test_a_link_to_another_folder_is_not_followed(folder: Path, name: str) -> None:
    """Anybody could put one into a shared temporary directory."""
    others = folder / "notes"
    others.mkdir()
    for entry in ("lock", "kv.sock"):
        (others / entry).touch()
    (folder / name).symlink_to(others)
    os.utime(folder / name, (0, 0), follow_symlinks=False)
    sweep(folder)
    assert {entry.name for entry in others.iterdir()} == {"lock", "kv.sock"}


def test_what_is_no_workers_folder_is_left_alone(folder: Path) -> None:
    ours = folder / "baton-kv-notes"
    ours.mkdir()
    (ours / "kv.sock").touch()
    sweep(folder)
    assert (ours / "kv.sock").exists()
