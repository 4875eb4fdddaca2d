"""Copies follow what the engine had started when their blocks were handed to the channel, and
nothing later: see KvPool.mark."""

from __future__ import annotations

from typing import Any

import pytest

from baton.types import Sample
from engine.kv.range import KvRange
from engine.kv.tensors.array import ArrayKvPool
from kv_transfer.send_connection import Finish, Send
from kv_transfer.ticket import TicketCommitted
from tests.kv_transfer.conftest import MakeRig


class Marks:
    """Put into a pool: marks are numbers of what an engine has started, and copies note the mark
    that they followed."""

    def __init__(self, pool: ArrayKvPool, monkeypatch: pytest.MonkeyPatch, copy: str) -> None:
        self.num_started = 0
        self.followed: list[object] = []
        self._last: object = "none"
        inner = getattr(pool, copy)

        def noted(*arguments: Any) -> None:
            self.followed.append(self._last)
            inner(*arguments)

        def follow(mark: object) -> None:
            self._last = mark

        monkeypatch.setattr(pool, "mark", lambda: self.num_started)
        monkeypatch.setattr(pool, "follow", follow)
        monkeypatch.setattr(pool, copy, noted)


def test_each_task_carries_the_mark_of_when_it_was_given(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tasks that wait together until the commit, while the engine goes on."""
    rig = make_rig("loopback")
    marks = Marks(rig.source, monkeypatch, "pack")
    offered = rig.offer((3, 1, 0, 7), 0, 8)
    rig.sender.begin("k", offered.data)
    for first_layer, num_started in ((0, 4), (1, 7)):
        marks.num_started = num_started
        rig.sender.submit(Send("k", (5, 2), KvRange(0, 8, first_layer, 1 + first_layer)))
    marks.num_started = 9
    rig.sender.submit(Finish("k", 8, (Sample(7),), 0.0))
    assert rig.done().error is None
    assert marks.followed == sorted(marks.followed, key=str)
    assert set(marks.followed) == {4, 7}


def test_what_arrives_follows_the_mark_of_its_ticket(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("loopback")
    monkeypatch.setattr(rig.running.tickets, "_mark", lambda: marks.num_started)
    marks = Marks(rig.target, monkeypatch, "unpack")
    marks.num_started = 3
    offered = rig.offer((3, 1, 0, 7), 0, 11)
    marks.num_started = 8
    rig.sender.begin("k", offered.data)
    rig.send_all("k", (5, 2, 9), 11)
    assert isinstance(rig.event(), TicketCommitted)
    assert set(marks.followed) == {3}
