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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Protocol

import numpy as np
from google.protobuf.message import Message

_PLAIN = (int, str, bytes, float, bool, type(None))


class Digest:
    """Takes digests of what is reachable from an object.

    opaque: types of whose objects nothing counts but the type. ignored: attributes that do not
    count, by the name of the class, and of the attribute.
    """

    def __init__(
        self, opaque: tuple[type, ...] = (), ignored: frozenset[tuple[str, str]] = frozenset()
    ) -> None:
        self._opaque = opaque
        self._ignored = ignored
        self._attributes_of = lru_cache(maxsize=None)(self._find_attributes)

    def of(self, root: object) -> int:
        parts: list[object] = []
        self._visit(root, parts, {})
        return hash(tuple(parts))

    def _visit(self, thing: Any, parts: list[object], seen: dict[int, int]) -> None:  # noqa: PLR0912, one arm per kind
        kind = type(thing)
        if kind in _PLAIN_TYPES:
            parts.append(thing)
            return
        if isinstance(thing, enum.Enum):
            parts.append(thing.name)
            return
        if issubclass(kind, self._opaque) or kind in _NAMED:
            parts.append(kind.__name__)
            return
        number = seen.get(id(thing))
        if number is not None:
            parts.append(("again", number))
            return
        seen[id(thing)] = len(seen)
        parts.append(kind.__name__)
        if isinstance(thing, tuple | list | deque):
            parts.append(len(thing))
            for item in thing:
                self._visit(item, parts, seen)
        elif isinstance(thing, Mapping):
            parts.append(len(thing))
            for key, value in thing.items():
                # An address says no more than the object at it.
                if key != id(value):
                    self._visit(key, parts, seen)
                self._visit(value, parts, seen)
        elif isinstance(thing, set | frozenset):
            parts.append(len(thing))
            for item in sorted(thing, key=repr) if len(thing) > 1 else thing:
                self._visit(item, parts, seen)
        elif isinstance(thing, np.ndarray):
            parts.append(thing.tobytes())
        elif isinstance(thing, memoryview | bytearray):
            parts.append(bytes(thing))
        elif isinstance(thing, Message):
            parts.append(thing.SerializeToString(deterministic=True))
        elif isinstance(thing, MethodType):
            parts.append(thing.__func__.__qualname__)
            self._visit(thing.__self__, parts, seen)
        elif isinstance(thing, partial):
            self._visit((thing.func, thing.args, thing.keywords), parts, seen)
        else:
            for name in self._attributes_of(kind, tuple(getattr(thing, "__dict__", ()))):
                self._visit(getattr(thing, name, None), parts, seen)

    def _find_attributes(self, kind: type, names: tuple[str, ...]) -> tuple[str, ...]:
        slots: list[str] = []
        for base in kind.__mro__:
            own = base.__dict__.get("__slots__", ())
            slots += [own] if isinstance(own, str) else own
        found = [*slots, *names]
        return tuple(
            name
            for name in found
            if (kind.__name__, name) not in self._ignored and name != "__weakref__"
        )


_PLAIN_TYPES = frozenset(_PLAIN)
#: Only their type counts: code, and locks, which are free between two choices.
_NAMED = frozenset({FunctionType, BuiltinFunctionType, type(threading.Lock())})


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
