"""The target's hidden states on their way to heads that draft from them, and what these draw.

States are kept of what the engine samples from alone: the last token of a prompt, and each token of
an output. So a head sees the output, and of the prompt what the target's states say: nothing is
computed for it in a prompt, and nothing of it crosses a handoff. Wherever a sequence comes to, the
head begins with the next token there. They are kept only while a head asks for some: one that has
not been asked for long begins anew as well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

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
    """The target's states that no head has had yet, by sequence, from `start` on until nobody has
    taken any for a while: keeping them costs each step some time."""

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
        """See engine.torch.engine.OnStates. A position that is computed again takes what was
        known of it, and all after it, away."""
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
        """From which position on there are states up to that of the last but one of a sequence's
        tokens, which its next draft is made of; None if there are not."""
        found, num_tokens = self._waiting.get(key), len(token_ids)
        if found is not None:
            found.settle(token_ids)
        if found is None or not found.first <= num_tokens - 2 < found.first + len(found.states):
            return None
        return found.first

    def take(self, key: Hashable, token_ids: Sequence[int]) -> tuple[int, torch.Tensor]:
        """What `first` says there is: the first position, and [positions, width] up to that of the
        last but one. They are here no longer."""
        self._num_idle_launches = 0
        found = self._waiting.pop(key)
        return found.first, found.states[: len(token_ids) - 1 - found.first]

    def forget(self, key: Hashable) -> None:
        """Unknown keys are ignored."""
        self._waiting.pop(key, None)

    def __len__(self) -> int:
        return len(self._waiting)


def draw_several(
    logits: torch.Tensor, rows: Sequence[SampleRow], num_tokens: int
) -> tuple[tuple[int, ...], ...] | None:
    """For each row num_tokens different tokens: what is drawn, then what would be if the tokens
    before were impossible, with the same random numbers. logits [rows, vocab] float32: changed.
    None if nothing can be drawn for a row."""
    drawn: list[list[int]] = []
    for _ in range(min(num_tokens, logits.shape[1])):
        if drawn:
            logits.scatter_(1, torch.tensor(drawn[-1])[:, None], IMPOSSIBLE)
        try:
            drawn.append([sample.token_id for sample in draw(logits, rows).samples()])
        except RowsError:
            return None
    return tuple(tuple(dict.fromkeys(tokens)) for tokens in zip(*drawn, strict=True))
