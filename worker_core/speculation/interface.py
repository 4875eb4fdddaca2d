"""Speculation as the decode core sees it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from worker_core.speculation.proposer import DraftRequest


class Speculation(Protocol):
    """Gives drafts for steps, and hears what came of them. One thread, the engine loop's, uses
    it."""

    @property
    def max_num_drafts(self) -> int:
        """Of one sequence in one step."""
        ...

    def is_due(self, key: Hashable) -> bool:
        """Whether to ask for drafts of a sequence in this step; to be called once in each of its
        steps."""
        ...

    def plan(
        self, requests: Sequence[DraftRequest], num_rows: int, max_num_drafts: int
    ) -> list[tuple[int, ...]]:
        """The drafts to verify, of each request, at most `max_num_drafts` in all, in a step that
        decodes `num_rows` tokens without them, of these sequences and perhaps others."""
        ...

    def judge(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """What a sequence got in the step that was planned."""
        ...

    def made(self, num_rows: int, num_drafts: int) -> None:
        """The step that was planned is over; it computed so many tokens, and so many drafts
        beside."""
        ...

    def forget(self, key: Hashable) -> None:
        """The sequence is over. Unknown keys are ignored."""
        ...


class NoSpeculation:
    """Implements Speculation."""

    max_num_drafts = 0

    def is_due(self, key: Hashable) -> bool:  # noqa: ARG002
        return False

    def plan(
        self,
        requests: Sequence[DraftRequest],
        num_rows: int,  # noqa: ARG002
        max_num_drafts: int,  # noqa: ARG002
    ) -> list[tuple[int, ...]]:
        return [()] * len(requests)

    def judge(self, key: Hashable, token_ids: Sequence[int]) -> None:
        pass

    def made(self, num_rows: int, num_drafts: int) -> None:
        pass

    def forget(self, key: Hashable) -> None:
        pass
