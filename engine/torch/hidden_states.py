"""The target's hidden states, kept for heads that draft from them, and the drawing of drafts.

States are kept for sampled positions only: the last token of a prompt, and each token of an output.
A head therefore costs nothing in a prompt, and nothing of it crosses a handoff: after a move it
begins with the next token. States are kept only while a head asks for them; a head that has not
been asked for a while begins anew, too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from baton_kernels.host_copy import to_device
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.sampling.sampler import RowsError, draw
from engine.torch.draft_head import IMPOSSIBLE
from engine.torch.engine import OnStates

#: Maximum positions per sequence with states kept for its next drafts; older ones are dropped.
MAX_WAITING = 64

#: Consecutive launches without a consumer of states, after which none are kept.
MAX_IDLE_LAUNCHES = 24


@dataclass(slots=True)
class _Waiting:
    """States [positions, width] of the positions from `first` on.

    branches: the sequence's other slices in the last launch, with other drafts: (position of the
    first new token, new tokens, states of the last of them) each.
    """

    first: int
    states: torch.Tensor
    branches: list[tuple[int, Sequence[int], torch.Tensor]] = field(default_factory=list)

    def settle(self, token_ids: Sequence[int]) -> None:
        """Go on from the branch that has the sequence's tokens, if any has."""
        for start, drafted, states in self.branches:
            first = start + len(drafted) - len(states)
            end = min(start + len(drafted), len(token_ids))
            if first < end and list(token_ids[start:end]) == list(drafted[: end - start]):
                kept = self.states[: first - self.first]
                self.states = torch.cat((kept, states[: end - first]))
        self.branches = []


class HiddenStates:
    """The target's states that no head has taken yet, by sequence. Kept from `start` on until none
    were taken for MAX_IDLE_LAUNCHES: keeping them costs each step some time."""

    def __init__(self, watch: Callable[[OnStates | None], None]) -> None:
        """watch: see TorchEngine.watch."""
        self._watch = watch
        self._waiting: dict[Hashable, _Waiting] = {}
        self._num_idle_launches = 0
        self.is_kept = False
        """Whether states of the next launch will be here."""

    def start(self) -> None:
        """Keep states from the next launch on."""
        self._num_idle_launches = 0
        self.is_kept = True
        self._watch(self.on_states)

    def _stop(self) -> None:
        self.is_kept = False
        self._watch(None)
        self._waiting.clear()

    def on_states(self, batch: Batch, states: torch.Tensor | None) -> None:
        """See engine.torch.engine.OnStates. Recomputing a position drops the states kept
        for it and for later positions."""
        if states is None:
            return
        self._num_idle_launches += 1
        if self._num_idle_launches > MAX_IDLE_LAUNCHES:
            self._stop()
            return
        row, seen = 0, set[Hashable]()
        for part in batch.slices:
            if part.key is not None and part.rows:
                own = states[row : row + len(part.rows)]
                if part.key in seen:
                    branch = part.start, part.token_ids, own
                    self._waiting[part.key].branches.append(branch)
                else:
                    self._add(part, own)
                seen.add(part.key)
            row += len(part.rows)

    def _add(self, part: SequenceSlice, states: torch.Tensor) -> None:
        # Several choices of one sequence are drawn after one position.
        known = self._waiting.get(part.key)
        offset, num = part.rows[0].offset, len(part.rows)
        if known is not None:
            known.settle(part.rows[0].token_ids)
        if part.rows[-1].offset != offset + num - 1:
            offset, num, states = part.rows[-1].offset, 1, states[-1:]
        first = part.start + offset
        if known is not None and known.first < first <= known.first + len(known.states):
            states = torch.cat((known.states[: first - known.first], states))
            first = known.first
        if (excess := len(states) - MAX_WAITING) > 0:
            first, states = first + excess, states[excess:].clone()
        self._waiting[part.key] = _Waiting(first, states)

    def first(self, key: Hashable, token_ids: Sequence[int]) -> int | None:
        """The first position with kept states, if they reach to the last but one of a sequence's
        tokens, as its next draft needs; else None."""
        found, num_tokens = self._waiting.get(key), len(token_ids)
        if found is not None:
            found.settle(token_ids)
        if found is None or not found.first <= num_tokens - 2 < found.first + len(found.states):
            return None
        return found.first

    def take(self, key: Hashable, token_ids: Sequence[int]) -> tuple[int, torch.Tensor]:
        """Remove and return the states that `first` found: the first position, and [positions,
        width] through the last but one token."""
        self._num_idle_launches = 0
        found = self._waiting.pop(key)
        return found.first, found.states[: len(token_ids) - 1 - found.first]

    def forget(self, key: Hashable) -> None:
        """Drop a sequence's states. Unknown keys are ignored."""
        self._waiting.pop(key, None)

    def __len__(self) -> int:
        return len(self._waiting)


def draw_several(
    logits: torch.Tensor, rows: Sequence[SampleRow], num_tokens: int
) -> tuple[tuple[int, ...], ...] | None:
    """num_tokens different tokens per row, each drawn as if the ones before it were impossible,
    with the same random numbers. logits: [rows, vocab] float32, changed. None if nothing can be
    drawn for a row."""
    drawn: list[list[int]] = []
    for _ in range(min(num_tokens, logits.shape[1])):
        if drawn:
            last = to_device(torch.tensor(drawn[-1]), logits.device)
            logits.scatter_(1, last[:, None], IMPOSSIBLE)
        try:
            drawn.append([sample.token_id for sample in draw(logits, rows).samples()])
        except RowsError:
            return None
    return tuple(tuple(dict.fromkeys(tokens)) for tokens in zip(*drawn, strict=True))
