"""What a slow stream missed travels in few messages, and each sequence's events stay in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.events import AddressedEvent, Committed, Paused, Preempted, Tokens
from baton.types import Sample
from baton.wire import step_from_proto, step_to_proto
from decode_svc.outbox import in_messages

EVENTS = st.sampled_from(
    [Committed(1.0, 2), Paused(), Preempted(), *(Tokens(i, (Sample(i),)) for i in range(3))]
)


@given(st.lists(st.tuples(st.integers(1, 3), EVENTS), max_size=20))
def test_each_sequence_s_events_stay_in_order(events: list[AddressedEvent]) -> None:
    messages = [step_to_proto(message) for message in in_messages(events)]
    heard = [addressed for message in messages for addressed in step_from_proto(message)]
    for handle in range(1, 4):
        assert [e for h, e in heard if h == handle] == [e for h, e in events if h == handle]


def test_steps_of_running_sequences_travel_together() -> None:
    steps = [(handle, Tokens(step, (Sample(1),))) for step in range(5) for handle in range(8)]
    joined: list[AddressedEvent] = [(9, Committed(1.0, 2)), *steps, (7, Paused())]
    assert [len(message) for message in in_messages(joined)] == [41, 1]
    assert list(in_messages([])) == []
