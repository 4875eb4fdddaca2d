"""What a step does must not grow with the context: nothing is copied or looked up again."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.commands import Abort
from baton.types import KvSource
from bench.host_rig import draw_spec, prefill_core
from bench.stub_engine import BLOCK_SIZE, StubEngine
from engine.kv.layout import whole_blocks
from engine.kv.pool import BlockPool
from engine.kv.prefix_index import PrefixIndex
from worker_core.admission import CoreLimits
from worker_core.commands import Open, StreamCommand
from worker_core.sequence import DraftedTokens

TOKENS = st.lists(st.integers(0, 99), max_size=8)
PLACES = st.none() | st.integers(-12, 12)


@given(known=TOKENS, later=TOKENS, drafts=TOKENS, at=st.tuples(PLACES, PLACES), step=PLACES)
def test_drafted_tokens_are_a_list_of_known_and_drafted_ones(
    known: list[int],
    later: list[int],
    drafts: list[int],
    at: tuple[int | None, int | None],
    step: int | None,
) -> None:
    wanted = [*known, *drafts]
    view = DraftedTokens(known, len(known), tuple(drafts))
    known += later
    assert (len(view), list(view)) == (len(wanted), wanted)
    for index in range(-len(wanted), len(wanted)):
        assert view[index] == wanted[index]
    chosen = slice(*at, step or None)
    assert list(view[chosen]) == wanted[chosen]
    with pytest.raises(IndexError):
        view[len(wanted)]


def test_a_prompt_without_room_is_looked_up_again_only_when_there_may_be_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_blocks, num_tokens = 40, 16 * BLOCK_SIZE
    pool = BlockPool(num_blocks, whole_blocks(BLOCK_SIZE), secret=bytes(32))
    commands: list[object] = []
    core = prefill_core(StubEngine(num_blocks), pool, CoreLimits(8, 512), commands)  # type: ignore[arg-type]
    lookups = []
    match = PrefixIndex.match
    monkeypatch.setattr(PrefixIndex, "match", lambda *given: lookups.append(1) or match(*given))
    first, second = draw_spec(1, num_tokens), draw_spec(2, num_tokens)
    longer = draw_spec(3, 30 * BLOCK_SIZE)
    core.step([Open(0, 1, first, KvSource.LOCAL), Open(0, 2, second, KvSource.LOCAL)])
    core.step([Open(0, 3, dataclasses.replace(longer, arrival_ns=3), KvSource.LOCAL)])
    num_before = len(lookups)
    for _ in range(20):
        assert core.step([]).load.num_waiting == 1
    assert len(lookups) == num_before
    core.step([StreamCommand(0, 1, Abort()), StreamCommand(0, 2, Abort())])
    assert core.step([]).load.num_waiting == 0
    assert len(lookups) > num_before
    pool.check_integrity()
