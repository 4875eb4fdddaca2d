"""What a soak calls flat, and what it counts."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.check.fault_load import StreamRecord
from baton.check.faults import KnownRequest
from baton.check.soak import (
    BOUNDS,
    Held,
    SoakCounts,
    SoakVerdict,
    process_families,
    process_usage,
    trend_of,
)
from baton.check.stream_history import StreamHistory
from baton.client import Chunk, SamplingParams
from baton.client.results import Usage
from baton.types import FinishReason

TIMES_S = [10.0 * i for i in range(400)]
RSS = "resident memory, MiB"


@given(st.sampled_from([*BOUNDS]), st.floats(0.0, 3.0), st.floats(1.0, 300.0), st.integers(0, 99))
def test_what_rises_by_more_than_its_bound_is_not_flat(
    quantity: str, share: float, level: float, seed: int
) -> None:
    """Whatever it swings by on its way."""
    rise = share * BOUNDS[quantity]
    rng = random.Random(seed)
    swing = 0.1 * BOUNDS[quantity]
    values = [level + rise * at_s / TIMES_S[-1] + rng.uniform(-swing, swing) for at_s in TIMES_S]
    trend = trend_of("decode-0", quantity, TIMES_S, values)
    assert trend.ends - trend.begins == pytest.approx(rise, abs=swing)
    if abs(share - 1) > 0.1:
        assert trend.is_flat == (share < 1)


@pytest.mark.parametrize(("rise_mib", "is_flat"), [(39.0, True), (41.0, False)])
def test_large_processes_may_rise_by_a_share_of_their_memory(
    rise_mib: float, is_flat: bool
) -> None:
    values = [2000.0 + rise_mib * (at_s / TIMES_S[-1] - 0.5) for at_s in TIMES_S]
    assert trend_of("decode-0", RSS, TIMES_S, values).is_flat is is_flat


def test_what_shrinks_is_flat() -> None:
    assert trend_of("gateway", "threads", TIMES_S, [400.0 - at_s / 10 for at_s in TIMES_S]).is_flat


def test_one_file_more_is_seen(tmp_path: Path) -> None:
    folders = [Path(f"/proc/{os.getpid()}")]
    before = process_usage(folders)
    with (tmp_path / "file").open("w"):
        after = process_usage(folders)
    assert after["file descriptors"] == before["file descriptors"] + 1
    assert after[RSS] > 10
    assert after["threads"] >= 1


def test_a_process_has_what_it_started_in_another_session() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True) as child:
        families = process_families()
        assert Path(f"/proc/{child.pid}") in families[os.getpid()]
        assert families[child.pid] == [Path(f"/proc/{child.pid}")]


def test_processes_that_are_gone_hold_nothing(tmp_path: Path) -> None:
    assert set(process_usage([tmp_path / "none"]).values()) == {0.0}


def record_of(*token_ids: int, right: tuple[int, ...] | None) -> StreamRecord[KnownRequest]:
    known = None if right is None else (right,)
    request = KnownRequest((7,), SamplingParams(max_tokens=2), known)
    history = StreamHistory(request)
    history.take(
        Chunk(0, token_ids, finish_reason=FinishReason.LENGTH, usage=Usage(1, len(token_ids)))
    )
    return StreamRecord(request, history, "", is_whole=True)


def test_streams_are_counted_by_how_they_ended() -> None:
    counts = SoakCounts()
    counts.add(record_of(1, 2, right=(1, 2)))
    counts.add(record_of(1, 2, right=None))
    cancelled = record_of(1, right=(1, 2))
    cancelled.is_whole = False
    counts.add(cancelled)
    assert (counts.num_streams, counts.num_tokens, counts.num_cancelled) == (3, 5, 1)
    assert (counts.num_wrong, counts.errors.total()) == (0, 0)
    failed = record_of(1, right=(1, 2))
    failed.is_whole, failed.error = False, "DRAINING"
    counts.add(failed)
    counts.add(record_of(1, 3, right=(1, 2)))
    assert (counts.num_cancelled, counts.num_wrong, counts.errors["DRAINING"]) == (1, 1, 1)
    assert counts.wrong


def test_each_thing_that_is_not_as_it_should_be_fails_it() -> None:
    flat = trend_of("gateway", "threads", TIMES_S, [4.0] * len(TIMES_S))
    rises = trend_of("gateway", "threads", TIMES_S, TIMES_S)
    assert SoakVerdict(1.0, SoakCounts(), (flat,), (), Held(0, 0, 0)).is_sound
    for wrong in (
        SoakVerdict(1.0, SoakCounts(), (flat, rises), (), Held(0, 0, 0)),
        SoakVerdict(1.0, SoakCounts(num_wrong=1), (flat,), (), Held(0, 0, 0)),
        SoakVerdict(1.0, SoakCounts(), (flat,), ("gateway",), Held(0, 0, 0)),
        *(
            SoakVerdict(1.0, SoakCounts(), (flat,), (), held)
            for held in (Held(1, 0, 0), Held(0, 1, 0), Held(0, 0, 1))
        ),
    ):
        assert not wrong.is_sound
