"""A draft head beside the engine of its target: its steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from engine.checkpoint import HeadFiles
from engine.interface import Batch
from engine.kv.tensors.paged import TorchKvPool
from engine.torch.draft_head import (
    DraftHead,
    head_kv_config,
    head_layout,
    load_head,
    read_head_config,
)
from engine.torch.engine import TorchEngine
from engine.torch.hidden_states import HiddenStates, draw_several
from engine.torch.mtp import load_mtp_head, read_mtp_config
from engine.torch.rope import make_rope
from engine.torch.step import pack_batch


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
        self._rope = make_rope(config, device)
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
