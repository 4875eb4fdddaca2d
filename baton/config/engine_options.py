"""Options of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from baton.config.fields import (
    AttentionBackendName,
    BlockSize,
    ByteSize,
    Count,
    Device,
    Dtype,
    JsonObject,
    KvDtype,
    LoraModules,
    ModelImpl,
)
from baton.config.options import ModelOptions


class EngineOptions(ModelOptions):
    """Options of the engine, common to both tiers."""

    engine: Literal["torch", "oracle"] = "torch"
    """torch runs the model; oracle generates tokens from hashes without a model, for tests."""
    oracle_step_ms: Annotated[float, Field(ge=0)] = 0.0
    """Duration of a step of the oracle engine, in milliseconds."""
    oracle_token_us: Annotated[float, Field(ge=0)] = 0.0
    """Additional step duration per new token of the oracle engine, in microseconds."""
    oracle_window: Annotated[int, Field(ge=0)] = 0
    """Sliding window of every other layer of the oracle engine, in tokens, stored in separate KV
    blocks; 0 for full attention in all layers."""
    oracle_has_states: bool = False
    """Add layers with recurrent state to the oracle engine."""
    model_impl: ModelImpl = "auto"
    """Implementation of the model: baton has its own for some families; transformers supports most
    decoders and runs them with Baton's attention, KV blocks and linear layers; auto takes the first
    that supports the model."""
    attention_backend: AttentionBackendName = "auto"
    """Attention kernels. triton: Baton's own, for prefill and decode on a GPU, chosen by auto. The
    others compute only prefill: sdpa and varlen are torch's; flash-attn and flashinfer need these
    packages. The chosen backend must be installed and support the model. sink-window:TOKENS and
    pages:TOKENS read about so many tokens of context in a decode step, at some cost in quality."""
    batch_invariant: bool = False
    """Make greedy outputs independent of the other sequences in the batch and of prompt chunking.
    On a GPU, sums are computed in a fixed order, which is slower; the native CPU kernels always do
    so. Refuses configurations that cannot guarantee it."""
    dtype: Dtype = "auto"
    """Data type of weights and computation; auto takes the checkpoint's, or float32 on a CPU
    without kernels for it."""
    kv_cache_dtype: KvDtype = "auto"
    """Data type of the KV cache; auto takes --dtype. fp8 (e4m3) and int8 hold about twice the
    tokens of 16-bit types, with less precision; each head of a token has its own scale."""
    device: Device = "auto"
    """auto, cpu, cuda or cuda:N; auto takes a GPU if there is one."""
    num_threads: Count | None = None
    """CPU threads of the engine, summed over its ranks; all cores if not given."""
    numa_node: Annotated[int, Field(ge=-1)] | None = None
    """NUMA node that a worker's threads and memory are kept to; -1 for none. If not given, baton
    serve takes one for each worker on a CPU that fits into one, where there are several."""
    tensor_parallel_size: Count = 1
    """Processes that share the model, each with a shard of every layer and of the KV cache. The two
    tiers may differ."""
    pipeline_parallel_size: Count = 1
    """Stages of the model, each with some of the layers and their KV, on a group of
    --tensor-parallel-size processes. The two tiers may differ."""
    data_parallel_size: Count = 1
    """Processes that each compute attention for sequences of their own and have whole experts of a
    mixture, to which tokens are sent (data-parallel attention). Needs a model with experts; not
    together with other degrees."""
    enable_expert_parallel: bool = False
    """Give each process of a tensor-parallel group whole experts instead of a part of every
    expert."""
    tensor_parallel_cut: Literal["outputs", "sums"] = "outputs"
    """How the processes of a tensor-parallel group share linear layers. outputs: each computes some
    outputs, in four exchanges a layer; tokens are those of one process. sums: each computes a part
    of every sum, in two all-reduces a layer; tokens depend on --tensor-parallel-size."""
    expert_load_file: Path | None = None
    """File of measured load, tokens per expert, by which --enable-expert-parallel places experts;
    written anew when a worker ends, and read when one starts, if it is there. With baton serve,
    each worker has its own: FILE.json becomes FILE-decode-0.json."""
    distributed_backend: Literal["auto", "shm", "gloo", "nccl"] = "auto"
    """How processes that share the model exchange results: shm through shared memory of one host,
    gloo over the network between CPUs, nccl between GPUs; auto takes the fastest that fits."""
    kv_per_rank: bool = False
    """Have each process that shares the model send and receive its own part of the KV, instead of
    the first one for all of them through shared memory."""
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """Maximum tokens of a sequence, prompt and output; the model's own limit if not given."""
    rope_scaling: JsonObject | None = None
    """Rotary scaling that replaces the one in config.json, to serve longer contexts: an object with
    rope_type (linear, dynamic, yarn, dynamic_yarn, llama3 or longrope) and the parameters of that
    type, as in '{"rope_type": "yarn", "factor": 4}'. All workers need the same."""
    hf_overrides: JsonObject | None = None
    """Fields that replace those in config.json, as in '{"max_position_embeddings": 65536}'. All
    workers need the same."""
    block_size: BlockSize = 16
    """Tokens per KV block. The two tiers may differ."""
    kv_cache_memory_bytes: ByteSize | None = None
    """Memory for KV blocks, such as 512MiB or 2GB. If not given, on a GPU enough for --max-num-seqs
    sequences of --max-model-len tokens, within --gpu-memory-utilization; on a CPU enough for 16 of
    them of up to 8,192 tokens, in at most a quarter of that."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Fraction of the free memory at start, of the GPU or else of the machine and the control
    group, for weights, activations and KV blocks."""
    num_gpu_blocks_override: Count | None = None
    """Number of KV blocks, on any device; overrides the number computed from memory."""
    enable_prefix_caching: bool = True
    """Reuse the KV of earlier prompts for prompts with the same prefix."""
    max_num_seqs: Count = 64
    """Maximum sequences in one batch."""
    max_num_batched_tokens: Count = 2048
    """Maximum new tokens in one batch; longer prompts are computed in chunks."""

    lora_modules: LoraModules = ()
    """LoRA adapters, NAME=PATH, that requests select by name in place of the model: PATH is a
    folder in PEFT's format. Repeat the option or separate with commas for several. All workers of
    both tiers need the same ones."""
    max_lora_rank: Count = 16
    """Maximum rank of an adapter."""

    @property
    def own_numa_node(self) -> int | None:
        """The NUMA node that the worker is kept to, None for none."""
        return None if self.numa_node == -1 else self.numa_node

    @property
    def adapter_paths(self) -> dict[str, str]:
        """Folders of --lora-modules, by name."""
        return {name: path for name, _, path in (m.partition("=") for m in self.lora_modules)}

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        if self.model_name in self.adapter_paths:
            raise ValueError(
                f"--lora-modules: {self.model_name!r} is the model's own name; give the adapter "
                "another"
            )
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        places_experts = self.enable_expert_parallel or self.data_parallel_size > 1
        if self.expert_load_file is not None and not places_experts:
            raise ValueError(
                f"--expert-load-file={self.expert_load_file}: experts are placed with "
                "--enable-expert-parallel or --data-parallel-size alone; give one of them, too, or "
                "leave it out"
            )
        if self.data_parallel_size > 1:
            self._check_data_parallel()
        for kind in ("tensor", "pipeline", "context", "data"):
            # Decode workers have no option for contexts.
            size = getattr(self, name := f"{kind}_parallel_size", 1)
            if self.engine == "oracle" and size > 1:
                raise ValueError(
                    f"--{name.replace('_', '-')}={size}: --engine=oracle has no model to share; "
                    "leave one of them out"
                )
        return self

    def _check_data_parallel(self) -> None:
        """Raise ValueError for what processes with sequences of their own do not go with."""
        if self.enable_expert_parallel:
            raise ValueError(
                f"--data-parallel-size={self.data_parallel_size}: its processes always have whole "
                "experts, and --enable-expert-parallel is for those of --tensor-parallel-size; "
                "leave it out"
            )
        degrees = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
        for name in type(self).model_fields:
            # With baton serve, each tier may have its own.
            is_given = name.endswith(degrees) and (getattr(self, name) or 1) > 1
            if is_given or (name == "kv_per_rank" and self.kv_per_rank):
                raise ValueError(
                    f"--data-parallel-size={self.data_parallel_size}: its processes have the "
                    f"attention of all layers, and one KV memory, without "
                    f"--{name.replace('_', '-')}; leave one of them out"
                )

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        """Each running sequence needs one token per batch; a smaller batch would starve some
        sequences."""
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens < seqs:
            raise ValueError(
                f"--max-num-batched-tokens={tokens}: is less than --max-num-seqs={seqs}; "
                f"give at least {seqs} tokens, or at most {tokens} sequences"
            )
        return self

    @model_validator(mode="after")
    def _check_oracle(self) -> Self:
        if self.engine == "oracle" and self.kv_cache_dtype != "auto":
            raise ValueError(
                f"--kv-cache-dtype={self.kv_cache_dtype}: the oracle engine keeps hashes, of one "
                "type; leave it out, or give --engine torch"
            )
        if self.engine == "oracle" and (self.rope_scaling or self.hf_overrides):
            option = "rope-scaling" if self.rope_scaling else "hf-overrides"
            raise ValueError(
                f"--{option}: the oracle engine has no config.json; leave it out, or give "
                "--engine torch"
            )
        return self
