"""How a tier's recorder sees its core: what goes in, and what comes out, each with its moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

CommandT = TypeVar("CommandT")


class CommandLog(Generic[CommandT]):
    """Commands in the order they were submitted, from any thread, for the one that takes them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._commands: deque[tuple[float, CommandT]] = deque()

    def put(self, command: CommandT) -> None:
        """Note a command and the moment; any thread may call this, and it waits for nobody."""
        self._commands.append((self._clock(), command))

    def take(self) -> list[tuple[float, CommandT]]:
        """All that was put since the last call."""
        commands = self._commands
        return [commands.popleft() for _ in range(len(commands))]
