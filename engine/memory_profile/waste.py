"""Share of KV memory that holds tokens, by how memory is allocated: a replay of a recorded load as
in Kwon et al. 2023 (PagedAttention, figure 2). Pure.

All requests of the trace wait from the start, and begin in order as soon as there is room, so that
memory is what limits them. Each step writes one token of each running request; a prompt is written
when its request begins. Shares are means over the steps until the last request begins.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.plan.trace import TraceEntry


@dataclass(frozen=True, slots=True)
class Waste:
    """Shares of KV memory, adding up to 1.

    tokens: holds KV. reserved: allocated, and written later. internal: allocated, and never
    written. external: free, but the next request does not fit. num_running: mean number of
    requests. num_refused: requests that never fit.
    """

    allocation: str
    tokens: float
    reserved: float
    internal: float
    external: float
    num_running: float
    num_refused: int


class Allocation(Protocol):
    """Memory of a number of token slots."""

    held: dict[int, int]
    """Slots allocated, by request."""

    def begin(self, key: int, num_now: int, num_final: int) -> bool:
        """Allocate for a request that has num_now tokens and ends with num_final; whether there is
        room."""
        ...

    def grow(self, key: int) -> bool:
        """Allocate for another token of a request without a free slot; whether there is room."""
        ...

    def end(self, key: int) -> None:
        """Free all of a request's slots."""
        ...


class Contiguous:
    """One range for each request, at the first place with room.

    size_of: slots of a request by its final length. is_aligned: ranges start at multiples of their
    size.
    """

    def __init__(self, capacity: int, size_of: Callable[[int], int], *, is_aligned: bool) -> None:
        self._capacity, self._size_of, self._is_aligned = capacity, size_of, is_aligned
        self._ranges: list[tuple[int, int]] = []
        """(start, key), in order."""
        self.held: dict[int, int] = {}

    def begin(self, key: int, num_now: int, num_final: int) -> bool:  # noqa: ARG002
        """See Allocation."""
        size, at = self._size_of(num_final), 0
        for start, owner in [*self._ranges, (self._capacity, -1)]:
            if self._is_aligned:
                at = -(-at // size) * size
            if at + size <= start:
                insort(self._ranges, (at, key))
                self.held[key] = size
                return True
            at = start + self.held.get(owner, 0)
        return False

    def grow(self, key: int) -> bool:
        """See Allocation."""
        raise RuntimeError(f"request {key} is longer than its range")

    def end(self, key: int) -> None:
        """See Allocation."""
        self._ranges = [each for each in self._ranges if each[1] != key]
        del self.held[key]


class Paged:
    """Blocks of one size, allocated as a request grows."""

    def __init__(self, capacity: int, block_size: int) -> None:
        self._capacity, self._size = capacity, block_size
        self._num_free = capacity // block_size
        self.held: dict[int, int] = {}

    def begin(self, key: int, num_now: int, num_final: int) -> bool:
        """See Allocation. A request whose end never fits would begin again for ever."""
        num_blocks = -(-num_now // self._size)
        if num_blocks > self._num_free or -(-num_final // self._size) * self._size > self._capacity:
            return False
        self._num_free -= num_blocks
        self.held[key] = num_blocks * self._size
        return True

    def grow(self, key: int) -> bool:
        """See Allocation."""
        if not self._num_free:
            return False
        self._num_free -= 1
        self.held[key] += self._size
        return True

    def end(self, key: int) -> None:
        """See Allocation."""
        self._num_free += self.held.pop(key) // self._size


def allocations(
    capacity: int, max_len: int, block_sizes: Sequence[int]
) -> Mapping[str, Allocation]:
    """Ways to allocate, by name. max_len: longest request."""
    kinds: dict[str, Allocation] = {
        "contiguous, maximum length": Contiguous(capacity, lambda _: max_len, is_aligned=False),
        "contiguous, power of two": Contiguous(capacity, _power_of_two, is_aligned=True),
        "contiguous, exact length": Contiguous(capacity, lambda length: length, is_aligned=False),
    }
    return kinds | {f"blocks of {size}": Paged(capacity, size) for size in block_sizes}


def _power_of_two(num_tokens: int) -> int:
    return 1 << (num_tokens - 1).bit_length()


@dataclass(slots=True)
class _Request:
    key: int
    num_tokens: int
    num_final: int


def replay_trace(
    name: str, memory: Allocation, capacity: int, entries: Sequence[TraceEntry]
) -> Waste:
    """Replay a trace. A request that finds no room to grow sends the newest one away, which begins
    again before all others, with the tokens that it has."""
    waiting = deque(
        _Request(key, entry.num_input_tokens, entry.num_input_tokens + entry.num_output_tokens)
        for key, entry in enumerate(entries)
    )
    running: list[_Request] = []
    sums: Counter[str] = Counter()
    num_refused = 0
    while waiting or not sums["steps"]:
        while waiting and memory.begin(waiting[0].key, waiting[0].num_tokens, waiting[0].num_final):
            running.append(waiting.popleft())
        if not running:
            if not waiting:
                break
            num_refused += 1
            waiting.popleft()
            continue
        for each in running:
            held = memory.held[each.key]
            sums["held"] += held
            sums["tokens"] += each.num_tokens
            sums["reserved"] += min(held, each.num_final) - each.num_tokens
        sums["steps"] += 1
        sums["running"] += len(running)
        running = _advance(memory, running, waiting)
    steps = max(1, sums["steps"])
    share = {use: sums[use] / steps / capacity for use in ("tokens", "reserved", "held")}
    return Waste(
        name,
        share["tokens"],
        share["reserved"],
        share["held"] - share["tokens"] - share["reserved"],
        1 - share["held"],
        sums["running"] / steps,
        num_refused,
    )


def _advance(
    memory: Allocation, running: list[_Request], waiting: deque[_Request]
) -> list[_Request]:
    """One token more for each of `running`, oldest first; returns those that go on."""
    left = deque(running)
    going_on = []
    while left:
        request = left.popleft()
        if request.num_tokens == request.num_final:
            memory.end(request.key)
            continue
        while request.num_tokens == memory.held[request.key] and not memory.grow(request.key):
            newest = left.pop() if left else request
            memory.end(newest.key)
            waiting.appendleft(newest)
            if newest is request:
                break
        else:
            request.num_tokens += 1
            going_on.append(request)
    return going_on
