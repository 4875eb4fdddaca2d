"""What a sequence's grammar says of its drafts is asked once, and reaches the rows that verify
them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from baton.types import Sampling, SequenceSpec
from engine.grammar import Matcher
from engine.kv.layout import whole_blocks
from engine.kv.pool import BlockPool
from worker_core.sequence import Draft, Stage, WorkerSequence

LIMIT = 3


class SmallTokensAlone(Matcher):
    """Allows tokens below LIMIT. A mask tells how many tokens came before it."""

    def __init__(self) -> None:
        self.questions: list[tuple[int, ...]] = []

    def allowed_along(self, drafts: Sequence[int]) -> tuple[bytes, ...]:
        self.questions.append(tuple(drafts))
        num_allowed = next((i for i, t in enumerate(drafts) if t >= LIMIT), len(drafts))
        return tuple(bytes([i]) for i in range(num_allowed + 1))


def sequence() -> WorkerSequence:
    pool = BlockPool(8, whole_blocks(4), secret=bytes(32))
    spec = SequenceSpec("r", (1, 2, 3), Sampling(), output_token_ids=(7,))
    lease = pool.lease(b"", spec.token_ids, 16)
    assert lease is not None
    return WorkerSequence(0, 0, spec, lease, Stage.RUNNING, 3)


@given(st.lists(st.integers(0, LIMIT), max_size=6), st.integers(0, 6))
def test_masks_of_a_draft_are_asked_for_once(proposed: list[int], num_with_room: int) -> None:
    one = sequence()
    one.matcher = matcher = SmallTokensAlone()
    allowed = one.draft(tuple(proposed))
    draft = Draft(allowed.token_ids[:num_with_room], allowed.masks[: num_with_room + 1])
    (part,) = one.slices(1, draft)
    assert matcher.questions == [tuple(proposed)]
    assert list(part.token_ids) == [7, *draft.token_ids]
    assert all(token < LIMIT for token in draft.token_ids)
    assert [row.offset for row in part.rows] == list(range(len(part.token_ids)))
    assert [row.allowed for row in part.rows] == [bytes([i]) for i in range(len(part.token_ids))]


@given(st.lists(st.integers(0, 9), max_size=4))
def test_without_a_grammar_every_draft_is_verified(proposed: list[int]) -> None:
    one = sequence()
    (part,) = one.slices(1, one.draft(tuple(proposed)))
    assert list(part.token_ids) == [7, *proposed]
    assert all(row.allowed is None for row in part.rows)
