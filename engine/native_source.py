"""ModelSource of a checkpoint of Baton's own families."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from baton.types import DTYPE_BYTES, KvLayout
from baton_kernels.attention_backends import AttentionBackend
from engine.attention_choice import check_batch_invariant, choose_attention
from engine.checkpoint import HeadFiles
from engine.families.config import ModelConfig
from engine.kv.part import KvPart
from engine.kv.tensors.ranks import pool_sizes
from engine.memory_plan import HeadMemory, activation_bytes, weight_bytes
from engine.model_source import EnginePlan, LoadedModel
from engine.ranks.exchange import Groups
from engine.ranks.expert_load import PerExpert, place_experts, read_loads, write_loads
from engine.ranks.followers import Followers, TensorPool
from engine.ranks.mesh import Degrees, Stage
from engine.ranks.parts import kv_holders, rank_parts
from engine.ranks.rank_spec import Recording, staging_bytes
from engine.ranks.start import check_ranks, start_followers
from engine.torch.adapters import Adapter, load_adapter
from engine.torch.decoder import Decoder
from engine.torch.device_tables import DeviceTables, table_width
from engine.torch.draft_head import head_layout, read_head_config, stored_sizes
from engine.torch.grouped_adapters import group_adapters
from engine.torch.load import keeps_stored_levels, load_parameters
from engine.torch.medusa import read_medusa_config
from engine.torch.mtp import mtp_weight_bytes, read_mtp_config
from engine.torch.native_decoder import make_decoder
from engine.torch.own_sequences import divided_by, expert_ranks
from engine.torch.packed import PackedParameters
from engine.torch.rope import make_rope
from engine.torch.step_adapters import EachAdapter
from engine.torch.step_runner import EagerSteps, StepModel, StepRunner
from engine.torch.weights import ProgressHook

_log = logging.getLogger(__name__)


class NativeModel:
    """A ModelSource of Baton's own families."""

    kernels = ""
    takes_grouped_kv = True
    num_state_layers = state_layer_bytes = 0

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._folder, self._config = folder, config
        self.name = config.family
        self.dtype, self.vocab_size = config.dtype, config.vocab_size
        self.num_layers, self.num_kv_heads = config.num_layers, config.num_kv_heads
        self.head_dim, self.kv_parts = config.head_dim, config.kv_parts
        self.windows = config.windows
        self.max_len, self.longest_len = config.derived_max_len, config.longest_len
        self.kv_digest = config.kv_digest

    def for_length(self, max_model_len: int) -> NativeModel:
        config = self._config.for_length(max_model_len)
        if self.max_len < self.longest_len:
            which = "short" if config is self._config else "long"
            text = "rotated by the %s factors; --max-model-len above %d and up to %d takes the long"
            _log.info(text, which, self.max_len, self.longest_len)
        return NativeModel(self._folder, config)

    def check_ranks(self, degrees: Degrees, device: torch.device) -> None:
        check_ranks(self._config, degrees, device)

    def rank_parts(self, layout: KvLayout, degrees: Degrees) -> tuple[KvPart, ...]:
        return rank_parts(layout, degrees)

    def choose_attention(
        self, name: str, dtype: str, kv_dtype: str, device: torch.device, block_size: int
    ) -> AttentionBackend:
        return choose_attention(name, self._config, dtype, kv_dtype, device, block_size)

    def check_batch_invariant(self, dtype: str, device: torch.device) -> None:
        check_batch_invariant(self._config, dtype, device)

    def read_adapter(
        self, folder: Path, dtype: str, device: torch.device, max_rank: int
    ) -> Adapter:
        return load_adapter(folder, self._config, getattr(torch, dtype), device, max_rank)

    def weight_bytes(self, dtype: str, device: torch.device, degrees: Degrees) -> int:
        keeps = keeps_stored_levels(self._config, getattr(torch, dtype), device)
        return weight_bytes(self._config, dtype, keeps, degrees)

    def activation_bytes(self, dtype: str, num_tokens: int, num_seqs: int, max_len: int) -> int:
        return activation_bytes(self._config, dtype, num_tokens, num_seqs, max_len)

    def graph_bytes(self, plan: EnginePlan) -> int:
        recording = _recording(plan)
        if recording is None:
            return 0
        # Imported here, because it imports Triton, which is optional.
        from engine.cuda.recorded_decoder import sizes_of
        from engine.cuda.recording import plan_recording

        dtype = getattr(torch, plan.dtype)
        return plan_recording(
            *(recording, sizes_of(self._config, dtype), plan.layout, dtype),
            batch_invariant=plan.batch_invariant,
            has_adapters=bool(plan.adapters),
        ).num_bytes

    def head_memory(self, files: HeadFiles, dtype: str, block_size: int) -> HeadMemory:
        folder, size = files.folder, DTYPE_BYTES[dtype]
        if files.method == "medusa":
            read_medusa_config(folder, self._config)
            return HeadMemory(sum(stored_sizes(folder).values()) * size)
        if files.method == "mtp":
            head = read_mtp_config(folder, self._config)
            weights = mtp_weight_bytes(folder, head, size)
        else:
            head = read_head_config(folder, self._config)
            weights = sum(stored_sizes(folder).values()) * size
        return HeadMemory(weights, head_layout(head, dtype, block_size).block_bytes)

    def load(self, plan: EnginePlan, progress: ProgressHook | None) -> LoadedModel:
        config, device = self._config, plan.device
        loads = read_loads(plan.expert_load_file, config)
        num_holders = plan.degrees.num_expert_ranks
        parts = self.rank_parts(plan.layout, plan.degrees)
        pools = pool_sizes(
            *(plan.layout, plan.num_blocks, plan.num_window_slots),
            parts,
            kv_holders(plan.degrees),
        )
        followers = start_followers(
            plan.degrees,
            plan.backend,
            self._folder,
            config,
            plan.dtype,
            pools,
            plan.max_tokens + plan.max_seqs,
            plan.nodes,
            experts=place_experts(loads, num_holders) if num_holders > 1 else (),
            kv_service=plan.kv_service,
            parts=parts,
            device=str(device),
            recording=_recording(plan),
            batch_invariant=plan.batch_invariant,
            staging_bytes=staging_bytes(config, plan.degrees.tensor, plan.dtype),
        )
        try:
            parameters, digest = load_parameters(
                self._folder,
                config,
                getattr(torch, plan.dtype),
                device,
                progress,
                followers.shard,
                Stage(0, plan.degrees.pipeline),
                batch_invariant=plan.batch_invariant,
            )
            groups = followers.wait_ready(digest)
        except BaseException:
            followers.close()
            raise
        return _LoadedNative(config, plan, parameters, digest, followers, groups, loads)


class _LoadedNative:
    """See LoadedModel."""

    def __init__(
        self,
        config: ModelConfig,
        plan: EnginePlan,
        parameters: PackedParameters,
        digest: str,
        followers: Followers,
        groups: Groups,
        loads: PerExpert,
    ) -> None:
        """loads: of experts, as read."""
        self._config, self._plan, self._parameters = config, plan, parameters
        self.digest, self.followers, self._groups = digest, followers, groups
        self._loads = loads
        self._decoder: Decoder | None = None
        self._rope = make_rope(config, plan.device)
        self.shared_prompt_limit = self._rope.limit if self._rope.is_dynamic else None

    def steps(self, pool: TensorPool) -> StepRunner:
        ranks = self._groups.tensor
        stages, attention = self.followers.stages, self._plan.attention
        layers = stages.stage.layers(self._config.num_layers)
        own = ranks.shard.attention_config(self._config).of_layers(layers)
        degrees, context = self._plan.degrees, self._groups.context
        experts = expert_ranks(degrees, context)
        decoder = make_decoder(
            *(own, self._parameters, pool.tensor.dtype, ranks, attention, stages, experts)
        )
        divided = divided_by(degrees, context, decoder, None if pool.can_pack else pool)
        self._decoder = decoder
        device, graphs, recording = self._plan.device, self._plan.graphs, _recording(self._plan)
        is_plain = graphs is None and device.type == "cpu"
        grouped = None if is_plain else group_adapters(self._plan.adapters)
        adapters = grouped or EachAdapter(self._plan.adapters)
        parts = StepModel(own, decoder, self._rope, pool, adapters, attention.plan)
        if is_plain:
            return EagerSteps(parts, self.followers, divided=divided)
        width = table_width(self._plan.max_len, self._plan.layout.block_size)
        has_slots = self._plan.num_window_slots > 0
        tables = DeviceTables(self._plan.max_seqs, width, device, has_slots=has_slots)
        eager = EagerSteps(parts, self.followers, tables, divided)
        if graphs is None or recording is None:
            return eager
        from engine.cuda.recorded_decoder import RecordedDecoder
        from engine.cuda.recording import record_steps
        from engine.cuda.step_graphs import WatchableReplayedSteps

        graph_device, model = graphs.make(device), RecordedDecoder(parts)
        replayed = record_steps(
            *(recording, model, tables, graph_device, eager, self.followers),
            batch_invariant=self._plan.batch_invariant,
        )
        return WatchableReplayedSteps(replayed, eager)

    def close(self) -> None:
        """See LoadedModel."""
        self.followers.close()
        path = self._plan.expert_load_file
        if path is not None and self._decoder is not None:
            write_loads(path, self._loads, self._decoder.expert_loads())


def _recording(plan: EnginePlan) -> Recording | None:
    # Whole experts are counted on the host in each step, and stages have several steps under way.
    if plan.graphs is None or plan.degrees.whole_experts or plan.degrees.pipeline > 1:
        return None
    return Recording(plan.graphs.max_tokens, plan.max_seqs, plan.max_len)
