"""Which sequences of a step go through a layer with a state together, and from and to which
places."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from baton.types import KvLayout
from engine.interface import Batch, SequenceSlice
from engine.torch.sequence_states import NO_PLACE, StepStates

LAYOUT = KvLayout("m", 1, 1, 4, "float32", 4, num_state_layers=2, state_layer_bytes=12)
#: A beginning, a chunk that goes on, three rows, a chunk, a row, a beginning of one token, a row.
NUM_TOKENS = (4, 2, 1, 1, 1, 2, 1, 1, 1)
PLACES = (
    (NO_PLACE, 0),
    (3, 2),
    (4, 5),
    (7, 6),
    (8, 9),
    (10, 11),
    (12, 13),
    (NO_PLACE, 14),
    (16, 17),
)


@pytest.mark.parametrize(
    ("most_rows", "expected"),
    [
        (1, [(0, 4), (4, 2), (6, 1), (7, 1), (8, 1), (9, 2), (11, 1), (12, 1), (13, 1)]),
        (2, [(0, 4), (4, 2), (6, 2), (8, 1), (9, 2), (11, 1), (12, 1), (13, 1)]),
        (8, [(0, 4), (4, 2), (6, 3), (9, 2), (11, 1), (12, 1), (13, 1)]),
    ],
)
@pytest.mark.parametrize("is_writer", [True, False])
def test_neighbours_that_go_on_with_one_token(
    most_rows: int, expected: list[tuple[int, int]], is_writer: bool
) -> None:
    batch = Batch(
        tuple(
            SequenceSlice((7,) * n, 5 * (before >= 0), ())
            for n, (before, _) in zip(NUM_TOKENS, PLACES, strict=True)
        )
    )
    memory = torch.zeros(20 * 2 * 12, dtype=torch.uint8)
    found = list(StepStates(memory, LAYOUT, is_writer=is_writer).of_step(batch, PLACES, most_rows))
    assert [(states.first_token, states.num_tokens) for states in found] == expected
    assert found[0].places.shape == (20, 2, 3)
    before = [[NO_PLACE] if x.before is None else x.before.tolist() for x in found]
    assert list(chain.from_iterable(before)) == [own[0] for own in PLACES]
    assert [len(own) for own in before] == [x.num_sequences for x in found]
    if is_writer:
        after = [x.after.tolist() for x in found if x.after is not None]
        assert list(chain.from_iterable(after)) == [own[1] for own in PLACES]
    else:
        assert all(x.after is None for x in found)
