"""Reported figures of handoffs are those that were measured."""

from __future__ import annotations

import pytest

from baton.client import Timing
from bench.exposed import handoffs_of, table_of


def test_a_row_has_its_medians_and_extremes() -> None:
    timings = [
        Timing(transfer_exposed_ms=exposed, prefill_ms=100.0, transfer_bytes=2_000_000)
        for exposed in (3.0, 1.0, 0.5)
    ]
    row = table_of([handoffs_of(600, timings)]).splitlines()[-1]
    assert row == "| 600 | 2.0 MB | 1.00 ms (0.50, 3.00) | 100 ms | 1.00% (3.00%) |"


def test_what_was_not_handed_off_is_not_measured() -> None:
    with pytest.raises(ValueError, match="computed where it was decoded"):
        handoffs_of(600, [Timing(transfer_bytes=1), Timing()])
