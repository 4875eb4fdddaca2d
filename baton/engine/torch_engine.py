"""An engine over torch: a model's parameters, its KV pool, and one forward for prefill, decode and verification.

Numerics. A sequence's tokens come from its own rows alone: linear layers, norms and the sampler work row by row, and attention
reads only the sequence's own KV.
With the native CPU kernels (baton_kernels.cpu: AVX-512 with BF16 and VNNI, float32 and bfloat16) every sum has one order, so
that KV and logits are bit for bit the same whatever the batch mix, chunking, block size and number of threads.
With torch's operations the batch mix and chunking change the order in which a matrix product or a softmax sums, so that
logits differ by rounding: about 1e-6 of their size in float32, about 1e-2 in bfloat16. Greedy outputs are therefore the same
but where two logits are closer than that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from baton.engine.followers import Followers, NoFollowers, TensorPool
from baton.engine.interface import (
    Batch,
    Computed,
    Engine,
    EngineSpec,
    Launched,
    LayersDone,
    SampleRow,
)
from baton.engine.tensor_parallel.start import check_ranks, start_followers
from baton.engine.torch_step import check_batch, fault, pack_batch, sample_rows
from baton.errors import ConfigError
from baton.model.checkpoint import find_shards, naming_model, resolve_checkpoint
from baton.model.config import DTYPES, ModelConfig, read_config
from baton.model.decoder import Decoder
from baton.model.host_memory import available_memory_bytes
from baton.model.load import keeps_stored_levels, load_parameters
from baton.model.memory_plan import MemoryPlan, plan_memory
from baton.model.native_decoder import make_decoder
from baton.model.rope import Rope, make_rope
from baton.model.weights import ProgressHook
from baton.sampling.sampler import NothingAllowedError, broken_rows, sample
from baton.types import SCALE_BYTES, SCALED_DTYPES, KvLayout, Sample

_log = logging.getLogger(__name__)

#: Rows of a prompt that are scored at once: each takes vocab_size * 4 bytes, a few times over.
NUM_SCORED_ROWS = 64


@dataclass(frozen=True, slots=True)
class _Model:
    config: ModelConfig
    decoder: Decoder
    rope: Rope


class TorchEngine(Engine):
    """See baton.engine.interface.Engine. Driven by one thread."""

    def __init__(
        self,
        spec: EngineSpec,
        config: ModelConfig,
        decoder: Decoder,
        rope: Rope,
        kv: TensorPool,
        layer_group_size: int,
        followers: Followers | None = None,
    ) -> None:
        """config: with the heads that are here. layer_group_size: layers that a forward tells `layers_done` of at once.
        followers: the other ranks' processes, if there are any."""
        self._layer_group_size = layer_group_size
        self._followers: Followers = followers or NoFollowers()
        self._spec = spec
        self._model = _Model(config, decoder, rope)
        self._kv = kv

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    @property
    def kv(self) -> TensorPool:
        return self._kv

    def close(self) -> None:
        """End the other ranks' processes, which end by themselves with this one. The engine cannot be used after that."""
        self._followers.close()

    def launch(self, batch: Batch, layers_done: LayersDone | None = None) -> Launched:
        """See Engine.launch. Raises EngineFault whose metadata["slices"] lists, separated by commas, the indices of the
        slices at fault: a batch without them runs."""
        rows, _, owners = sample_rows(batch)
        samples: dict[int, Sample] = {}
        with torch.inference_mode():
            states = self._run(batch, layers_done)
            for group in _row_groups(rows):
                logits = self._logits(states, group)
                if broken := broken_rows(logits):
                    told = "the model's output is not finite"
                    raise fault(told, [owners[group[i]] for i in broken])
                try:
                    found = sample(logits, [rows[i] for i in group])
                except NothingAllowedError as error:
                    raise fault(str(error), [owners[group[i]] for i in error.rows]) from None
                samples.update(zip(group, found, strict=True))
        split: list[list[Sample]] = [[] for _ in batch.slices]
        for index, owner in enumerate(owners):
            split[owner].append(samples[index])
        return Computed(tuple(map(tuple, split)))

    def logits(self, batch: Batch, layers_done: LayersDone | None = None) -> torch.Tensor:
        """Write the new tokens' KV; returns the logits of all sample rows, slice by slice, [rows, vocab] float32."""
        with torch.inference_mode():
            states = self._run(batch, layers_done)
            return self._logits(states, range(len(states)))

    def _logits(self, states: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Of these rows, [rows, vocab] float32."""
        some = states if len(rows) == len(states) else states[rows]
        with self._followers.logits(rows):
            return self._model.decoder.logits(some)

    def _run(self, batch: Batch, layers_done: LayersDone | None) -> torch.Tensor:
        """Write the new tokens' KV; returns the states of all sample rows, slice by slice, [rows, hidden]."""
        spec, model = self._spec, self._model
        check_batch(
            batch, spec.layout.block_size, spec.num_blocks, spec.vocab_size, spec.max_model_len
        )
        if not batch.slices:
            return torch.empty(0, model.config.hidden_size)
        done = (
            _in_groups(layers_done, model.config.num_layers, self._layer_group_size)
            if layers_done
            else None
        )
        with self._followers.step(batch, is_told=done is not None):
            packed = pack_batch(
                batch, model.config, model.rope, self._kv.tensor, model.decoder.dtype
            )
            return model.decoder.forward(packed, self._kv.tensor, done, self._kv.scales)


def _row_groups(rows: Sequence[SampleRow]) -> Iterator[list[int]]:
    """Indices of rows whose logits are held at once: those that draw, of which there are as many as sequences, all
    together; those that score a prompt, of which there are as many as tokens, some at a time."""
    drawn = [i for i, row in enumerate(rows) if row.scored_token_id is None]
    scored = [i for i, row in enumerate(rows) if row.scored_token_id is not None]
    if drawn:
        yield drawn
    for first in range(0, len(scored), NUM_SCORED_ROWS):
        yield scored[first : first + NUM_SCORED_ROWS]


def _in_groups(layers_done: LayersDone, num_layers: int, size: int) -> Callable[[int], None]:
    """Tell `layers_done` about groups of `size` consecutive layers instead of each."""

    def done(layer: int) -> None:
        end = layer + 1
        if end % size == 0 or end == num_layers:
            first = layer // size * size
            layers_done(first, end - first)

    return done


def load_engine(
    model: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    device: str = "cpu",
    max_model_len: int | None = None,
    block_size: int = 16,
    kv_cache_memory_bytes: int | None = None,
    memory_share: float = 0.8,
    num_blocks: int | None = None,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    layer_group_size: int = 4,
    served_model_name: str | None = None,
    num_threads: int | None = None,
    tensor_parallel_size: int = 1,
    on_plan: Callable[[MemoryPlan], None] | None = None,
    progress: ProgressHook | None = None,
) -> TorchEngine:
    """Load the checkpoint `model` (a folder or a hub id) and make its KV pool.

    `on_plan` sees the memory plan before anything is loaded; by default it is logged. `progress` sees each tensor read; by
    default there is a bar on a terminal. Raises ConfigError and ModelError (see baton.errors).
    """
    size = tensor_parallel_size
    if num_threads is not None or size > 1:
        torch.set_num_threads(max(1, (num_threads or torch.get_num_threads()) // size))
    where = _device(device)
    with naming_model(model):
        folder = resolve_checkpoint(model, revision)
        config = read_config(folder)
        find_shards(folder)
    name = _dtype_name(dtype, config)
    kv_name = name if kv_cache_dtype == "auto" else kv_cache_dtype
    longest = _max_len(max_model_len, config)
    if block_size < 1:
        raise ConfigError.of("block_size", block_size, "must be at least 1")
    _check_kv_dtype(kv_name, block_size * config.head_dim, where)
    check_ranks(config, size, where)
    plan = plan_memory(
        config,
        dtype=name,
        kv_dtype=kv_name,
        block_size=block_size,
        max_model_len=longest,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        available_bytes=int(_available_bytes(where) * memory_share),
        num_ranks=size,
        keeps_levels=keeps_stored_levels(config, getattr(torch, name), where),
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_blocks=num_blocks,
    )
    if max_model_len is not None and plan.longest_context < max_model_len:
        raise ConfigError.of(
            "max_model_len",
            max_model_len,
            f"{plan.num_blocks} KV blocks hold {plan.longest_context} tokens; lower it, or raise "
            "kv_cache_memory_bytes or gpu_memory_utilization",
        )
    (on_plan or _log_plan)(plan)
    sizes = KvLayout(
        fingerprint="",
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=kv_name,
        block_size=block_size,
    )
    followers = start_followers(size, folder, config, name, sizes, plan.num_blocks, longest)
    shard = followers.ranks.shard
    try:
        with naming_model(model):
            parameters, digest = load_parameters(
                folder, config, getattr(torch, name), where, progress, shard
            )
        followers.wait_ready(digest)
    except BaseException:
        followers.close()
        raise
    layout = replace(sizes, fingerprint=f"{digest}:{config.kv_digest}")
    rope = make_rope(config, longest, where)
    spec = EngineSpec(
        model=served_model_name or model,
        layout=layout,
        num_blocks=plan.num_blocks,
        vocab_size=config.vocab_size,
        max_model_len=plan.longest_context,
        shared_prompt_limit=config.max_position_embeddings if rope.is_dynamic else None,
    )
    own = shard.attention_config(config)
    pool = followers.make_pool(layout, plan.num_blocks, where)
    decoder = make_decoder(own, parameters, pool.tensor.dtype, followers.ranks)
    return TorchEngine(spec, own, decoder, rope, pool, layer_group_size, followers)


def _log_plan(plan: MemoryPlan) -> None:
    for name, text in plan.rows():
        _log.info("memory plan: %s: %s", name, text)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError.of("device", name, "use cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError.of("device", name, "use cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError.of("device", name, "torch sees no CUDA device here; give cpu or auto")
    return device


def _dtype_name(dtype: str, config: ModelConfig) -> str:
    name = config.dtype if dtype == "auto" else dtype
    if name not in DTYPES:
        raise ConfigError.of("dtype", dtype, f"use auto, {', '.join(DTYPES)}")
    return name


def _check_kv_dtype(name: str, head_elements: int, device: torch.device) -> None:
    """head_elements: of one head in a block."""
    if name not in {*DTYPES, *SCALED_DTYPES}:
        known = ", ".join((*DTYPES, *sorted(SCALED_DTYPES)))
        raise ConfigError.of("kv_cache_dtype", name, f"use auto, {known}")
    if name in SCALED_DTYPES and head_elements % SCALE_BYTES:
        raise ConfigError.of(
            "kv_cache_dtype",
            name,
            f"a block has {head_elements} elements of a head, no multiple of {SCALE_BYTES}; use a --block-size that is one",
        )
    if (
        name == "fp8"
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) < (8, 9)
    ):
        raise ConfigError.of("kv_cache_dtype", name, "this GPU is too old for it; use int8")


def _max_len(asked: int | None, config: ModelConfig) -> int:
    longest = config.derived_max_len
    if asked is None:
        return longest
    if not 1 <= asked <= longest:
        raise ConfigError.of(
            "max_model_len", asked, f"the model's context is {longest} tokens; use 1 to {longest}"
        )
    return asked


def _available_bytes(device: torch.device) -> int:
    """Memory that can be had now: the device's, or this machine's within the process's cgroup."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_memory_bytes()
