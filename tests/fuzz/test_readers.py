"""Clients that never read; python -m tests.fuzz.readers has more of them."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.fuzz.readers import Report, stop_reading


@pytest.mark.slow
@pytest.mark.long
def test_those_who_never_read_are_ended_and_hold_nothing() -> None:
    report = asyncio.run(stop_reading(25, 25))
    assert report.is_sound, report
    assert report.ends.total() == 50


@pytest.mark.parametrize(
    ("end", "free_s", "is_sound"),
    [("reset", 5.0, True), ("reset", 30.0, False), ("whole", 5.0, False), ("silent", 5.0, False)],
)
def test_one_that_goes_on_is_enough(end: str, free_s: float, is_sound: bool) -> None:
    assert Report(Counter({"closed": 9, end: 1}), free_s, 23.0).is_sound is is_sound
