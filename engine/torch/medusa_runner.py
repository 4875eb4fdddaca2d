"""Runs Medusa heads beside their target's engine: drafts from its hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from engine.checkpoint import HeadFiles
from engine.interface import SampleRow
from engine.torch.engine import TorchEngine
from engine.torch.head_runner import HiddenStates, draw_several
from engine.torch.medusa import MedusaHeads, load_medusa, read_medusa_config


class MedusaRunner:
    """Runs the heads on the engine's device."""

    def __init__(self, heads: MedusaHeads) -> None:
        self._heads = heads
        self.num_heads = heads.config.num_heads

    def draft(
        self,
        states: Sequence[torch.Tensor],
        rows: Sequence[Sequence[SampleRow]],
        num_tokens: int,
    ) -> tuple[tuple[tuple[int, ...], ...], ...] | None:
        """Draft num_tokens different tokens for each row of each sequence (equally many rows each):
        the likeliest of each of the first heads, likeliest first. states [1, hidden] per sequence:
        the target's. None if no token can be drawn for a row."""
        num_heads = len(rows[0])
        with torch.inference_mode():
            logits = self._heads.logits(torch.cat(list(states)), num_heads)
            each = [row for own in rows for row in own]
            found = draw_several(logits.flatten(0, 1), each, num_tokens)
        if found is None:
            return None
        return tuple(found[first : first + num_heads] for first in range(0, len(found), num_heads))


def open_medusa(engine: TorchEngine, files: HeadFiles) -> tuple[MedusaRunner, HiddenStates]:
    """Load the heads in `files` for the engine's model; also return the collector of the engine's
    states. Raises ConfigError and ModelError."""
    target = engine.watchable_steps().model
    config = read_medusa_config(files.folder, target.config)
    heads = load_medusa(files.folder, config, target.decoder, engine.device)
    return MedusaRunner(heads), HiddenStates(partial(engine.watch, ()))
