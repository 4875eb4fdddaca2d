"""Decode steps as CUDA graphs: captured once per shape and replayed, so that a step is one launch
instead of hundreds.

See docs/adr/0012-decode-steps-are-replayed.md. Verification of drafts is replayed, too: each new
token is a sequence of the shape, so that it has the bits of the same token decoded alone. Steps
that fit no shape, and all others, run eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

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
from baton_kernels.host_copy import to_device
from baton_kernels.sampling import checked_argmax
from engine.cuda.graph_device import Graph, GraphDevice
from engine.cuda.recorded_model import RecordedModel, RecordedSizes
from engine.cuda.static_step import StaticStep, static_bytes
from engine.cuda.step_shapes import StepShape, choose_shape, step_shapes
from engine.interface import Batch, SequenceSlice
from engine.ranks.followers import Followers
from engine.torch.device_tables import DeviceTables
from engine.torch.divided import LayerDone
from engine.torch.step import sample_rows, take_drawn
from engine.torch.step_runner import (
    FirstStage,
    StepModel,
    StepOutput,
    StepRunner,
    WatchableSteps,
)

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
    sizes: RecordedSizes,
    pool: torch.Tensor,
    dtype: torch.dtype,
    largest_batch: int,
    max_model_len: int,
    *,
    batch_invariant: bool = False,
    has_adapters: bool = False,
) -> GraphPlan:
    """Plan graphs for decode steps of up to largest_batch sequences of up to max_model_len tokens.
    pool: any tensor with the pool's shape and dtype, also on `meta`; dtype: of the weights;
    batch_invariant: see EnginePlan; has_adapters: each shape is recorded twice, see
    ReplayedSteps."""
    choose = fixed_tile if batch_invariant else choose_tile
    tile = choose(sizes.num_heads // head_blocks(pool, sizes.num_heads), pool, dtype)
    one_part = partial_bytes(pool, tile, sizes.num_heads)
    items_per_seq = max(most_items(max_model_len, key.window, tile) for key in sizes.keys)
    max_items = max(largest_batch, MAX_PARTIAL_BYTES // one_part)
    shapes = step_shapes(largest_batch, items_per_seq, max_items)
    largest = StepShape(shapes[-1].num_seqs, max(shape.num_items for shape in shapes))
    shared = (
        static_bytes(largest, len(sizes.keys))
        + largest.num_items * one_part
        + largest_batch * (sizes.token_bytes + 2 * 4 * sizes.vocab_size)
    )
    own = len(shapes) * (1 + has_adapters) * sizes.num_layers * GRAPH_LAYER_BYTES
    return GraphPlan(shapes, largest, tile, shared + own)


class ReplayedSteps:
    """Runs decode steps and verification by graphs and all others by `eager`. See StepRunner."""

    def __init__(
        self,
        model: RecordedModel,
        tables: DeviceTables,
        plan: GraphPlan,
        device: GraphDevice,
        eager: StepRunner,
        followers: Followers,
    ) -> None:
        """Capture all graphs, largest first, so that the others reuse its memory. Writes no block.
        tables: has a row per sequence of a step. followers: have captured the same shapes."""
        self._model, self._eager, self._followers = model, eager, followers
        self._reported: set[str] = set()
        self._shapes = plan.shapes
        pool, largest = model.kv.tensor, plan.largest.num_seqs
        self._static = StaticStep(model, plan.tile, plan.largest, tables, device)
        self._logits = torch.zeros(
            largest, model.sizes.vocab_size, dtype=torch.float32, device=pool.device
        )
        self._graphs: dict[tuple[StepShape, bool], Graph] = {}
        """By shape, and whether adapters add to its rows: steps without any do not pay for them."""
        nothing, kinds = Batch(()), (True, False) if model.has_adapters else (False,)
        with torch.inference_mode():
            for shape, is_adapted in product(reversed(plan.shapes), kinds):
                self._static.fill(shape, nothing)
                step = self._step(shape, is_adapted=is_adapted)
                self._graphs[shape, is_adapted] = device.record(step)

    def _step(self, shape: StepShape, *, is_adapted: bool) -> Callable[[], None]:
        """The function to capture: from the static buffer to `_logits`."""

        def run() -> None:
            # Ranks other than 0 get their own part.
            logits = self._model.logits(self._static.tokens(shape), is_adapted=is_adapted)
            self._logits[: shape.num_seqs, : logits.shape[1]].copy_(logits)

        return run

    def report(self, reason: str) -> None:
        """Log the first eager step without a prompt's chunk, once per reason."""
        if reason not in self._reported:
            self._reported.add(reason)
            _log.warning("a decode step runs without a graph, kernel by kernel: %s", reason)

    def run(
        self, batch: Batch, layer_done: LayerDone | None, drawn: torch.Tensor | None = None
    ) -> StepOutput | FirstStage:
        """See StepRunner. A replayed step reports its layers once all of them are queued."""
        model = self._model
        is_adapted = any(part.adapter for part in batch.slices)
        if not _is_replayable(batch, model) or (is_adapted and not model.has_adapters):
            if reason := _why_eager(batch, model):
                self.report(reason)
            return self._eager.run(batch, layer_done, drawn)
        num_tokens = batch.num_tokens
        shape = choose_shape(self._shapes, num_tokens, self._static.num_items(batch))
        if shape is None or not self._static.has_room(batch):
            most = self._shapes[-1]
            self.report(
                f"graphs are of up to {most.num_seqs} new tokens with up to "
                f"{max(s.num_items for s in self._shapes)} ranges of {SPLIT_TOKENS} keys in all"
            )
            return self._eager.run(batch, layer_done, drawn)
        step_tables = model.begin_step(batch)
        with self._followers.step(batch, step_tables, replays=True):
            self._static.fill(shape, batch, step_tables)
            if drawn is not None:
                take_drawn(self._static.token_ids(shape), batch, drawn)
            self._graphs[shape, is_adapted].replay()
        model.end_step(batch)
        if layer_done is not None:
            for layer in range(model.sizes.num_layers):
                layer_done(layer)
        logits = self._logits[:num_tokens]
        if all(len(part.token_ids) == len(part.rows) == 1 for part in batch.slices):
            return ReplayedStep(logits)
        return ReplayedStep(logits, tuple(sample_rows(batch)[1]))


class WatchableReplayedSteps:
    """ReplayedSteps that can keep hidden states, see WatchableSteps. Recorded steps keep none:
    while any are kept, all steps run eagerly."""

    def __init__(self, replayed: ReplayedSteps, eager: WatchableSteps) -> None:
        """eager: of `replayed`."""
        self._replayed, self._eager = replayed, eager
        self._is_watched = False

    @property
    def model(self) -> StepModel:
        """See WatchableSteps."""
        return self._eager.model

    def watch(self, layers: Sequence[int] | None) -> None:
        """See WatchableSteps."""
        self._is_watched = layers is not None
        self._eager.watch(layers)

    def run(
        self, batch: Batch, layer_done: LayerDone | None, drawn: torch.Tensor | None = None
    ) -> StepOutput | FirstStage:
        """See StepRunner."""
        if not self._is_watched:
            return self._replayed.run(batch, layer_done, drawn)
        self._replayed.report("a draft head reads its hidden states")
        return self._eager.run(batch, layer_done, drawn)


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """all_logits [tokens, vocab]. sampled: the token of each sample row; None if each has one."""

    all_logits: torch.Tensor
    sampled: tuple[int, ...] | None = None

    @property
    def num_rows(self) -> int:
        """See StepOutput."""
        return len(self.all_logits if self.sampled is None else self.sampled)

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """See StepOutput."""
        if self.sampled is None and len(rows) == self.num_rows:
            return self.all_logits
        tokens = list(rows) if self.sampled is None else [self.sampled[row] for row in rows]
        return self.all_logits[to_device(torch.tensor(tokens), self.all_logits.device)]

    def best(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """See StepOutput."""
        return checked_argmax(self.logits(rows))


#: Maximum tokens of a sequence that verifies drafts, including its own; more tokens are a prompt's
#: chunk.
_MAX_VERIFIED_TOKENS = 16
#: Maximum of these in a replayed step: --num-speculative-tokens' default, and its own.
_MAX_REPLAYED_TOKENS = 9
#: Maximum keys that a replayed step reads again, because each new token of a sequence reads all
#: before it: more cost more than launching a step that reads them once. A guess, not measured: of
#: an 8B Llama they are 2 GiB.
_MAX_REPEATED_KEYS = 16_384


def _why_eager(batch: Batch, model: RecordedModel) -> str:
    """Why a step without a prompt's chunk cannot be replayed; empty for steps with one."""
    parts = batch.slices
    if not parts or not all(part.rows and part.start and model.takes(part) for part in parts):
        return ""
    if any(len(part.token_ids) > _MAX_VERIFIED_TOKENS for part in parts):
        return ""
    if not model.has_adapters and any(part.adapter for part in parts):
        return "a sequence has a LoRA adapter with weights that no recorded step reads"
    if any(row.scored_token_id is not None for part in parts for row in part.rows):
        return "a sequence scores a token"
    return (
        f"it verifies more than {_MAX_REPLAYED_TOKENS} tokens of a sequence, or drafts of long ones"
    )


def _is_replayable(batch: Batch, model: RecordedModel) -> bool:
    """Whether each sequence has one new token, or drafts to verify, and draws from the model's own
    logits."""
    parts = batch.slices
    repeated = sum(part.start * (len(part.token_ids) - 1) for part in parts)
    if not parts or repeated > _MAX_REPEATED_KEYS:
        return False
    return all(_is_drawn_from(part) and model.takes(part) for part in parts)


def _is_drawn_from(part: SequenceSlice) -> bool:
    num_tokens = len(part.token_ids)
    is_decode = num_tokens == 1 or (part.start > 0 and num_tokens <= _MAX_REPLAYED_TOKENS)
    is_scored = any(row.scored_token_id is not None for row in part.rows)
    return is_decode and bool(part.rows) and not is_scored
