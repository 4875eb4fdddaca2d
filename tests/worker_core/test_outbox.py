"""What a slow stream missed travels in few messages and entries, and each sequence's events stay in
order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ClientStalled
from baton.events import AddressedEvent, Committed, Paused, SequenceEvent, Tokens, joined
from baton.types import FinishReason, Sample
from baton.wire import step_from_proto, step_to_proto
from worker_core.sequence_service import Outbox, in_messages

#: Steps of one sequence: number of tokens, 0 for a change of state; then how far the next step
#: jumps, 0 if correct.
STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0, 0, 0, 1, -1]), st.integers(0, 4)), max_size=12
)


def history(steps: Iterable[tuple[int, int, int]]) -> list[SequenceEvent]:
    """Token ids tell their indices, but for those of a jump."""
    events: list[SequenceEvent] = []
    index = 5
    for num_tokens, jump, num_drafts in steps:
        if not num_tokens:
            events.append(Committed(1.0, len(events)))
            continue
        index += jump
        samples = tuple(Sample(index + i) for i in range(num_tokens))
        events.append(
            Tokens(index, samples, num_draft_tokens=num_drafts, num_accepted_tokens=num_drafts // 2)
        )
        index += num_tokens
    return events


def flat(events: Iterable[SequenceEvent]) -> list[object]:
    """Each token with its index, and what else happened, in order."""
    told: list[object] = []
    for event in events:
        if isinstance(event, Tokens):
            told.extend(enumerate(event.samples, start=event.token_index))
        else:
            told.append(event)
    return told


def drafts(events: Iterable[SequenceEvent]) -> tuple[int, int]:
    tokens = [event for event in events if isinstance(event, Tokens)]
    return sum(t.num_draft_tokens for t in tokens), sum(t.num_accepted_tokens for t in tokens)


@given(STEPS)
def test_joined_events_tell_the_same(steps: list[tuple[int, int, int]]) -> None:
    events = history(steps)
    one = list(joined(events))
    assert flat(one) == flat(events)
    assert drafts(one) == drafts(events)
    follow = [
        isinstance(a, Tokens)
        and isinstance(b, Tokens)
        and a.token_index + len(a.samples) == b.token_index
        for a, b in itertools.pairwise(one)
    ]
    assert not any(follow)


def test_the_end_of_joined_tokens_is_that_of_the_last() -> None:
    last = Tokens(8, (Sample(3),), FinishReason.STOP, score=0.5)
    assert list(joined([Tokens(7, (Sample(2),)), last])) == [
        Tokens(7, (Sample(2), Sample(3)), FinishReason.STOP, score=0.5)
    ]


@given(st.lists(STEPS, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_each_sequence_s_events_stay_in_order(
    all_steps: list[list[tuple[int, int, int]]], order: Random
) -> None:
    histories = [history(steps) for steps in all_steps]
    events: list[AddressedEvent] = []
    places = [handle for handle, events_ in enumerate(histories) for _ in events_]
    order.shuffle(places)
    num_taken = [0] * len(histories)
    for handle in places:
        events.append((handle, histories[handle][num_taken[handle]]))
        num_taken[handle] += 1
    messages = [step_to_proto(message) for message in in_messages(events)]
    heard = [addressed for message in messages for addressed in step_from_proto(message)]
    for handle, told in enumerate(histories):
        assert flat(e for h, e in heard if h == handle) == flat(told)


def test_missed_steps_of_a_sequence_are_one_entry() -> None:
    steps = [(handle, Tokens(step, (Sample(step),))) for step in range(5) for handle in range(8)]
    events: list[AddressedEvent] = [(9, Committed(1.0, 2)), *steps, (7, Paused())]
    whole = tuple(map(Sample, range(5)))
    assert list(in_messages(events)) == [
        [(9, Committed(1.0, 2)), *((handle, Tokens(0, whole)) for handle in range(8))],
        [(7, Paused())],
    ]
    assert list(in_messages([])) == []


async def test_a_closed_outbox_gives_what_is_there_and_then_nothing() -> None:
    outbox = Outbox()
    outbox.put((1, Paused()))
    outbox.close()
    assert await outbox.take() == [(1, Paused())]
    assert await outbox.take() == []


async def test_a_gateway_that_leaves_too_much_unread_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker_core.sequence_service.MAX_NUM_EVENTS", 3)
    outbox = Outbox()
    for _ in range(3):
        outbox.put((1, Paused()))
    assert len(await outbox.take()) == 3
    for _ in range(4):
        outbox.put((1, Paused()))
    with pytest.raises(ClientStalled, match="4 events"):
        await outbox.take()
