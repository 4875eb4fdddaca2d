"""Links report a peer that has closed, and one that is silent; services' messages arrive whole."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.ranks import link as module
from engine.ranks.link import FIRST_SERVICE_KIND, Link


@pytest.fixture
def ends() -> queue.SimpleQueue[str]:
    return queue.SimpleQueue()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(module, "SILENCE_S", 0.5)


def link_over(connection: socket.socket, name: str, ends: queue.SimpleQueue[str]) -> Link:
    return Link(
        connection,
        name,
        lambda: ends.put(f"{name} closed"),
        lambda seconds: ends.put(f"{name} silent for {seconds}"),
    )


@pytest.fixture
def pair(ends: queue.SimpleQueue[str]) -> Iterator[tuple[Link, Link]]:
    one, other = (
        link_over(connection, name, ends)
        for connection, name in zip(socket.socketpair(), "ab", strict=True)
    )
    yield one, other
    one.close()
    other.close()


def test_a_peer_that_closes_is_reported_to_the_other_alone(
    pair: tuple[Link, Link], ends: queue.SimpleQueue[str]
) -> None:
    one, other = pair
    one.start()
    other.start()
    one.close()
    assert ends.get() == "b closed"
    other.close()
    assert ends.empty()


def test_a_peer_may_begin_late(ends: queue.SimpleQueue[str]) -> None:
    """Its process imports torch first, and reads nothing meanwhile: the link must not fill."""
    connection, its_connection = socket.socketpair()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    one, other = link_over(connection, "a", ends), link_over(its_connection, "b", ends)
    one.start()
    with pytest.raises(queue.Empty):
        ends.get(timeout=1.0)
    other.start()
    other.send(module.LOADED)
    with pytest.raises(queue.Empty):
        ends.get(timeout=0.1)
    one.close()
    other.close()


def test_silence_is_short_once_the_peer_has_loaded(ends: queue.SimpleQueue[str]) -> None:
    ours, theirs = socket.socketpair()
    link = link_over(ours, "a", ends)
    link.start()
    theirs.sendall(bytes((module.HEARTBEAT, 0, 0, 0, 0)))
    with pytest.raises(queue.Empty):
        ends.get(timeout=0.8)
    theirs.sendall(bytes((module.LOADED, 0, 0, 0, 0)))
    assert ends.get() == "a silent for 0.5"
    link.close()
    theirs.close()


def test_both_sides_end_loading_at_once(
    pair: tuple[Link, Link], ends: queue.SimpleQueue[str]
) -> None:
    """The one that does so counts from there on, however long the other has been silent."""
    one, other = pair
    one.start()
    other.start()
    other.send(FIRST_SERVICE_KIND)
    one.end_loading()
    with pytest.raises(queue.Empty):
        ends.get(timeout=0.8)
    assert one._loaded_s is not None
    assert other._loaded_s is not None


def test_a_peer_that_freezes_while_it_loads_is_silent_later(
    ends: queue.SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOADING_SILENCE_S", 0.3)
    ours, theirs = socket.socketpair()
    link = link_over(ours, "a", ends)
    link.start()
    theirs.sendall(bytes((module.HEARTBEAT, 0, 0, 0, 0)))
    assert ends.get() == "a silent for 0.3"
    link.close()
    theirs.close()


def test_a_peer_that_never_begins_is_silent_later(
    ends: queue.SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_MESSAGE_S", 0.3)
    ours, theirs = socket.socketpair()
    link = link_over(ours, "a", ends)
    link.start()
    assert ends.get() == "a silent for 0.3"
    link.close()
    theirs.close()


def test_a_peer_that_never_begins_has_one_deadline(
    ends: queue.SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process runs, and may be stuck."""
    monkeypatch.setattr(module, "FIRST_MESSAGE_S", 0.3)
    ours, theirs = socket.socketpair()
    link = Link(ours, "a", lambda: None, lambda seconds: ends.put(f"{seconds}"), lambda: True)
    link.start()
    assert ends.get(timeout=10) == "0.3"
    link.close()
    theirs.close()


def test_a_message_that_does_not_end_is_silence_too(ends: queue.SimpleQueue[str]) -> None:
    ours, theirs = socket.socketpair()
    link = link_over(ours, "a", ends)
    link.start()
    theirs.sendall(bytes((module.HEARTBEAT, 9, 0, 0, 0)))
    assert ends.get() == "a silent for 0.5"
    link.close()
    theirs.close()


def test_a_peer_that_is_seen_to_run_may_be_held_up(ends: queue.SimpleQueue[str]) -> None:
    """It gets no turn on a busy machine; once it is frozen, it is silent."""
    ours, theirs = socket.socketpair()
    runs = threading.Event()
    runs.set()
    link = Link(ours, "a", lambda: None, lambda seconds: ends.put(f"{seconds}"), runs.is_set)
    link.start()
    theirs.sendall(bytes((module.LOADED, 0, 0, 0, 0)))
    with pytest.raises(queue.Empty):
        ends.get(timeout=2 * module.SILENCE_S)
    runs.clear()
    assert ends.get() == f"{module.SILENCE_S}"
    link.close()
    theirs.close()


def test_a_peer_that_is_seen_to_run_is_not_waited_for_without_end(
    ends: queue.SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HELD_UP", 3)
    ours, theirs = socket.socketpair()
    link = Link(ours, "a", lambda: None, lambda seconds: ends.put(f"{seconds}"), lambda: True)
    link.start()
    theirs.sendall(bytes((module.LOADED, 0, 0, 0, 0)))
    assert ends.get() == f"{3 * module.SILENCE_S}"
    link.close()
    theirs.close()


def test_what_comes_is_handled_while_a_message_cannot_go_out(
    ends: queue.SimpleQueue[str],
) -> None:
    """No heartbeat waits for the thread that sends it: the peer's might wait in the same way."""
    ours, theirs = socket.socketpair()
    got: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    link = Link(ours, "a", lambda: None, lambda seconds: ends.put(f"{seconds}"), lambda: True)
    link.handle(FIRST_SERVICE_KIND, got.put)
    link.start()
    theirs.sendall(bytes((module.LOADED, 0, 0, 0, 0)))
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(link.send, FIRST_SERVICE_KIND, bytes(10_000_000))
        for number in range(10):
            # Room comes and goes.
            theirs.recv(100_000)
            threading.Event().wait(2 * module.HEARTBEAT_S)
            theirs.sendall(bytes((FIRST_SERVICE_KIND, 1, 0, 0, 0, number)))
            assert got.get(timeout=module.SILENCE_S) == bytes((number,))
        assert not sending.done()
        theirs.close()
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            sending.result()
    assert ends.empty()
    link.close()


def test_no_heartbeat_waits_for_room(ends: queue.SimpleQueue[str]) -> None:
    """The peer is held up and reads nothing; what it has sent is handled."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    got: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    link = Link(ours, "a", lambda: None, lambda seconds: ends.put(f"{seconds}"), lambda: True)
    link.handle(FIRST_SERVICE_KIND, got.put)
    link.start()
    theirs.sendall(bytes((module.LOADED, 0, 0, 0, 0)))
    threading.Event().wait(20 * module.HEARTBEAT_S)  # more beats than fit
    theirs.sendall(bytes((FIRST_SERVICE_KIND, 1, 0, 0, 0, 7)))
    assert got.get(timeout=module.SILENCE_S) == b"\7"
    link.close()
    theirs.close()


def test_a_message_may_be_held_up(ends: queue.SimpleQueue[str]) -> None:
    ours, theirs = socket.socketpair()
    got: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    link = Link(ours, "a", lambda: None, lambda seconds: ends.put(f"{seconds}"), lambda: True)
    link.handle(FIRST_SERVICE_KIND, got.put)
    link.start()
    theirs.sendall(bytes((FIRST_SERVICE_KIND, 1, 0, 0, 0)))
    with pytest.raises(queue.Empty):
        ends.get(timeout=2 * module.SILENCE_S)
    theirs.sendall(b"x")
    assert got.get(timeout=10) == b"x"
    link.close()
    theirs.close()


def test_what_announces_more_than_a_message_ends_the_link(
    ends: queue.SimpleQueue[str], caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = socket.socketpair()
    link = link_over(ours, "a", ends)
    link.start()
    theirs.sendall(bytes((FIRST_SERVICE_KIND, 1, 0, 0, 4)))
    assert ends.get() == "a closed"
    assert "a message of 67108865 bytes, of at most 67108864" in caplog.text
    with pytest.raises(ValueError, match="of at most 67108864"):
        link.send(FIRST_SERVICE_KIND, bytes(module.MAX_PAYLOAD_BYTES + 1))
    link.close()
    theirs.close()


def test_a_handler_that_fails_ends_the_link(
    pair: tuple[Link, Link], ends: queue.SimpleQueue[str], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = pair
    other.handle(FIRST_SERVICE_KIND, lambda payload: [][payload[0]])
    one.start()
    other.start()
    one.send(FIRST_SERVICE_KIND, b"x")
    assert ends.get() == "b closed"
    assert "IndexError" in caplog.text


def test_a_message_that_was_sent_in_part_ends_the_link(ends: queue.SimpleQueue[str]) -> None:
    ours, theirs = socket.socketpair()
    link = link_over(ours, "a", ends)
    link.start()
    with pytest.raises(TimeoutError):
        link.send(FIRST_SERVICE_KIND, bytes(10_000_000))
    assert ends.get(timeout=10) in ("a closed", "a silent")
    with pytest.raises(BrokenPipeError):
        link.send(FIRST_SERVICE_KIND)
    link.close()
    theirs.close()


def test_peers_that_beat_stay_together(
    pair: tuple[Link, Link], ends: queue.SimpleQueue[str]
) -> None:
    for link in pair:
        link.start()
    with pytest.raises(queue.Empty):
        ends.get(timeout=1.0)


@settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=200_000)), max_size=8))
def test_messages_reach_the_handler_of_their_kind_in_order(
    messages: list[tuple[int, bytes]],
) -> None:
    got: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    ours, theirs = socket.socketpair()
    unused: queue.SimpleQueue[str] = queue.SimpleQueue()
    one, other = link_over(ours, "a", unused), link_over(theirs, "b", unused)
    for kind in range(3):

        def put(payload: bytes, kind: int = kind) -> None:
            got.put((kind, payload))

        other.handle(FIRST_SERVICE_KIND + kind, put)
    other.start()
    for kind, payload in messages:
        one.send(FIRST_SERVICE_KIND + kind, payload)
    handled = [message for message in messages if message[0] < 3]
    assert [got.get() for _ in handled] == handled
    one.close()
    other.close()
