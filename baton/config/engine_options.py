"""What an engine is loaded with."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from baton.config.fields import (
    AttentionBackendName,
    BlockSize,
    ByteSize,
    Count,
    Device,
    Dtype,
    KvDtype,
    LoraModules,
    ModelImpl,
)
from baton.config.options import ModelOptions


class EngineOptions(ModelOptions):
    """What an engine is loaded with, in either tier."""

    engine: Literal["torch", "oracle"] = "torch"
    """torch runs the model; oracle makes tokens from hashes without one, to try the plumbing."""
    oracle_step_ms: Annotated[float, Field(ge=0)] = 0.0
    """Time a step of the oracle engine takes, in milliseconds."""
    oracle_token_us: Annotated[float, Field(ge=0)] = 0.0
    """Time each new token of a step adds to it, of the oracle engine, in microseconds."""
    oracle_window: Annotated[int, Field(ge=0)] = 0
    """Tokens that every other layer of the oracle engine attends to, which keeps their KV apart; 0
    if all layers attend to all tokens."""
    oracle_has_states: bool = False
    """The oracle engine has layers with a state, too."""
    model_impl: ModelImpl = "auto"
    """Whose code runs the layers: baton has its own for some families; transformers has most
    decoders, and runs them with Baton's attention, KV blocks and linear layers; auto takes the
    first that has the model."""
    attention_backend: AttentionBackendName = "auto"
    """Who computes attention. triton: Baton's own kernels, for everything on a GPU, which auto
    takes. The others compute prompts alone: sdpa and varlen are torch's, flash-attn and flashinfer
    need these packages. What is named must be installed and be able to compute the model."""
    batch_invariant: bool = False
    """Greedy outputs do not depend on what else is in the batch, nor on how prompts were cut into
    chunks: on a GPU all sums are taken in one order, which takes time. With the native kernels of a
    CPU they never do. What cannot hold it is refused."""
    dtype: Dtype = "auto"
    """Element type of weights and of what is computed; auto takes the checkpoint's, or float32 on a
    CPU without kernels for that."""
    kv_cache_dtype: KvDtype = "auto"
    """Element type of the KV blocks; auto takes --dtype's. fp8 (e4m3) and int8 hold about twice the
    tokens of 16 bits, rounded: each head of a token has a scale of its own."""
    device: Device = "auto"
    """auto, cpu, cuda or cuda:N; auto takes a GPU if there is one."""
    num_threads: Count | None = None
    """CPU threads of the engine, of all its ranks together; all cores if not given."""
    tensor_parallel_size: Count = 1
    """Processes that share the model, each with a part of every layer and of every token's KV. The
    two tiers may differ."""
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """Most tokens of a sequence, prompt and output; the model's own limit if not given."""
    block_size: BlockSize = 16
    """Tokens per KV block. The two tiers may differ."""
    kv_cache_memory_bytes: ByteSize | None = None
    """Memory for KV blocks, such as 512MiB or 2GB; if not given, what --max-num-seqs sequences of
    --max-model-len tokens need, within --gpu-memory-utilization."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of a GPU's memory, as far as it is free, or of the memory that a machine without one
    has free at the start, that weights, activations and KV blocks may take."""
    num_gpu_blocks_override: Count | None = None
    """Number of KV blocks (on any device), in place of the one that memory gives."""
    enable_prefix_caching: bool = True
    """Keep KV of past prompts and reuse it for prompts that begin alike."""
    max_num_seqs: Count = 64
    """Most sequences in one batch."""
    max_num_batched_tokens: Count = 2048
    """Most new tokens in one batch: longer prompts are computed in chunks."""

    lora_modules: LoraModules = ()
    """LoRA adapters, NAME=PATH, that requests may name in place of the model: PATH is a folder as
    PEFT saves one. Repeat the option or separate with commas for several. All workers of both tiers
    need the same ones."""
    max_lora_rank: Count = 16
    """Largest rank of an adapter."""

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
        if self.engine == "oracle" and self.tensor_parallel_size > 1:
            raise ValueError(
                f"--tensor-parallel-size={self.tensor_parallel_size}: --engine=oracle has no model "
                "to share; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        """Each running sequence adds a token to a batch, so that a smaller batch would starve the
        last of them."""
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
        return self
