"""Decode steps as CUDA graphs: captured once per shape and replayed, so that a step is one launch
instead of hundreds.

See docs/adr/0012-decode-steps-are-replayed.md. Steps that fit no shape, and steps other than plain
decode, run eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from baton_kernels.gpu.attention_plan import (
    SPLIT_TOKENS,
    Tile,
    choose_tile,
    fixed_tile,
    head_blocks,
    most_items,
)
from baton_kernels.gpu.padded_plan import partial_bytes
from baton_kernels.sampling import checked_argmax
from engine.cuda.graph_device import Graph, GraphDevice
from engine.cuda.static_step import StaticStep, static_bytes
from engine.cuda.step_shapes import StepShape, choose_shape, step_shapes
from engine.families.config import ModelConfig
from engine.interface import Batch
from engine.memory_plan import token_bytes
from engine.ranks.followers import Followers
from engine.torch.device_tables import DeviceTables
from engine.torch.divided import LayerDone
from engine.torch.step import take_drawn
from engine.torch.step_runner import FirstStage, StepModel, StepOutput, StepRunner

_log = logging.getLogger(__name__)

#: Maximum bytes of attention's partial results; larger steps run eagerly.
MAX_PARTIAL_BYTES = 256 << 20
#: Device memory per layer and graph, without shared tensors. A guess, not measured.
GRAPH_LAYER_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """Shapes to capture. shapes: ascending; largest: maximum sequences and items of all shapes;
    tile: for a sequence with one new token; num_bytes: estimated device memory."""

    shapes: tuple[StepShape, ...]
    largest: StepShape
    tile: Tile
    num_bytes: int


def plan_graphs(
    config: ModelConfig,
    pool: torch.Tensor,
    dtype: torch.dtype,
    largest_batch: int,
    max_model_len: int,
    *,
    batch_invariant: bool = False,
) -> GraphPlan:
    """Plan graphs for decode steps of up to largest_batch sequences of up to max_model_len tokens.
    pool: any tensor with the pool's shape and dtype, also on `meta`; dtype: of the weights;
    batch_invariant: see EnginePlan."""
    windows = set(config.windows)
    choose = fixed_tile if batch_invariant else choose_tile
    tile = choose(config.num_heads // head_blocks(pool, config.num_heads), pool, dtype)
    one_part = partial_bytes(pool, tile, config.num_heads)
    items_per_seq = max(most_items(max_model_len, window, tile) for window in windows)
    max_items = max(largest_batch, MAX_PARTIAL_BYTES // one_part)
    shapes = step_shapes(largest_batch, items_per_seq, max_items)
    largest = StepShape(shapes[-1].num_seqs, max(shape.num_items for shape in shapes))
    shared = (
        static_bytes(largest, len(windows))
        + largest.num_items * one_part
        + largest_batch * (token_bytes(config, dtype.itemsize) + 2 * 4 * config.vocab_size)
    )
    own = len(shapes) * config.num_layers * GRAPH_LAYER_BYTES
    return GraphPlan(shapes, largest, tile, shared + own)


class ReplayedSteps:
    """Runs plain decode steps by graphs and all others by `eager`. See StepRunner."""

    def __init__(
        self,
        model: StepModel,
        tables: DeviceTables,
        plan: GraphPlan,
        device: GraphDevice,
        eager: StepRunner,
        followers: Followers,
    ) -> None:
        """Capture all graphs, largest first, so that the others reuse its memory. Writes no block.
        tables: has a row per sequence of a step. followers: have captured the same shapes."""
        self._eager, self._followers = eager, followers
        self._reported: set[str] = set()
        self._shapes = plan.shapes
        self._num_layers = model.config.num_layers
        pool, largest = model.kv.tensor, plan.largest.num_seqs
        self._static = StaticStep(model, plan.tile, plan.largest, tables, device)
        self._logits = torch.zeros(
            largest, model.config.vocab_size, dtype=torch.float32, device=pool.device
        )
        self._graphs: dict[StepShape, Graph] = {}
        nothing = Batch(())
        with torch.inference_mode():
            for shape in reversed(plan.shapes):
                self._static.fill(shape, nothing)
                self._graphs[shape] = device.record(self._step(model, shape))

    def _step(self, model: StepModel, shape: StepShape) -> Callable[[], None]:
        """The function to capture: from the static buffer to `_logits`."""

        def run() -> None:
            batch = self._static.packed(shape)
            states = model.decoder.forward(batch, model.kv.tensor, None, model.kv.scales)
            # Ranks other than 0 get their own part.
            logits = model.decoder.logits(states)
            self._logits[: shape.num_seqs, : logits.shape[1]].copy_(logits)

        return run

    def _report(self, reason: str) -> None:
        """Log the first eager step without a prompt's chunk, once per reason."""
        if reason not in self._reported:
            self._reported.add(reason)
            _log.warning("a decode step runs without a graph, kernel by kernel: %s", reason)

    def run(
        self, batch: Batch, layer_done: LayerDone | None, drawn: torch.Tensor | None = None
    ) -> StepOutput | FirstStage:
        """See StepRunner. A replayed step reports its layers once all of them are queued."""
        if not _is_decode(batch):
            if reason := _why_eager(batch):
                self._report(reason)
            return self._eager.run(batch, layer_done, drawn)
        num_seqs = len(batch.slices)
        shape = choose_shape(self._shapes, num_seqs, self._static.num_items(batch))
        if shape is None:
            most = self._shapes[-1]
            self._report(
                f"graphs are of up to {most.num_seqs} sequences with up to "
                f"{max(s.num_items for s in self._shapes)} ranges of {SPLIT_TOKENS} keys in all"
            )
            return self._eager.run(batch, layer_done, drawn)
        with self._followers.step(batch, (), replays=True):
            self._static.fill(shape, batch)
            if drawn is not None:
                take_drawn(self._static.token_ids(shape), batch, drawn)
            self._graphs[shape].replay()
        if layer_done is not None:
            for layer in range(self._num_layers):
                layer_done(layer)
        return ReplayedStep(self._logits[:num_seqs])


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """all_logits [rows, vocab]."""

    all_logits: torch.Tensor

    @property
    def num_rows(self) -> int:
        """See StepOutput."""
        return len(self.all_logits)

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """See StepOutput."""
        return self.all_logits if len(rows) == self.num_rows else self.all_logits[rows]

    def best(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """See StepOutput."""
        return checked_argmax(self.logits(rows))


#: Maximum tokens of a sequence that verifies drafts, including its own; more tokens are a prompt's
#: chunk.
_MAX_VERIFIED_TOKENS = 16


def _why_eager(batch: Batch) -> str:
    """Why a step without a prompt's chunk cannot be replayed; empty for steps with one."""
    parts = batch.slices
    if not parts or not all(part.rows and part.start for part in parts):
        return ""
    if any(len(part.token_ids) > _MAX_VERIFIED_TOKENS for part in parts):
        return ""
    if any(part.adapter for part in parts):
        return "a sequence has a LoRA adapter"
    if any(len(part.token_ids) > 1 for part in parts):
        return "it verifies drafts"
    return "a sequence draws several tokens, or scores one"


def _is_decode(batch: Batch) -> bool:
    """Whether each sequence has one new token and draws one from the model's own logits."""
    return bool(batch.slices) and all(
        len(part.token_ids) == 1
        and len(part.rows) == 1
        and part.rows[0].scored_token_id is None
        and not part.adapter
        for part in batch.slices
    )
