"""Ranks of different hosts hear of each other. Hosts are addresses of the loopback interface."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from engine.ranks import link as link_module
from engine.ranks import peers as module
from engine.ranks.peers import Peers, link_to

HOSTS = {1: "127.0.0.1", 2: "127.0.0.1", 3: "127.0.0.2", 4: "127.0.0.3"}
Silences = queue.SimpleQueue[tuple[int, int]]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(link_module, "SILENCE_S", 1.0)
    monkeypatch.setattr(link_module, "FIRST_MESSAGE_S", 1.0)


@pytest.fixture
def silences() -> Silences:
    return queue.SimpleQueue()


def linked(silences: Silences, store: HashStore, rank: int) -> Peers:
    def on_silent(peer: int, _: float) -> None:
        silences.put((rank, peer))

    return link_to(store, rank, HOSTS[rank], set(HOSTS) - {rank}, on_silent)


@pytest.fixture
def linked_ranks(silences: Silences) -> Iterator[dict[int, Peers]]:
    with ThreadPoolExecutor() as threads, ExitStack() as stack:
        all_of_them = threads.map(partial(linked, silences, HashStore()), HOSTS)
        made = dict(zip(HOSTS, all_of_them, strict=True))
        for each in made.values():
            stack.callback(each.close)
        yield made


@pytest.mark.slow
def test_only_ranks_of_other_hosts_are_linked(
    linked_ranks: dict[int, Peers], silences: Silences
) -> None:
    found = {rank: len(peers.links) for rank, peers in linked_ranks.items()}
    assert found == {1: 2, 2: 2, 3: 3, 4: 3}
    with pytest.raises(queue.Empty):
        silences.get(timeout=1.5)


@pytest.mark.slow
def test_peers_say_of_each_other_that_they_run(linked_ranks: dict[int, Peers]) -> None:
    """Until the process that sends a rank's pulses has ended."""

    def running(rank: int) -> list[bool]:
        return [link._is_running() for link in linked_ranks[rank].links]

    until(lambda: all(all(running(rank)) for rank in HOSTS))
    sender = linked_ranks[4].pulse
    assert sender is not None
    sender.kill()
    # Links to ranks of other hosts, in the order of HOSTS: rank 4 is the last of each.
    until(lambda: all(running(rank) == [*[True] * (2 - (rank < 3)), False] for rank in (1, 2, 3)))


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s
        threading.Event().wait(0.05)


def test_a_rank_that_cannot_be_reached_is_named_and_strangers_are_dropped(
    silences: Silences,
) -> None:
    """Rank 3 connects, and is silent from then on."""
    store = HashStore()
    with ThreadPoolExecutor() as threads, socket.create_server((HOSTS[3], 0)) as own:
        on_silent = partial(lambda rank, peer, _: silences.put((rank, peer)), 1)
        linking = threads.submit(link_to, store, 1, HOSTS[1], [3], on_silent)
        address = module._Address.decode(store.get("1").decode())
        stranger = socket.create_connection((address.host, address.port))
        stranger.sendall(b'{"token": "\xc3\xa9", "rank": "3"}\n')
        store.set("3", module._Address(HOSTS[3], own.getsockname()[1], "-").encode())
        with (
            stranger,
            module._connect(address, 3, "link"),
            module._connect(address, 3, "pulse"),
            closing(linking.result()),
        ):
            assert silences.get() == (1, 3)


def test_strangers_do_not_prolong_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 never connects; others do, before each deadline of a connection."""
    monkeypatch.setattr(module, "_JOIN_S", 0.3)
    store, over = HashStore(), threading.Event()
    store.set("3", module._Address(HOSTS[3], 1, "-").encode())

    def knock() -> None:
        address = module._Address.decode(store.get("1").decode())
        while not over.wait(0.05):
            with suppress(OSError), socket.create_connection((address.host, address.port), 1.0):
                pass

    with ThreadPoolExecutor() as threads:
        threads.submit(knock)
        try:
            with pytest.raises(TimeoutError, match=r"of ranks \[3\], \[\] are there|timed out"):
                threads.submit(link_to, store, 1, HOSTS[1], [3], lambda *_: None).result(60)
        finally:
            over.set()
