"""A way that does not work is left for the next best, and the log says which one KV takes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import HandoffFailed
from baton.types import Sample
from engine.kv.range import KvRange
from kv_transfer.send_connection import Finish, Send
from kv_transfer.ticket import Endpoint, TicketCommitted, local_host_id
from kv_transfer.transport.connector import SHUN_S, Shunned, make_connector
from tests.kv_transfer.conftest import MakeRig, Rig

needs_boot_id = pytest.mark.skipif(not local_host_id(), reason="shm needs the kernel's boot id")


def shm_at(path: Path) -> Endpoint:
    return Endpoint("shm", str(path), local_host_id())


@pytest.fixture
def deaf(tmp_path: Path) -> Iterator[Endpoint]:
    """A Unix socket that takes connections and hangs up at once: a worker that has no memory to
    share, say."""
    path = tmp_path / "kv.sock"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    sock.listen()

    def hang_up() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock.accept()[0].close()

    thread = threading.Thread(target=hang_up)
    thread.start()
    yield shm_at(path)
    sock.shutdown(socket.SHUT_RDWR)
    thread.join()
    sock.close()


def rig_with(make_rig: MakeRig, first: Endpoint) -> Rig:
    """A receiver over tcp, and a sender that also knows `first`."""
    connect = make_connector(clock=lambda: 0.0)
    return make_rig(
        "tcp", tap=lambda _: lambda offered, timeout_s: connect((first, *offered), timeout_s)
    )


def hand_over(rig: Rig, key: str) -> HandoffFailed | None:
    offered = rig.offer((1, 2, 3), 0, 8)
    rig.sender.begin(key, offered.data)
    rig.sender.submit(Send(key, (4, 5), KvRange(0, 8, 0, 3)))
    rig.sender.submit(Finish(key, 8, (Sample(1),), time.monotonic()))
    error = rig.done().error
    assert error is None or isinstance(error, HandoffFailed)
    return error


@needs_boot_id
def test_where_nobody_listens_the_next_way_is_taken_within_the_handoff(make_rig, tmp_path, caplog):
    path = tmp_path / "left-behind.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))
    rig = rig_with(make_rig, shm_at(path))
    assert hand_over(rig, "k") is None
    assert isinstance(rig.event(), TicketCommitted)
    (record,) = (r for r in caplog.records if "KV goes over" in r.getMessage())
    assert record.levelname == "WARNING"
    assert "over tcp to" in record.getMessage()
    assert str(path) in record.getMessage()


@needs_boot_id
def test_a_socket_that_this_process_cannot_see_is_not_tried(make_rig, tmp_path, caplog):
    rig = rig_with(make_rig, shm_at(tmp_path / "in-another-mount-namespace.sock"))
    with caplog.at_level("INFO", "baton.kv"):
        assert hand_over(rig, "k") is None
    (record,) = (r for r in caplog.records if "KV goes over" in r.getMessage())
    assert "over tcp to" in record.getMessage()
    assert "not over shm to" in record.getMessage()
    assert "its socket is not seen from here" in record.getMessage()


@needs_boot_id
def test_the_reason_for_another_way_than_the_best_is_logged(make_rig, tmp_path, caplog):
    """A sender with KV in host memory, and an offer of GPU memory; a socket of another host."""
    path = tmp_path / "of-a-gpu.sock"
    rig = rig_with(make_rig, replace(shm_at(path), transport="cuda_ipc"))
    with caplog.at_level("INFO", "baton.kv"):
        assert hand_over(rig, "k") is None
    assert "this worker has no cuda_ipc" in caplog.text


@needs_boot_id
def test_who_hangs_up_before_the_answer_is_tried_last(make_rig, deaf, caplog):
    rig = rig_with(make_rig, deaf)
    assert hand_over(rig, "first") is not None
    assert f"shm to {deaf.address} got no answer" in caplog.text
    assert hand_over(rig, "second") is None


def test_an_endpoint_is_shunned_for_a_time():
    now = [0.0]
    shunned, endpoint = Shunned(lambda: now[0]), Endpoint("tcp", "h:1")
    shunned.add(endpoint)
    now[0] = SHUN_S - 1
    assert shunned.has(endpoint)
    now[0] = SHUN_S
    assert not shunned.has(endpoint)


def test_a_pinned_way_is_taken_even_if_it_gave_no_answer(make_rig):
    rig = make_rig("tcp")
    connect = make_connector("tcp")
    for _ in range(2):
        connection = connect(rig.running.endpoints, 5.0)
        connection.close()
