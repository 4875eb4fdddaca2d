"""Kinds of layer groups: one file for each rule by which layers keep KV."""

from engine.kv.groups.full import FullGroup
from engine.kv.groups.group import LayerGroup
from engine.kv.groups.state import StateGroup
from engine.kv.groups.window import WindowGroup
from engine.kv.range import ALL

#: Each takes its layers from those that the kinds before it have left. To add a kind: its file, and
#: its entry here.
KINDS: tuple[type[LayerGroup], ...] = (WindowGroup, StateGroup, FullGroup)


def is_known(number: int) -> bool:
    """Whether KvRange.group may be this."""
    return number == ALL or any(kind.number == number for kind in KINDS)
