"""Options of `baton profile-memory`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from baton.config.fields import (
    BlockSize,
    ByteSize,
    Count,
    Device,
    Dtype,
    KvDtype,
    NonEmpty,
    split_commas,
)
from baton.config.options import Options

#: Counts; repeated option or comma-separated.
Counts = Annotated[
    tuple[Count, ...], BeforeValidator(split_commas), Field(json_schema_extra={"metavar": "N"})
]


class ProfileOptions(Options):
    """Options of a memory profile."""

    model: NonEmpty
    """Model to profile: a local directory, or a Hub id that is on this machine."""
    output: Path = Path("memory-profile")
    """Directory of the pictures, index.html and profile.json; made if it does not exist."""
    users: Counts = (1, 10, 15, 50)
    """Numbers of users whose requests are served at once, one run each."""
    input_tokens: Count = 512
    """Prompt of each user, in tokens."""
    output_tokens: Count = 64
    """Answer of each user, in tokens."""
    attention_tokens: Counts = (2048, 4096, 8192)
    """Prompts for which eager attention is compared with paged attention, in tokens. Lengths whose
    scores do not fit in half of the free memory are left out."""
    trace: Path | None = None
    """Recorded load for the waste of KV memory, .csv or .jsonl as for bench.load."""
    trace_requests: Count = 2000
    """Requests of the trace that are replayed."""
    trace_kv_tokens: Count | None = None
    """KV memory of the replay, in tokens; 16 times the longest request if not given."""
    memory_bytes: ByteSize | None = None
    """Memory bound of the longest prompt, for weights, activations and KV; a step's
    activations and twice the 16-bit weights if not given."""
    device: Device = "cpu"
    """cpu, cuda or cuda:N."""
    dtype: Dtype = "auto"
    """Data type of weights and computation; auto takes the checkpoint's."""
    kv_cache_dtype: KvDtype = "auto"
    """Data type of the KV cache; auto takes --dtype."""
    block_size: BlockSize = 16
    """Tokens per KV block."""
    kv_cache_memory_bytes: ByteSize = 64 << 20
    """KV memory of the runs with users."""
    max_num_batched_tokens: Count = 2048
    """Maximum new tokens in one batch; longer prompts are computed in chunks."""
    num_threads: Count | None = None
    """CPU threads; all cores if not given."""
