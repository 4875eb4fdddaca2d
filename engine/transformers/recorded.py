"""Models by transformers' code as recorded decode steps run them: attention by the same device
tables as that of Baton's own families, and states at places that are tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch

from baton.errors import ConfigError
from baton.types import KvLayout
from engine.cuda.recorded_model import RecordedSizes, StaticTokens
from engine.cuda.recording import plan_recording, record_steps
from engine.cuda.step_graphs import GRAPH_LAYER_BYTES
from engine.interface import Batch, SequenceSlice
from engine.kv.groups.state import STATE
from engine.kv.tensors.state_memory import SlotStates
from engine.model_source import Graphs
from engine.ranks.followers import Followers, TensorPool
from engine.ranks.rank_spec import Recording
from engine.torch.device_tables import DeviceTables, table_width
from engine.torch.step import NOT_APART, WindowedStep
from engine.torch.step_runner import StepRunner
from engine.transformers.describe import Description
from engine.transformers.load import TransformersDecoder
from engine.transformers.steps import TransformersSteps, begin_step, end_step, step_states

_log = logging.getLogger(__name__)


def sizes_of(found: Description, dtype: torch.dtype) -> RecordedSizes:
    """Sizes of a whole model. dtype: of the weights."""
    return RecordedSizes(
        tuple(sorted(found.plan_keys, key=lambda key: (key.window or 0, key.scale))),
        found.num_heads,
        found.num_kv_heads,
        found.head_dim,
        len(found.windows),
        found.vocab_size,
        found.layer_width * max(4, dtype.itemsize),
    )


def recorded_bytes(
    recording: Recording, found: Description, layout: KvLayout, dtype: torch.dtype
) -> int:
    """Estimated device memory of recorded steps. dtype: of the weights."""
    plan = plan_recording(recording, sizes_of(found, dtype), layout, dtype)
    of_states = len(plan.shapes) * len(found.state_layers) * GRAPH_LAYER_BYTES
    return plan.num_bytes + of_states


class RecordedTransformers:
    """See RecordedModel. Two columns have the places of a sequence's states before and after the
    step, if layers have any: padding sequences have those of SlotStates.padding."""

    has_adapters = False

    def __init__(self, decoder: TransformersDecoder, found: Description, pool: TensorPool) -> None:
        self._decoder, self.kv = decoder, pool
        self.dtype = decoder.dtype
        self.sizes = sizes_of(found, decoder.dtype)
        self._memory: SlotStates | None = pool.records.get(STATE)
        self._states = step_states(self._memory)
        self._padding = () if self._memory is None else self._memory.padding
        self.num_columns = len(self._padding)

    def windowed(self, batch: Batch) -> WindowedStep:  # noqa: ARG002
        """See RecordedModel: blocks hold the KV of all layers."""
        return NOT_APART

    def takes(self, part: SequenceSlice) -> bool:
        """See RecordedModel: a layer with a state goes on from one token to the next, and not from
        nothing."""
        return self._memory is None or (len(part.token_ids) == 1 and part.start > 0)

    def begin_step(self, batch: Batch) -> Sequence[Sequence[int]]:
        """See RecordedModel: places of states."""
        return begin_step(self._memory, batch)

    def columns(
        self,
        batch: Batch,  # noqa: ARG002
        tables: Sequence[Sequence[int]],
        num_padding: int,
    ) -> Iterable[tuple[int, ...]]:
        """See RecordedModel."""
        return [*map(tuple, tables), *[self._padding] * num_padding]

    def end_step(self, batch: Batch) -> None:
        """See RecordedModel."""
        end_step(self._memory, batch)

    def logits(self, tokens: StaticTokens, *, is_adapted: bool) -> torch.Tensor:  # noqa: ARG002
        """See RecordedModel."""
        decoder, kv, states = self._decoder, self.kv, self._states
        hidden = decoder.forward_planned(
            *(tokens.token_ids, tokens.positions, tokens.first_rows, tokens.plans),
            *(kv.tensor, kv.scales),
            of_sequences=() if states is None else (states.of_rows(*tokens.columns),),
        )
        return decoder.logits(hidden)


def record(
    recording: Recording,
    graphs: Graphs,
    model: RecordedTransformers,
    eager: TransformersSteps,
    followers: Followers,
) -> StepRunner:
    """Record decode steps of one rank; returns `eager` where that fails, which is logged.
    followers: of `eager`."""
    device = model.kv.tensor.device
    width = table_width(recording.max_len, model.kv.layout.block_size)
    tables = DeviceTables(recording.max_seqs, width, device)
    try:
        return record_steps(*(recording, model, tables, graphs.make(device), eager, followers))
    except ConfigError as error:
        _log.warning("decode steps run operation by operation: %s", error)
        return eager
