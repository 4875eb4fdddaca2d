"""A record proves whose KV it has, or is not opened."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kv.layout import groups_of
from engine.kv.prefix_index import BlockIdentity
from engine.kv.tiers.record import BadRecord, RecordFormat, record_key
from engine.oracle import OracleEngine
from tests.engine.kv.tiers.conftest import IDENTITY
from tests.support.kv_tiers import ORACLE, record_format


def sealed(form: RecordFormat, engine: OracleEngine, block_id: int = 3) -> bytearray:
    record = form.pack(engine.kv, block_id, IDENTITY, is_whole=True)
    form.seal(record, IDENTITY, is_whole=True)
    return bytearray(record)


def test_a_block_comes_back_as_it_was(engine: OracleEngine) -> None:
    form, data = record_format(engine), engine.kv.data  # type: ignore[union-attr]
    payload = form.open(sealed(form, engine), IDENTITY, needs_whole=True)
    others = np.delete(data.copy(), 5, axis=0)
    form.unpack(engine.kv, 5, payload, is_whole=True)
    np.testing.assert_array_equal(data[5], data[3])
    np.testing.assert_array_equal(np.delete(data, 5, axis=0), others)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (IDENTITY._replace(key=b"K" * 32), "its key"),
        (IDENTITY._replace(parent=b"P" * 32), "follows another prefix"),
        (IDENTITY._replace(tenant=b"u" * 16), "its owner"),
        (IDENTITY._replace(tenant=b"t" * 15), "its owner"),
        (IDENTITY._replace(tokens=np.array([0, 1, 2, 4], np.uint32).tobytes()), "its tokens"),
    ],
)
def test_a_record_of_another_block_is_refused_though_all_else_is_equal(
    engine: OracleEngine, wanted: BlockIdentity, why: str
) -> None:
    form = record_format(engine)
    with pytest.raises(BadRecord, match=why):
        form.open(sealed(form, engine), wanted, needs_whole=True)


@pytest.mark.parametrize(
    "other",
    ["fingerprint", "dtype", "layers", "numerics", "secret", "shared"],
)
def test_records_of_another_model_layout_class_or_secret_are_refused(
    engine: OracleEngine, other: str
) -> None:
    layout = engine.spec.layout
    changed = {
        "fingerprint": replace(layout, fingerprint="another"),
        "dtype": replace(layout, dtype="float32", head_dim=4),
        "layers": replace(layout, num_layers=2, num_kv_heads=2),
    }
    theirs = RecordFormat(
        groups_of(changed.get(other, layout)),
        replace(ORACLE, level="avx2") if other == "numerics" else ORACLE,
        b"s" * 32 if other == "secret" else bytes(32),
        is_shared=other == "shared",
    )
    ours = record_format(engine)
    assert theirs.max_bytes == ours.max_bytes
    record = sealed(ours, engine)
    with pytest.raises(BadRecord, match="model, layout, numerics class or secret"):
        theirs.open(record, IDENTITY, needs_whole=True)
    assert ours.key_of(record[: ours.head_bytes]) == record_key(IDENTITY, is_whole=True)
    assert theirs.key_of(record[: theirs.head_bytes]) is None


@pytest.mark.parametrize("is_shared", [False, True])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 1 << 16), bit=st.integers(0, 7))
def test_any_changed_bit_is_noticed(
    engine: OracleEngine, place: int, bit: int, is_shared: bool
) -> None:
    form = record_format(engine, is_shared=is_shared)
    record = sealed(form, engine)
    record[place % len(record)] ^= 1 << bit
    with pytest.raises(BadRecord):
        form.open(record, IDENTITY, needs_whole=True)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_bytes=st.integers(0, 1 << 16))
def test_a_truncated_record_is_noticed(engine: OracleEngine, num_bytes: int) -> None:
    form = record_format(engine)
    record = sealed(form, engine)
    with pytest.raises(BadRecord):
        form.open(record[: num_bytes % len(record)], IDENTITY, needs_whole=True)


def test_a_record_that_somebody_without_the_secret_wrote_is_refused(engine: OracleEngine) -> None:
    """All that a reader can see is copied from a right one; only the seal cannot be made."""
    form = record_format(engine, secret=b"a" * 32, is_shared=True)
    right = sealed(form, engine, block_id=3)
    forged = record_format(engine, secret=b"b" * 32, is_shared=True)
    wrong = sealed(forged, engine, block_id=4)
    wrong[: form.head_bytes] = right[: form.head_bytes]
    with pytest.raises(BadRecord, match="its KV is damaged"):
        form.open(wrong, IDENTITY, needs_whole=True)
