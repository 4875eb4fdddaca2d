"""The real engine on a device that computes nothing, to time the engine's host work: metadata of
decode steps, replay, and draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from baton.types import KvLayout
from baton_kernels.gpu.paged_attention import plan_attention as gpu_plan_attention
from bench.stub_engine import BLOCK_SIZE, VOCAB_SIZE, NoKv
from engine.cuda.graph_device import Graph
from engine.cuda.recorded_decoder import RecordedDecoder
from engine.cuda.step_graphs import ReplayedSteps, WatchableReplayedSteps, plan_graphs
from engine.families.read import parse_config
from engine.interface import Batch, EngineSpec
from engine.ranks.followers import NoFollowers
from engine.ranks.mesh import ALL_LAYERS
from engine.torch.decoder import AdapterRows, Decoder, PackedBatch, Watch
from engine.torch.device_tables import DeviceTables, table_width
from engine.torch.divided import LayerDone
from engine.torch.engine import TorchEngine
from engine.torch.rope import make_rope
from engine.torch.step_runner import EagerStep, EagerSteps, FirstStage, StepModel

#: A minimal Llama: host work per step depends on sequences and contexts only.
_CONFIG: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1 << 20,
}


class _NoKernels:
    """Implements GraphDevice and Graph: records and runs nothing."""

    def host_buffer(self, num_words: int) -> torch.Tensor:
        return torch.empty(num_words, dtype=torch.int32)

    def fence(self) -> Callable[[], None]:
        return lambda: None

    def record(self, run: Callable[[], None]) -> Graph:  # noqa: ARG002
        return self

    def replay(self) -> None:
        return


class _Pool(NoKv):
    """Implements TensorPool without memory."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        super().__init__(layout, num_blocks)
        shape = (num_blocks, 1, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        self.tensor = torch.zeros(1, dtype=torch.bfloat16).expand(shape)
        self.scales: torch.Tensor | None = None
        self.records: Mapping[int, Any] = {}


class _NoDecoder:
    """A decoder that computes nothing."""

    dtype = torch.bfloat16
    stage = ALL_LAYERS

    def forward(
        self,
        batch: PackedBatch,
        pool: torch.Tensor,  # noqa: ARG002
        layer_done: LayerDone | None,
        scales: torch.Tensor | None,  # noqa: ARG002
        watch: Watch | None,  # noqa: ARG002
    ) -> torch.Tensor:
        """A state per sample row; all layers are queued at once."""
        if layer_done:
            layer_done(0)
        rows = batch.token_ids if batch.sampled is None else batch.sampled
        return torch.zeros(len(rows), 1)

    def logits(
        self,
        states: torch.Tensor,
        adapters: Sequence[AdapterRows] = (),  # noqa: ARG002
    ) -> torch.Tensor:
        return torch.zeros(len(states), VOCAB_SIZE)


class _Eager:
    """Implements WatchableSteps for steps without a graph: all host work, except the launches of
    layers."""

    def __init__(self, steps: EagerSteps) -> None:
        self._steps = steps
        self.num_steps = 0

    @property
    def model(self) -> StepModel:
        return self._steps.model

    def watch(self, layers: Sequence[int] | None) -> None:
        self._steps.watch(layers)

    def run(
        self,
        batch: Batch,
        layer_done: LayerDone | None,
        drawn: torch.Tensor | None = None,
    ) -> EagerStep | FirstStage:
        self.num_steps += 1
        return self._steps.run(batch, layer_done, drawn)


class StubDeviceEngine(TorchEngine):
    """Every row gets the same token. num_eager_steps: steps that were not replayed."""

    def __init__(
        self,
        num_blocks: int,
        largest_batch: int,
        max_model_len: int,
        max_num_launches: int,
        *,
        has_tables: bool = True,
    ) -> None:
        """has_tables: whether eager steps find block tables on the device, or send them whole, as
        until 2026-11-22."""
        config = parse_config(dict(_CONFIG))
        layout = KvLayout("stub", 1, 1, config.head_dim, "bfloat16", BLOCK_SIZE)
        spec = EngineSpec(
            "stub",
            layout,
            num_blocks,
            VOCAB_SIZE,
            max_model_len,
            max_num_launches=max_num_launches,
            computes_aside=True,
        )
        cpu = torch.device("cpu")
        pool = _Pool(layout, num_blocks)
        rope = make_rope(config, cpu)
        decoder = cast(Decoder, _NoDecoder())
        plan_attention = partial(gpu_plan_attention, fill=lambda *_: None)
        model = StepModel(config, decoder, rope, pool, plan_attention=plan_attention)
        recorded = RecordedDecoder(model)
        plan = plan_graphs(
            *(recorded.sizes, pool.tensor, torch.bfloat16, largest_batch, max_model_len)
        )
        tables = DeviceTables(largest_batch, table_width(max_model_len, BLOCK_SIZE), cpu)
        eager = EagerSteps(model, NoFollowers(), tables if has_tables else None)
        self._eager = _Eager(eager)
        steps = ReplayedSteps(recorded, tables, plan, _NoKernels(), self._eager, NoFollowers())
        watchable = WatchableReplayedSteps(steps, self._eager)
        super().__init__(spec, pool, watchable, 1, NoFollowers(), lambda: None)

    @property
    def num_eager_steps(self) -> int:
        return self._eager.num_steps
