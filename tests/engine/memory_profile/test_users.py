"""KV of a number of users, on an engine without a model."""

from __future__ import annotations

from itertools import pairwise

import pytest

from baton.errors import ConfigError
from engine.memory_profile.recorder import ResidentRecorder
from engine.memory_profile.users import UserLoad, UserRun, record_users
from engine.oracle import OracleEngine, OracleOptions


def run(num_users: int, num_blocks: int = 64) -> UserRun:
    engine = OracleEngine(OracleOptions(num_blocks, block_size=4))
    return record_users(engine, UserLoad(num_users, 10, 6, 8), ResidentRecorder())


def test_one_user_takes_its_blocks_as_it_grows() -> None:
    kv = run(1).kv
    # A prompt of ten in chunks of eight, then a token a step.
    assert [point.num_tokens for point in kv] == [8, 10, 11, 12, 13, 14, 15, 0]
    assert [point.leased_tokens for point in kv] == [8, 12, 12, 12, 16, 16, 16, 0]


def test_more_users_hold_more_and_wait_where_there_is_no_room() -> None:
    peaks = [max(point.leased_tokens for point in run(n).kv) for n in (1, 3, 8)]
    assert all(few < many for few, many in pairwise(peaks))
    # Each has four blocks in the end.
    crowded = run(8, num_blocks=13)
    assert max(point.num_running for point in crowded.kv) == 3
    assert max(point.leased_tokens for point in crowded.kv) <= 12 * 4
    assert crowded.kv[-1].num_running == 1
    assert crowded.kv[-1].num_waiting == 0


def test_a_user_that_never_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"input_tokens=16.*12 tokens"):
        run(1, num_blocks=3)
