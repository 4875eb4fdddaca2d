"""Records the decode steps of one rank: plans the shapes, and captures a graph of each.

Every rank of a tensor-parallel group records the same shapes in the same order, because the ranks
meet within each step, also while it is recorded.
"""

from __future__ import annotations

import logging
import time

import torch

from baton.errors import ConfigError
from baton.types import SCALED_DTYPES, KvLayout
from engine.cuda.graph_device import GraphDevice
from engine.cuda.recorded_model import RecordedModel, RecordedSizes
from engine.cuda.step_graphs import GraphPlan, ReplayedSteps, plan_graphs
from engine.ranks.followers import Followers
from engine.ranks.rank_spec import Recording
from engine.torch.device_tables import DeviceTables
from engine.torch.step_runner import StepRunner

_log = logging.getLogger(__name__)


def plan_recording(
    recording: Recording,
    sizes: RecordedSizes,
    layout: KvLayout,
    dtype: torch.dtype,
    *,
    batch_invariant: bool = False,
    has_adapters: bool = False,
) -> GraphPlan:
    """Shapes for a model, or a rank's part of one. dtype: of the weights. has_adapters: see
    plan_graphs."""
    pool = torch.empty(
        (
            *(0, sizes.num_layers, layout.num_parts),
            *(sizes.num_kv_heads, layout.block_size, sizes.head_dim),
        ),
        dtype=torch.int8 if layout.dtype in SCALED_DTYPES else getattr(torch, layout.dtype),
        device="meta",
    )
    return plan_graphs(
        sizes,
        pool,
        dtype,
        recording.max_graph_tokens,
        recording.max_len,
        batch_invariant=batch_invariant,
        has_adapters=has_adapters,
    )


def record_steps(
    recording: Recording,
    model: RecordedModel,
    tables: DeviceTables,
    device: GraphDevice,
    eager: StepRunner,
    followers: Followers,
    *,
    batch_invariant: bool = False,
) -> ReplayedSteps:
    """Record all steps of a rank. eager, followers: see ReplayedSteps. Raises ConfigError if it
    fails."""
    plan = plan_recording(
        *(recording, model.sizes, model.kv.layout, model.dtype),
        batch_invariant=batch_invariant,
    )
    num_seqs = plan.shapes[-1].num_seqs
    _log.info("capturing %d graphs of steps of up to %d new tokens", len(plan.shapes), num_seqs)
    begin = time.monotonic()
    try:
        steps = ReplayedSteps(model, tables, plan, device, eager, followers)
    except RuntimeError as error:  # torch raises no narrower type for a failed or full device
        raise ConfigError.of(
            "enforce_eager",
            False,
            f"capturing decode steps failed ({error}); do without graphs, or leave them more "
            "memory by a lower --gpu-memory-utilization or --max-cudagraph-capture-size",
        ) from error
    _log.info("captured %d graphs in %.1f s", len(plan.shapes), time.monotonic() - begin)
    return steps
