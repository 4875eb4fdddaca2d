"""Kinds of layer groups: one file for each rule by which layers keep KV."""

from engine.kv.groups.full import FullGroup
from engine.kv.groups.group import LayerGroup
from engine.kv.groups.state import StateGroup
from engine.kv.groups.window import WindowGroup
from engine.kv.range import ALL

#: In the order in which a sequence's pieces are sent. To add one: its file, and its entry here.
KINDS: tuple[type[LayerGroup], ...] = (FullGroup, WindowGroup, StateGroup)

#: What KvRange.group may be.
GROUP_NUMBERS = frozenset({ALL, *(kind.number for kind in KINDS)})
