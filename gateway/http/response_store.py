"""Answers of /v1/responses that clients may ask for again, in the memory of this gateway."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Maximum bytes of one answer with its conversation: writing JSON stops the event loop.
MAX_ENTRY_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class _Entry:
    """JSON, in ASCII, of an answer, and of the items of its conversation, output included."""

    document: str
    items: str
    expires_s: float

    @property
    def num_bytes(self) -> int:
        return len(self.document) + len(self.items)


class ResponseStore:
    """Answers by owner and id, which never meet those of another owner.

    Bounded in bytes and age. Where it is full, the owner with the most bytes loses the oldest.
    """

    def __init__(
        self, max_bytes: int, max_age_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._by_owner: dict[bytes, OrderedDict[str, _Entry]] = {}
        """Each in order of age."""
        self._num_bytes: dict[bytes, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all answers."""
        return sum(self._num_bytes.values())

    def put(
        self, owner: bytes, response_id: str, document: Any, items: Sequence[Any] | None
    ) -> None:
        """Keep an answer instead of an earlier one of that id; one that is too large is dropped.
        items: None of an answer that is not whole."""
        self.drop(owner, response_id)
        self._expire()
        expires_s = self._clock() + self._max_age_s
        entry = _Entry(json.dumps(document), json.dumps(items), expires_s)
        if entry.num_bytes > min(self._max_bytes, MAX_ENTRY_BYTES):
            return
        self._by_owner.setdefault(owner, OrderedDict())[response_id] = entry
        self._num_bytes[owner] = self._num_bytes.get(owner, 0) + entry.num_bytes
        while self.num_bytes > self._max_bytes:
            largest = max(self._num_bytes, key=lambda each: self._num_bytes[each])
            self.drop(largest, next(iter(self._by_owner[largest])))

    def document(self, owner: bytes, response_id: str) -> str | None:
        """The answer as JSON; None if there is none of that owner."""
        entry = self._entry(owner, response_id)
        return None if entry is None else entry.document

    def items(self, owner: bytes, response_id: str) -> list[Any] | None:
        """The items of its conversation; None if it is not there, or not whole."""
        entry = self._entry(owner, response_id)
        items: list[Any] | None = None if entry is None else json.loads(entry.items)
        return items

    def drop(self, owner: bytes, response_id: str) -> bool:
        """Return whether it was there."""
        own = self._by_owner.get(owner)
        entry = own.pop(response_id, None) if own else None
        if entry is None:
            return False
        self._num_bytes[owner] -= entry.num_bytes
        if not own:
            del self._by_owner[owner], self._num_bytes[owner]
        return True

    def _entry(self, owner: bytes, response_id: str) -> _Entry | None:
        self._expire()
        found: Mapping[str, _Entry] = self._by_owner.get(owner, {})
        return found.get(response_id)

    def _expire(self) -> None:
        now_s = self._clock()
        for owner, own in [*self._by_owner.items()]:
            for response_id, entry in [*own.items()]:
                if entry.expires_s > now_s:
                    break
                self.drop(owner, response_id)
