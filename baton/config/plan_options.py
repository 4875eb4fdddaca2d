"""Options of `baton plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from baton.config.fields import (
    BlockSize,
    Count,
    Dtype,
    JsonObject,
    KvDtype,
    Milliseconds,
    ModelImpl,
    NonEmpty,
)
from baton.config.options import Options


class PlanOptions(Options):
    """Options of a plan."""

    model: NonEmpty
    """Model to plan for: a local directory, a config.json, or a Hub id that is on this machine. Its
    weights are not needed."""
    gpus: Count = 1
    """Number of devices."""
    gpu: NonEmpty = "h200"
    """Kind of device: b200, h200, h100, a100, a100-40gb, l40s, l4; or cpu, which measures this
    machine and shares it among --gpus ranks."""
    tensor_parallel_size: Count | None = None
    """Plan only workers with this tensor parallel degree; all that divide the model by default."""
    pipeline_parallel_size: Count | None = None
    """Plan only workers with this number of pipeline stages; all by default."""
    dtype: Dtype = "auto"
    """Data type of weights and computation; auto takes the checkpoint's."""
    kv_cache_dtype: KvDtype = "auto"
    """Data type of the KV cache; auto takes --dtype."""
    model_impl: ModelImpl = "auto"
    """Implementation of the model, as for baton serve."""
    rope_scaling: JsonObject | None = None
    """Rotary scaling that replaces the one in config.json, as for baton serve."""
    hf_overrides: JsonObject | None = None
    """Fields that replace those in config.json, as for baton serve."""
    block_size: BlockSize = 16
    """Tokens per KV block."""
    max_num_seqs: Count = 256
    """Maximum sequences in one batch, to serve with, too (64 there if not given)."""
    max_num_batched_tokens: Count = 2048
    """Maximum new tokens in one batch; longer prompts are computed in chunks."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Fraction of a device's memory for weights, activations and KV blocks."""
    trace: Path | None = None
    """Recorded load for the split into tiers, .csv or .jsonl as for bench.load; its first 2,000
    requests. --input-tokens and --output-tokens if not given."""
    input_tokens: Count = 1024
    """Mean prompt, in tokens. Also the context of the decode steps shown."""
    output_tokens: Count = 256
    """Mean answer, in tokens."""
    slo_ttft_ms: Milliseconds = 1000.0
    """Limit of the time to first token, in milliseconds, kept by 90 % of the requests."""
    slo_tpot_ms: Milliseconds = 50.0
    """Limit of the time per output token, in milliseconds."""
    picture: Path | None = None
    """Also draw the plan into this PNG file; needs matplotlib."""
    is_json: bool = False
    """Print JSON, for programs."""
