"""Runs a draft head beside its target's engine: collects the target's hidden states and runs the
head's steps.

States are kept only for sampled positions: the last token of a prompt, and each token of an output.
The head therefore sees the output, and the prompt only through the target's states: prefill
computes nothing for it, and handoffs transfer nothing of it. After a migration the head begins with
the next token. States are kept only while a head takes some; after an idle time it begins anew as
well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from engine.checkpoint import HeadFiles
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.tensors.paged import TorchKvPool
from engine.sampling.sampler import RowsError, draw
from engine.torch.draft_head import (
    IMPOSSIBLE,
    DraftHead,
    head_kv_config,
    head_layout,
    load_head,
    read_head_config,
)
from engine.torch.engine import OnStates, TorchEngine
from engine.torch.mtp import load_mtp_head, read_mtp_config
from engine.torch.rope import make_rope
from engine.torch.step import pack_batch

#: Maximum positions per sequence with states waiting for its next drafts; a head that lags further
#: begins anew.
MAX_WAITING = 64

#: Consecutive launches without a `take` after which no states are kept.
MAX_IDLE_LAUNCHES = 24


@dataclass(slots=True)
class _Waiting:
    """States [positions, width] of the positions from `first` on.

    branches: (first position, new tokens, states of the last ones of these) of the sequence's
    further slices in the last launch, which verify other drafts.
    """

    first: int
    states: torch.Tensor
    branches: list[tuple[int, Sequence[int], torch.Tensor]] = field(default_factory=list)

    def settle(self, token_ids: Sequence[int]) -> None:
        """Continue with the branch that matches the sequence's tokens, if any."""
        for start, drafted, states in self.branches:
            first = start + len(drafted) - len(states)
            end = min(start + len(drafted), len(token_ids))
            if first < end and list(token_ids[start:end]) == list(drafted[: end - start]):
                kept = self.states[: first - self.first]
                self.states = torch.cat((kept, states[: end - first]))
        self.branches = []


class HiddenStates:
    """The target's states that no head has taken yet, by sequence. Kept from `start` on until
    MAX_IDLE_LAUNCHES launches without a `take`, because keeping them slows steps."""

    def __init__(self, watch: Callable[[OnStates | None], None]) -> None:
        """watch: see TorchEngine.watch."""
        self._watch = watch
        self._waiting: dict[Hashable, _Waiting] = {}
        self._num_idle_launches = 0
        self.is_kept = False
        """Whether states of the next launch will be kept."""

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
        """See engine.torch.engine.OnStates. A position that is computed again replaces its states
        and drops those of later positions."""
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
        # Several choices of one sequence sample after the same position.
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
        """First position from which states exist up to the last but one of a sequence's tokens,
        which the next draft needs; None if some are missing."""
        found, num_tokens = self._waiting.get(key), len(token_ids)
        if found is not None:
            found.settle(token_ids)
        if found is None or not found.first <= num_tokens - 2 < found.first + len(found.states):
            return None
        return found.first

    def take(self, key: Hashable, token_ids: Sequence[int]) -> tuple[int, torch.Tensor]:
        """Remove and return the states that `first` found: their first position, and [positions,
        width] up to the last but one of the tokens."""
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
    """Draw num_tokens different tokens per row: each further token is drawn with the same random
    numbers after excluding the earlier ones. logits [rows, vocab] float32: modified. None if no
    token can be drawn for a row."""
    drawn: list[list[int]] = []
    for _ in range(min(num_tokens, logits.shape[1])):
        if drawn:
            logits.scatter_(1, torch.tensor(drawn[-1])[:, None], IMPOSSIBLE)
        try:
            drawn.append([sample.token_id for sample in draw(logits, rows).samples()])
        except RowsError:
            return None
    return tuple(tuple(dict.fromkeys(tokens)) for tokens in zip(*drawn, strict=True))


class HeadDrafts(NamedTuple):
    """Drafted tokens per slice, likeliest first, and the head's states after them [slices,
    hidden]."""

    token_ids: tuple[tuple[int, ...], ...]
    states: torch.Tensor


class HeadRunner:
    """Runs a head on the engine's device, with its own KV blocks."""

    def __init__(
        self,
        head: DraftHead,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        config = head_kv_config(head.head, max_model_len)
        self._config, self._head = config, head
        self._rope = make_rope(config, max_model_len, device)
        dtype = str(head.dtype).removeprefix("torch.")
        layout = head_layout(head.head, dtype, block_size)
        self._pool = TorchKvPool(layout, num_blocks, device).tensor
        self.num_blocks, self.block_size = num_blocks, block_size

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Combine the target's states [positions, width] for `step`: [positions, hidden]."""
        with torch.inference_mode():
            return self._head.fuse(states)

    def step(
        self, batch: Batch, states: Sequence[torch.Tensor], num_tokens: int
    ) -> HeadDrafts | None:
        """Draft num_tokens different tokens after each slice, which has one row, at its end. states
        [new tokens, hidden] per slice: of the position before each token's. None if no token can be
        drawn for a slice."""
        with torch.inference_mode():
            packed = pack_batch(batch, self._config, self._rope, self._pool, self._head.dtype)
            of_all = states[0] if len(states) == 1 else torch.cat(list(states))
            own, logits = self._head.forward_head(packed, of_all, self._pool)
            found = draw_several(logits, [part.rows[0] for part in batch.slices], num_tokens)
            return None if found is None else HeadDrafts(found, own)


def open_head(
    engine: TorchEngine, files: HeadFiles, max_num_seqs: int
) -> tuple[HeadRunner, HiddenStates]:
    """Load the head in `files` for the engine's model; also return the collector of the engine's
    states. Raises ConfigError and ModelError."""
    spec, target, folder = engine.spec, engine.watchable_steps().model, files.folder
    if files.method == "mtp":
        config = read_mtp_config(folder, target.config)
        head = load_mtp_head(folder, config, target.decoder, engine.device)
    else:
        config = read_head_config(folder, target.config)
        head = load_head(folder, config, target.decoder, engine.device)
    states = HiddenStates(partial(engine.watch, config.layers))
    block_size = spec.layout.block_size
    # Sequences of the head are no longer than the target's, which limits its blocks, too.
    num_blocks = min(spec.num_blocks, max_num_seqs * -(-spec.max_model_len // block_size))
    runner = HeadRunner(head, num_blocks, block_size, spec.max_model_len, engine.device)
    return runner, states
