"""Rank 0 notices a rank that ends at any time. Here the other ranks are connections alone."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from baton.errors import StartupError
from baton.types import KvLayout
from engine.interface import Batch
from engine.kv.tensors.ranks import pool_sizes
from engine.ranks.exchange import ExchangeFailed
from engine.ranks.mesh import Degrees
from engine.ranks.parts import rank_parts
from engine.ranks.rank_spec import RankSpec
from engine.ranks.team import RankProcess, RankTeam
from tests.support.rank_specs import rank_spec

DEGREES = Degrees(2)
LAYOUT = KvLayout("", 1, 2, 4, "float32", 8)
POOLS = pool_sizes(LAYOUT, 2, 0, rank_parts(LAYOUT, DEGREES))


class Rank:
    """The other end of a rank's connections, which has loaded."""

    def __init__(self) -> None:
        ours, self.control = socket.socketpair()
        our_link, self.link = socket.socketpair()
        self.process = RankProcess("rank 1", ours, our_link, lambda: "ended", lambda: None)
        self.control.sendall(b'{"digest": "one"}\n')

    def end(self) -> None:
        self.control.close()
        self.link.close()


@pytest.fixture
def losses() -> queue.SimpleQueue[str]:
    return queue.SimpleQueue()


@pytest.fixture
def made(losses: queue.SimpleQueue[str]) -> Iterator[tuple[RankTeam, Rank]]:
    rank = Rank()

    def start(_: RankSpec) -> RankProcess:
        return rank.process

    team = RankTeam(rank_spec(DEGREES, "shm", pools=POOLS), start=start, on_loss=losses.put)
    yield team, rank
    rank.end()
    team.close()


def test_a_rank_that_ends_while_others_load_is_told_of(
    made: tuple[RankTeam, Rank], losses: queue.SimpleQueue[str]
) -> None:
    team, rank = made
    rank.end()
    for thread in threading.enumerate():
        if thread.name == "link-rank 1":
            thread.join()
    with pytest.raises(StartupError, match="rank 1 ended while others loaded"):
        team.wait_ready("one")
    assert losses.empty()


def test_a_rank_that_takes_no_command_is_named(
    made: tuple[RankTeam, Rank], losses: queue.SimpleQueue[str]
) -> None:
    team, rank = made
    team.wait_ready("one")
    rank.end()
    with pytest.raises(ExchangeFailed), team.step(Batch(()), (), syncs_layers=False):
        pass
    assert losses.get() == "rank 1 ended"
    assert losses.empty()
