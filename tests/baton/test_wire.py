"""What a step tells comes out of its message as it went in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.commands import Abort, HandOff, Pause, Resume, SequenceCommand
from baton.events import (
    AddressedEvent,
    Committed,
    Deferred,
    Failed,
    HandedOff,
    LocalPrefill,
    NotHandedOff,
    Offered,
    Paused,
    Preempted,
    Prefilled,
    Tokens,
)
from baton.types import (
    LATENT,
    BlockCounts,
    FinishReason,
    KvLayout,
    Sample,
    Tier,
    TierLoad,
    TokenLogprobs,
    WorkerLoad,
)
from baton.v1 import sequence_service_pb2
from baton.wire import (
    command_from_proto,
    command_to_proto,
    layout_from_proto,
    layout_to_proto,
    load_from_proto,
    load_to_proto,
    step_from_proto,
    step_to_proto,
)

IDS = st.integers(0, 2**32 - 1)
FLOATS = st.floats(-100, 0, width=32)
TOP = st.lists(st.tuples(IDS, FLOATS), max_size=3).map(tuple)
LOGPROBS = st.builds(TokenLogprobs, IDS, FLOATS, TOP)
PLAIN = st.lists(IDS.map(Sample), max_size=4)
SCORED = st.lists(st.tuples(IDS, LOGPROBS).map(Sample._make), max_size=4)
TOKENS = st.builds(
    lambda index, samples, finish, num_drafts, num_rejected, score: Tokens(
        index, samples, finish, num_drafts, max(0, num_drafts - num_rejected), score
    ),
    IDS,
    (PLAIN | SCORED).map(tuple),
    st.sampled_from(FinishReason),
    st.integers(0, 5),
    st.integers(0, 5),
    st.none() | st.floats(allow_nan=False),
)
CHANGES = st.sampled_from(
    [
        Offered(b"ticket", 3),
        LocalPrefill(0),
        Prefilled(1, 2, 3.0, 4.5, (TokenLogprobs(5, -1.0, ((6, -2.0),)),)),
        Deferred("no room"),
        Committed(1.0, 2),
        Preempted(),
        Paused(),
        HandedOff(),
        NotHandedOff("X", "why"),
        Failed("X", "why", is_retriable=True),
    ]
)


@given(
    changes=st.lists(st.tuples(IDS, CHANGES), max_size=3),
    entries=st.lists(st.tuples(IDS, TOKENS), max_size=6),
)
def test_a_step_comes_out_as_it_went_in(
    changes: list[AddressedEvent], entries: list[AddressedEvent]
) -> None:
    sent = step_to_proto([*changes, *entries]).SerializeToString()
    assert list(step_from_proto(sequence_service_pb2.ServeResponse.FromString(sent))) == [
        *changes,
        *entries,
    ]


@pytest.mark.parametrize("command", [Abort(), Pause(), HandOff(b"ticket"), Resume()])
@pytest.mark.parametrize("handle", [0, 7])
def test_a_command_comes_out_as_it_went_in(handle: int, command: SequenceCommand) -> None:
    data = command_to_proto(handle, command).SerializeToString()
    message = sequence_service_pb2.ServeRequest.FromString(data)
    assert command_from_proto(message) == (handle, command)


def test_a_layout_says_its_parts_where_they_are_not_keys_and_values() -> None:
    plain = KvLayout("m", 3, 2, 4, "float32", 16)
    latent = KvLayout("m", 3, 1, 24, "float32", 16, LATENT)
    assert not layout_to_proto(plain).parts  # the same bytes as 0.1.0's
    assert layout_to_proto(latent).parts == ["latent"]
    assert [layout_from_proto(layout_to_proto(each)) for each in (plain, latent)] == [plain, latent]
    assert latent.token_bytes == 3 * 24 * 4
    assert latent.difference(plain) == ("parts", "('latent',)", "('key', 'value')")


COUNTS = st.builds(BlockCounts, IDS, IDS, IDS)
LOADS = st.builds(
    WorkerLoad,
    num_running=IDS,
    blocks=COUNTS,
    window_slots=COUNTS,
    is_draining=st.booleans(),
    role=st.none() | st.sampled_from([Tier.PREFILL, Tier.DECODE]),
    kv_tiers=st.lists(
        st.builds(
            TierLoad,
            name=st.sampled_from(["host", "disk", "store"]),
            off_reason=st.text(),
            pays=st.booleans(),
            num_bytes=IDS,
            num_hits=IDS,
            num_misses=IDS,
            num_evictions=IDS,
            saved_ms=st.floats(0, 1e9),
            lost_ms=st.floats(0, 1e9),
        )
    ).map(tuple),
)


@given(LOADS)
def test_a_load_comes_out_as_it_went_in(load: WorkerLoad) -> None:
    assert load_from_proto(load_to_proto(load)) == load
