"""Every history of a world of choices: depth first, each state once.

A world says what may happen next, by names, and has it happen; it is deterministic but for that.
Two states are one if everything that is reachable from them is equal, however they came about: a
state's digest is taken over all attributes of all objects, by the shape of their references. What
is left out is named by the caller, who has to know that nothing depends on it.
"""

from __future__ import annotations

import enum
import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Protocol

import numpy as np
from google.protobuf.message import Message

#: Values that count by themselves.
_PLAIN = frozenset({int, str, bytes, float, bool, type(None)})
#: Only their type counts: code, and locks, which are free between two choices.
_NAMED = frozenset(
    {FunctionType, BuiltinFunctionType, type(lru_cache(lambda: None)), type(threading.Lock())}
)

#: Puts what counts of an object behind what is there already, by `seen`, which numbers objects.
_Visit = Callable[[Any, list[object], dict[int, int]], None]


class Digest:
    """Takes digests of what is reachable from an object.

    opaque: types of objects that count by their type alone. ignored: attributes that do not
    count, by the name of the class, and of the attribute.
    """

    def __init__(
        self, opaque: tuple[type, ...] = (), ignored: frozenset[tuple[str, str]] = frozenset()
    ) -> None:
        self._opaque = opaque
        self._ignored = ignored
        self._visits: dict[type, _Visit | None] = {}

    def of(self, root: object) -> int:
        parts: list[object] = []
        self._visit(root, parts, {})
        return hash(tuple(parts))

    def _visit(self, thing: Any, parts: list[object], seen: dict[int, int]) -> None:
        kind = type(thing)
        if kind in _PLAIN:
            parts.append(thing)
            return
        if kind not in self._visits:
            self._visits[kind] = self._visit_of(kind)
        visit = self._visits[kind]
        if visit is None:
            parts.append(thing.name if isinstance(thing, enum.Enum) else kind.__name__)
            return
        number = seen.get(id(thing))
        if number is not None:
            parts.append(("again", number))
            return
        seen[id(thing)] = len(seen)
        parts.append(kind.__name__)
        visit(thing, parts, seen)

    def _visit_of(self, kind: type) -> _Visit | None:
        """None: of its objects only the type counts, or the name."""
        if issubclass(kind, (*self._opaque, enum.Enum)) or kind in _NAMED:
            return None
        for base, leaf in _LEAVES.items():
            if issubclass(kind, base):
                return lambda thing, parts, _seen: parts.append(leaf(thing))
        for base, parts_of in _CONTAINERS.items():
            if issubclass(kind, base):
                return self._visit_items(parts_of)
        return self._visit_attributes(kind)

    def _visit_items(self, items_of: Callable[[Any], Collection[Any]]) -> _Visit:
        def visit(thing: Any, parts: list[object], seen: dict[int, int]) -> None:
            items = items_of(thing)
            parts.append(len(items))
            for item in items:
                if type(item) in _PLAIN:
                    parts.append(item)
                else:
                    self._visit(item, parts, seen)

        return visit

    def _visit_attributes(self, kind: type) -> _Visit:
        slots: list[str] = []
        for base in kind.__mro__:
            own = base.__dict__.get("__slots__", ())
            slots += [own] if isinstance(own, str) else own
        ignored = {name for owner, name in self._ignored if owner == kind.__name__}
        counting = tuple(
            name for name in slots if name not in ignored | {"__weakref__", "__dict__"}
        )

        def visit(thing: Any, parts: list[object], seen: dict[int, int]) -> None:
            for name in counting:
                self._visit(getattr(thing, name, None), parts, seen)
            for name, value in getattr(thing, "__dict__", {}).items():
                if name in ignored:
                    continue
                if type(value) in _PLAIN:
                    parts.append(value)
                else:
                    self._visit(value, parts, seen)

        return visit


def _entries(mapping: Mapping[Any, Any]) -> list[Any]:
    """Keys and values by turns. An address says no more than the object at it."""
    return [
        part
        for key, value in mapping.items()
        for part in ((value,) if key == id(value) else (key, value))
    ]


#: By the class, or one that it is made from: what counts of an object.
_LEAVES: Mapping[type, Callable[[Any], object]] = {
    np.ndarray: lambda array: array.tobytes(),
    memoryview: bytes,
    bytearray: bytes,
    Message: lambda message: message.SerializeToString(deterministic=True),
}
#: Parts to visit of each kind of container, in order.
_CONTAINERS: Mapping[type, Callable[[Any], Collection[Any]]] = {
    tuple: lambda items: items,
    list: lambda items: items,
    deque: lambda items: items,
    Mapping: _entries,
    set: lambda items: sorted(items, key=repr),
    frozenset: lambda items: sorted(items, key=repr),
    MethodType: lambda method: (method.__func__.__qualname__, method.__self__),
    partial: lambda made: (made.func, made.args, made.keywords),
}


class Explored(Protocol):
    """A world: see tests/support/handoff_world.py."""

    def choices(self) -> list[str]: ...

    def steps(self) -> list[str]: ...

    def do(self, name: str) -> None: ...

    def check(self) -> None: ...

    def settle(self) -> None: ...


@dataclass
class Found:
    """What an exploration has seen. num_ends: states in which nothing goes on by itself.

    failure, trace: the first violation, and the choices that led there.
    """

    num_states: int = 0
    num_transitions: int = 0
    num_ends: int = 0
    depth: int = 0
    is_whole: bool = True
    failure: str = ""
    trace: tuple[str, ...] = field(default_factory=tuple)


def explore(
    make: Callable[[], Explored],
    digest: Callable[[Explored], int],
    max_states: int = 0,
    on_progress: Callable[[Found], None] = lambda _: None,
    seed: int = 0,
) -> Found:
    """Visit every state that can be reached, or `max_states` of them, or up to the first
    violation: any AssertionError, or an error that the code raises where it must not.

    seed: of the order in which they are visited, which is mixed so that a part of them is not all
    of one kind.
    """
    found, seen, rng = Found(), set[int](), random.Random(seed)
    todo: list[tuple[str, ...]] = [()]
    while todo:
        place = rng.randrange(len(todo))
        todo[place], todo[-1] = todo[-1], todo[place]
        trace = todo.pop()
        world = make()
        try:
            for name in trace:
                world.do(name)
            _go_down(world, trace, digest, seen, todo, found, rng)
        except _Failed as failed:
            found.failure, found.trace = failed.what, failed.trace
            return found
        if max_states and found.num_states >= max_states:
            found.is_whole = not todo
            return found
        on_progress(found)
    return found


class _Failed(Exception):
    def __init__(self, what: str, trace: Sequence[str]) -> None:
        super().__init__(what)
        self.what, self.trace = what, tuple(trace)


def _go_down(
    world: Explored,
    trace: tuple[str, ...],
    digest: Callable[[Explored], int],
    seen: set[int],
    todo: list[tuple[str, ...]],
    found: Found,
    rng: random.Random,
) -> None:
    """Follow one choice after the other from a state to one that was seen, or to an end; the others
    are left to do."""
    while True:
        key = digest(world)
        if key in seen:
            return
        seen.add(key)
        found.num_states += 1
        found.depth = max(found.depth, len(trace))
        choices = world.choices()
        rng.shuffle(choices)
        found.num_transitions += len(choices)
        is_end = not world.steps()
        todo += [(*trace, name) for name in (choices if is_end else choices[1:])]
        trace = (*trace, "(end)" if is_end else choices[0])
        try:
            if is_end:
                found.num_ends += 1
                world.settle()
                return
            world.do(choices[0])
            world.check()
        except Exception as error:
            raise _Failed(f"{type(error).__name__}: {error}", trace) from error
