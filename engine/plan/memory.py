"""Memory of each rank, and the users that fit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from engine.kv.groups.group import LayerGroup
from engine.kv.layout import groups_of
from engine.kv.tensors.state_memory import STATES_PER_SLOT
from engine.plan.model import ModelSizes, Weights
from engine.ranks.mesh import Degrees, stage_layers


@dataclass(frozen=True, slots=True)
class Reserved:
    """Bytes of each rank for other uses than weights and KV. graphs: None if not known here."""

    activations: int
    graphs: int | None
    transfers: int

    @property
    def total(self) -> int:
        return self.activations + (self.graphs or 0) + self.transfers


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One rank of one stage. kv_bytes: left for KV, negative if the weights do not fit."""

    weight_bytes: int
    reserved: Reserved
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class KvRow:
    """KV of one group, of a rank of the whole model: kind: "full", "window", "latent" or "state";
    token_bytes: per token kept; sequence_bytes: of a state. max_tokens: kept of a sequence at most,
    None for all."""

    kind: str
    num_layers: int
    token_bytes: int
    sequence_bytes: int
    max_tokens: int | None


def stage_memory(
    model: ModelSizes, degrees: Degrees, reserved: Reserved, available_bytes: int
) -> tuple[StageMemory, ...]:
    """Memory of a rank of each stage. available_bytes: of one device, for everything."""
    return tuple(
        StageMemory(weights, reserved, available_bytes - weights - reserved.total)
        for weights in stage_weight_bytes(model, degrees)
    )


def stage_weight_bytes(model: ModelSizes, degrees: Degrees) -> tuple[int, ...]:
    """Bytes of a rank's weights by stage, as engine.memory_plan.weight_bytes counts them: the first
    stage has the embeddings and the output layer, too."""
    storage = model.storage
    stages = stage_layers(len(model.layers), degrees.pipeline)
    found = []
    for index, layers in enumerate(stages):
        shared = sum((model.layers[layer].total for layer in layers), Weights())
        shared += Weights(model.norm)
        if index == 0:
            shared += model.head + Weights(model.embeddings)
        found.append(-(-ceil(storage.loaded_bytes(shared)) // degrees.tensor))
    return tuple(found)


def sequence_bytes(
    model: ModelSizes, degrees: Degrees, num_tokens: int, *, keeps_windows_apart: bool
) -> tuple[int, ...]:
    """Bytes of KV of one sequence of num_tokens tokens on a rank of each stage, in whole blocks.

    keeps_windows_apart: whether windowed layers keep their window alone where full ones stand
    beside them; else blocks hold all layers (engine.load.max_window_slots).
    """
    groups = _rank_groups(model, degrees)
    size, has_full = model.layout.block_size, any(g.keeps_all_tokens for g in groups)
    found = []
    for stage in stage_layers(len(model.layers), degrees.pipeline):
        total = 0
        for group in groups:
            num_layers = sum(layer in stage for layer in group.layers)
            if not group.is_paged:
                total += STATES_PER_SLOT * group.num_layers * group.layer_bytes
            elif group.keeps_all_tokens or (has_full and not keeps_windows_apart):
                total += num_layers * group.layer_bytes * _whole(num_tokens, size)
            else:
                kept = min(_whole(num_tokens, size), _window_tokens(group, size))
                total += num_layers * group.layer_bytes * kept
        found.append(total)
    return tuple(found)


def num_users(
    model: ModelSizes,
    degrees: Degrees,
    stages: Sequence[StageMemory],
    num_tokens: int,
    *,
    keeps_windows_apart: bool,
) -> int:
    """Sequences of num_tokens tokens with KV that fits at once: floor(KV left / KV of one), in the
    tightest stage."""
    each = sequence_bytes(model, degrees, num_tokens, keeps_windows_apart=keeps_windows_apart)
    return min(max(0, s.kv_bytes) // max(1, one) for s, one in zip(stages, each, strict=True))


def kv_rows(model: ModelSizes) -> tuple[KvRow, ...]:
    """KV of each group of the whole model."""
    rows = []
    for group in groups_of(model.layout).all:
        bytes_ = group.num_layers * group.layer_bytes
        if not group.is_paged:
            rows.append(KvRow("state", group.num_layers, 0, STATES_PER_SLOT * bytes_, None))
            continue
        window = None if group.keeps_all_tokens else _window_of(group)
        full = "latent" if model.layout.num_parts == 1 else "full"
        kind = full if window is None else "window"
        rows.append(KvRow(kind, group.num_layers, bytes_, 0, window))
    return tuple(rows)


def _rank_groups(model: ModelSizes, degrees: Degrees) -> tuple[LayerGroup, ...]:
    """KV groups of one rank: its heads of all layers."""
    heads = max(1, model.layout.num_kv_heads // degrees.tensor)
    return groups_of(replace(model.layout, num_kv_heads=heads)).all


def _whole(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size) * block_size


def _window_of(group: LayerGroup) -> int:
    """Tokens that a new token sees, itself included."""
    far = 1 << 40
    return far - group.kept_start(far) + 1


def _window_tokens(group: LayerGroup, block_size: int) -> int:
    """Tokens in the blocks of a window: from its last full block to the one being written."""
    return _whole(_window_of(group) - 1, block_size) + 2 * block_size
