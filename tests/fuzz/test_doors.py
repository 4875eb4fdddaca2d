"""Malformed calls at the doors of real processes, for some seconds; python -m tests.fuzz.doors goes
on for longer."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from math import inf

import pytest

from tests.fuzz.doors import DOORS, Door, knock_at, mutated


@pytest.mark.slow
@pytest.mark.long
def test_nobody_dies_of_a_malformed_call() -> None:
    report = asyncio.run(knock_at(DOORS, 12.0, seed=3))
    assert not report.wrong
    for door in report.doors:
        assert door.ends.total() > 20, door.row()


def test_most_of_what_is_sent_is_no_longer_the_seed() -> None:
    rng = random.Random(1)
    seed = bytes(range(64))
    different = {mutated(rng, seed) for _ in range(200)} - {seed}
    assert len(different) > 150
    assert any(one[:16] == seed[:16] for one in different)


@pytest.mark.parametrize(
    ("end", "is_sound"), [("400", True), ("!500", False), ("!INTERNAL", False)]
)
def test_one_bad_end_is_enough(end: str, is_sound: bool) -> None:
    ends = iter([*["INVALID_ARGUMENT"] * 5, end])

    class Knocker:
        async def knock(self, _: random.Random) -> Counter[str]:
            return Counter([next(ends)])

        def close(self) -> None:
            """Nothing is open."""

    async def knock() -> Door:
        door = Door("a door", Knocker)
        with pytest.raises(RuntimeError):  # no further ends
            await door.knock(random.Random(1), inf, inf)
        return door

    door = asyncio.run(knock())
    assert door.is_sound is is_sound
    assert door.ends.total() == 6
