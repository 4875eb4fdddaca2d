"""Kinds of layer groups: one file per rule of KV retention."""

from engine.kv.groups.full import FullGroup
from engine.kv.groups.group import LayerGroup
from engine.kv.groups.state import StateGroup
from engine.kv.groups.window import WindowGroup
from engine.kv.range import ALL

#: In order: each kind takes its layers from those left by the kinds before it. A new kind adds its
#: file and an entry here.
KINDS: tuple[type[LayerGroup], ...] = (WindowGroup, StateGroup, FullGroup)


def is_known(number: int) -> bool:
    """Whether a KvRange may have this group number."""
    return number == ALL or any(kind.number == number for kind in KINDS)
