"""The groups of a layout: their layers, their order, and what a sequence holds of them."""

from __future__ import annotations

from baton.types import KvLayout
from engine.kv.groups.full import FULL
from engine.kv.groups.state import STATE
from engine.kv.groups.window import WINDOWED
from engine.kv.layout import groups_of


def test_groups_are_in_order_of_their_numbers() -> None:
    mixed = KvLayout(
        *("m", 4, 1, 1, "int8", 4),
        window=6,
        windowed_layers=(0, 2),
        num_state_layers=3,
        state_layer_bytes=8,
    )
    groups = [(group.number, tuple(group.layers)) for group in groups_of(mixed).all]
    assert groups == [(FULL, (1, 3)), (WINDOWED, (0, 2)), (STATE, (0, 1, 2))]
    assert FULL < WINDOWED < STATE


def test_a_sequence_of_windows_holds_their_blocks_alone() -> None:
    """Blocks of 4 tokens. A new token attends to itself and the 5 before it."""
    windows = groups_of(KvLayout("m", 1, 1, 1, "int8", 4, window=6, windowed_layers=(0,)))
    assert [windows.kept_start(n) for n in (0, 5, 6, 16, 17)] == [0, 0, 1, 11, 12]
    # What 16 tokens keep is sent of 17, too: the full blocks can be reused as a prefix.
    assert [windows.whole_start(n) for n in (8, 16, 17)] == [0, 8, 8]
    assert [windows.held_start(n) for n in (8, 16, 17)] == [0, 8, 8]
    # The last token of 16 is not computed: 15 are, which keep from the full blocks' 7 on.
    assert [windows.num_held_blocks(n) for n in (8, 16, 17)] == [2, 3, 3]


def test_a_sequence_with_a_layer_that_keeps_all_holds_all_blocks() -> None:
    both = groups_of(KvLayout("m", 2, 1, 1, "int8", 4, window=6, windowed_layers=(0,)))
    assert both.held_start(17) == 0
    assert both.num_held_blocks(17) == 5
    assert both.whole_start(17) == 8
