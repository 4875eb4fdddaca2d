"""A decode worker that is told to go hands its live sequences over: nobody waits for it, and
nothing is computed anew."""

from __future__ import annotations

import pytest

from bench.drain import drain, options_of
from tests.support.live_tiers import BOX_MODEL

pytestmark = pytest.mark.slow


async def test_sequences_of_a_worker_that_drains_go_on_elsewhere_with_their_kv() -> None:
    result = await drain(options_of("oracle", str(BOX_MODEL)), num_streams=60, num_tokens=100)
    assert result.num_moved_at >= 20
    assert result.num_equal == result.num_streams
    assert result.num_resumed == 0
