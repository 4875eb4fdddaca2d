"""The real engine over a device that computes nothing: what is left is the engine's own work on the
host, with the decode steps' metadata, their replay and their draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch

from baton.engine.graph_device import Graph
from baton.engine.interface import Batch, EngineSpec
from baton.engine.step_graphs import ReplayedStep, ReplayedSteps, plan_graphs
from baton.engine.step_runner import LayerDone, NoFollowers, StepModel
from baton.engine.torch_engine import TorchEngine
from baton.model.config import parse_config
from baton.model.decoder import Decoder
from baton.model.rope import make_rope
from baton.types import KvLayout
from bench.stub_engine import BLOCK_SIZE, VOCAB_SIZE, NoKv

#: A Llama that is hardly there: the host's work for a step depends on sequences and contexts alone.
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
    """Implements GraphDevice and Graph: nothing is recorded, and nothing runs."""

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


class _NoDecoder:
    """What is read of a decoder that is never run."""

    dtype = torch.bfloat16


class _Prompts:
    """Implements StepRunner, for steps that no graph is for."""

    def __init__(self) -> None:
        self.num_steps = 0

    def run(
        self,
        batch: Batch,
        layer_done: LayerDone | None,  # noqa: ARG002
        drawn: torch.Tensor | None = None,  # noqa: ARG002
    ) -> ReplayedStep:
        self.num_steps += 1
        return ReplayedStep(torch.zeros(sum(len(part.rows) for part in batch.slices), VOCAB_SIZE))


class StubDeviceEngine(TorchEngine):
    """Every row gets the same token. num_eager_steps: those that were not replayed."""

    def __init__(
        self, num_blocks: int, largest_batch: int, max_model_len: int, max_num_launches: int
    ) -> None:
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
        rope = make_rope(config, max_model_len, cpu)
        model = StepModel(config, cast(Decoder, _NoDecoder()), rope, pool)
        plan = plan_graphs(config, pool.tensor, torch.bfloat16, largest_batch, max_model_len)
        self._prompts = _Prompts()
        steps = ReplayedSteps(model, plan, _NoKernels(), self._prompts)
        super().__init__(spec, pool, steps, 1, NoFollowers(), lambda: None)

    @property
    def num_eager_steps(self) -> int:
        return self._prompts.num_steps
