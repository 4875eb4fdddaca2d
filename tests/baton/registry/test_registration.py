"""Entries survive their JSON; whatever else stands in Redis is a ValueError."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.registry.registration import MAX_ENTRY_BYTES, Registration, from_json, to_json
from baton.types import BlockCounts, NumericsClass, Tier, WorkerIdentity, WorkerLoad
from tests.support.fake_workers import make_info

COUNTS = st.integers(0, 2**31)
INFOS = st.builds(
    lambda tier, generation, model, low, high, numerics: replace(
        make_info("w", tier),
        identity=WorkerIdentity("w", generation),
        model=model,
        min_protocol_version=low,
        max_protocol_version=high,
        numerics=numerics,
    ),
    st.sampled_from(Tier),
    st.integers(0, 2**63 - 1),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    COUNTS,
    COUNTS,
    st.builds(NumericsClass, st.sampled_from(["", "cpu"]), st.just("avx2"), st.just("float32")),
)
REGISTRATIONS = st.builds(
    Registration,
    address=st.sampled_from(["a:1", "10.0.0.1:65535", "[::1]:7", "pod-3.decode:50051"]),
    info=INFOS,
    transports=st.lists(st.sampled_from(["shm", "tcp", "nixl"])).map(tuple),
    load=st.builds(
        WorkerLoad,
        num_running=COUNTS,
        num_pending_tokens=st.integers(0, 2**63),
        blocks=st.builds(BlockCounts, COUNTS, COUNTS, COUNTS),
        is_draining=st.booleans(),
    ),
)
SOME = Registration("a:1", make_info("w", Tier.DECODE), ("tcp",), WorkerLoad())
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(registration=REGISTRATIONS)
def test_an_entry_survives_its_json(registration: Registration) -> None:
    assert from_json(to_json(registration)) == registration
    assert from_json(to_json(registration).encode()) == registration


@given(name=st.sampled_from(["address", "info", "transports", "load"]), value=JSON)
def test_an_entry_with_a_wrong_part_is_refused_or_read(name: str, value: object) -> None:
    """It never raises anything but ValueError, and never gives a part of another kind."""
    entry = json.loads(to_json(SOME)) | {name: value}
    try:
        got = from_json(json.dumps(entry))
    except ValueError:
        return
    assert isinstance(got.address, str)
    assert got.info.tier in Tier
    assert all(isinstance(transport, str) for transport in got.transports)


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff\xfe", "nonsense", "[]", "{}", "7", "[" * 5000, "9" * (MAX_ENTRY_BYTES + 1)],
)
def test_what_is_no_entry_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        from_json(text)


@pytest.mark.parametrize("address", ["", "a", ":1", "a:0", "a:70000", "a b:1", "u@h:1", "::1:5"])
def test_an_entry_without_a_usable_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="no address"):
        from_json(to_json(replace(SOME, address=address)))


def test_fields_of_later_versions_are_skipped() -> None:
    entry = json.loads(to_json(SOME))
    entry["colour"] = entry["info"]["colour"] = entry["load"]["colour"] = "blue"
    assert from_json(json.dumps(entry)) == SOME
