"""The handoff, in every order of what threads and networks may do, within small bounds.

python -m tests.sim.explore_handoffs explores larger ones; docs/reliability.md has what it found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.kv.groups.state import STATE
from engine.oracle import OracleLayers
from kv_transfer.send_connection import SendConnection
from kv_transfer.ticket import (
    Commit,
    Coverage,
    Rejection,
    Ticket,
    TicketAborted,
    TicketCommitted,
    TicketState,
)
from kv_transfer.ticket_table import TicketTable
from tests.support.handoff_world import Bounds, explore_handoffs
from worker_core.admission import Admission
from worker_core.sequence import WorkerSequence

STATES = OracleLayers(has_states=True)
ONE = Bounds(num_requests=1, decode_blocks=6)


@pytest.mark.slow
def test_one_request_undisturbed() -> None:
    found = explore_handoffs(ONE)
    assert not found.failure, found.trace
    assert found.is_whole
    assert found.num_ends == 1, "whatever the order, there is one end"
    assert found.num_states > 100


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param(Bounds(1, 6, num_cancels=1), id="cancel"),
        pytest.param(Bounds(1, 6, faults=("kill decode",), num_faults=1), id="kill-decode"),
        pytest.param(Bounds(1, 6, faults=("break",), num_faults=1), id="break"),
        pytest.param(Bounds(1, 6, num_cancels=1, layers=STATES), id="states-cancel"),
    ],
)
def test_a_part_of_what_disturbs_one_request(bounds: Bounds) -> None:
    """All of it takes longer than this suite may."""
    found = explore_handoffs(bounds, max_states=60)
    assert not found.failure, found.trace


Mutate = Callable[[pytest.MonkeyPatch], None]


def no_coverage_check(patch: pytest.MonkeyPatch) -> None:
    """No check of the sum of all chunks' checksums, either, because a lost chunk would show in it,
    too."""

    def commit(self: Ticket, commit: Commit) -> TicketCommitted:
        self.state = TicketState.COMMITTED
        return TicketCommitted(self.ticket_id, commit.num_tokens, commit.first_tokens, 0.0, 0)

    patch.setattr(Ticket, "commit", commit)


def no_states_are_awaited(patch: pytest.MonkeyPatch) -> None:
    """The sum of checksums is not compared, either."""
    whole_start, commit = Coverage.whole_start, Ticket.commit

    def without_states(self: Coverage, first_token: int, end_token: int) -> int | None:
        self._runs[STATE] = []
        return whole_start(self, first_token, end_token)

    def as_said(self: Ticket, said: Commit) -> TicketCommitted | str:
        return commit(self, replace(said, checksum=self.checksum))

    patch.setattr(Coverage, "whole_start", without_states)
    patch.setattr(Ticket, "commit", as_said)


def any_ticket_will_do(patch: pytest.MonkeyPatch) -> None:
    """A frame's ticket is not looked at: it is about whichever is open."""

    def addressed(self: TicketTable, *_: int) -> Any:
        ticket = next(self._open(), None)
        return ticket or Rejection("HANDOFF_FAILED", "none")

    patch.setattr(TicketTable, "_addressed", addressed)


def abort_waits_for_no_writer(patch: pytest.MonkeyPatch) -> None:
    def abort(self: Ticket, reason: str, message: str) -> Any:
        self.state = TicketState.ABORTED
        self.aborted = TicketAborted(self.ticket_id, reason, message)
        return self.aborted

    patch.setattr(Ticket, "abort", abort)
    patch.setattr(Ticket, "is_settled", property(lambda self: not self.is_open))


def blocks_are_freed_while_they_are_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerSequence, "is_busy", property(lambda self: self.ticket_id is not None))


def a_ticket_is_used_twice(patch: pytest.MonkeyPatch) -> None:
    def present(self: Ticket, connection: int, on_aborted: Any, now_s: float) -> None:
        self.state, self.connection, self.on_aborted = TicketState.RESERVED, connection, on_aborted
        self.reserved_s = self.receiving_s = now_s
        self.renew(now_s)

    patch.setattr(Ticket, "present", present)


def an_aborted_ticket_keeps_its_blocks(patch: pytest.MonkeyPatch) -> None:
    def on_aborted(self: Admission, aborted: Any) -> None:
        self._release_ticket(aborted.ticket_id)

    patch.setattr(Admission, "on_aborted", on_aborted)


def a_lost_connection_ends_no_handoff(patch: pytest.MonkeyPatch) -> None:
    def end_all(self: SendConnection, _error: Any) -> None:
        self._session = None
        self._forget_tasks()

    patch.setattr(SendConnection, "_end_all", end_all)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    ("mutate", "bounds"),
    [
        (no_coverage_check, Bounds(1, 6, faults=("lose",), num_faults=1)),
        (no_states_are_awaited, Bounds(1, 6, faults=("lose",), num_faults=1, layers=STATES)),
        (any_ticket_will_do, Bounds(2, 6, prefill_blocks=2)),
        (abort_waits_for_no_writer, Bounds(1, 6, num_cancels=1)),
        (blocks_are_freed_while_they_are_sent, Bounds(1, 6, num_cancels=1)),
        (a_ticket_is_used_twice, Bounds(1, 6, faults=("replay",), num_faults=1)),
        (an_aborted_ticket_keeps_its_blocks, Bounds(1, 6, num_cancels=1)),
        (a_lost_connection_ends_no_handoff, Bounds(1, 6, faults=("break",), num_faults=1)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_seeded_fault_is_found(
    mutate: Mutate, bounds: Bounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    found = explore_handoffs(bounds, max_states=1000)
    assert found.failure, f"not found in {found.num_states} states"
