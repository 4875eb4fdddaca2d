"""Options of all tiers together."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from baton.config.decode_options import DecodeTierOptions
from baton.config.engine_options import EngineOptions
from baton.config.fields import BlockSize, Count, Devices
from baton.config.gateway_options import FrontDoorOptions
from baton.config.kv_tier_options import KvTierOptions
from baton.config.options import LivenessOptions, NumericsOptions
from baton.config.worker_options import HandoffOptions, PeerOptions, PrefillTierOptions


class ServeOptions(
    EngineOptions,
    PrefillTierOptions,
    DecodeTierOptions,
    KvTierOptions,
    HandoffOptions,
    FrontDoorOptions,
    LivenessOptions,
    NumericsOptions,
    PeerOptions,
):
    """Options of `baton serve`, which starts all tiers on this machine."""

    own_options: ClassVar[frozenset[str]] = (
        FrontDoorOptions.own_options
        | EngineOptions.model_fields.keys()
        | PrefillTierOptions.model_fields.keys()
        | DecodeTierOptions.model_fields.keys()
        | {
            *("num_prefill_workers", "num_decode_workers"),
            *("prefill_block_size", "decode_block_size"),
            *("prefill_tensor_parallel_size", "decode_tensor_parallel_size"),
            *("prefill_pipeline_parallel_size", "decode_pipeline_parallel_size"),
        }
    ) - {
        *("model", "served_model_name", "gpu_memory_utilization"),
        # Their values have commas, which separate models.
        *("rope_scaling", "hf_overrides"),
    }

    num_prefill_workers: Count = 1
    """Number of prefill processes per model."""
    num_decode_workers: Count = 1
    """Number of decode processes per model."""
    num_gateways: Count = 1
    """Number of gateway processes, all on the same ports."""
    prefill_devices: Devices = ()
    """GPU numbers of the prefill workers, assigned in turn; one worker per GPU unless
    --num-prefill-workers is given. If not given, the workers of both tiers are distributed over all
    GPUs. Of several ranks, the first one's: the others have the GPUs after it."""
    decode_devices: Devices = ()
    """GPUs of the decode workers, as --prefill-devices."""
    prefill_block_size: BlockSize | None = None
    """Tokens per KV block in the prefill tier; --block-size if not given."""
    decode_block_size: BlockSize | None = None
    """Tokens per KV block in the decode tier; --block-size if not given."""
    prefill_tensor_parallel_size: Count | None = None
    """Processes per prefill worker that share the model; --tensor-parallel-size if not given."""
    decode_tensor_parallel_size: Count | None = None
    """Processes per decode worker that share the model; --tensor-parallel-size if not given."""
    prefill_pipeline_parallel_size: Count | None = None
    """Stages of a prefill worker; --pipeline-parallel-size if not given."""
    decode_pipeline_parallel_size: Count | None = None
    """Stages of a decode worker; --pipeline-parallel-size if not given."""
    prefill_gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Part of --gpu-memory-utilization for the prefill tier if both tiers share a device; if not
    given, all workers get equal parts."""

    @model_validator(mode="after")
    def _check_aliases(self) -> Self:
        both = sorted(set(self.aliases_of(self.model_name)) & set(self.adapter_paths))
        if both:
            raise ValueError(
                f"--lora-modules: {both[0]!r} is one of --served-model-aliases; give the adapter "
                "another name"
            )
        return self

    @model_validator(mode="after")
    def _check_store(self) -> Self:
        if self.response_store_bytes and self.num_gateways > 1:
            raise ValueError(
                "--response-store-bytes: goes with one gateway, for each keeps its own answers; "
                "leave out --num-gateways"
            )
        return self

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        if self.device not in ("auto", "cuda") and (self.prefill_devices or self.decode_devices):
            option = "prefill-devices" if self.prefill_devices else "decode-devices"
            raise ValueError(
                f"--{option}: names GPUs, and --device={self.device} is where all workers go; "
                "leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_number_at_start(self) -> Self:
        num_prefill = 0 if self.colocated else self.num_prefill_workers
        number = num_prefill + self.num_decode_workers
        if self.max_workers is not None and self.max_workers < number:
            raise ValueError(
                f"--max-workers={self.max_workers}: is less than the {number} workers to start "
                "with; give more, or fewer of these"
            )
        return self

    @model_validator(mode="after")
    def _check_memory(self) -> Self:
        of_prefill = self.prefill_gpu_memory_utilization
        if of_prefill is not None and of_prefill >= self.gpu_memory_utilization:
            raise ValueError(
                f"--prefill-gpu-memory-utilization={of_prefill:g}: leaves nothing of "
                f"--gpu-memory-utilization={self.gpu_memory_utilization:g} to the decode tier; "
                "give less"
            )
        return self

    @model_validator(mode="after")
    def _check_colocated(self) -> Self:
        of_prefill = {name for name in type(self).model_fields if name.startswith("prefill_")}
        of_prefill |= {"num_prefill_workers", *PrefillTierOptions.model_fields}
        meaningless = of_prefill & self.model_fields_set
        if self.colocated and meaningless:
            name = min(meaningless).replace("_", "-")
            raise ValueError(f"leave out --{name}: with --colocated there are no prefill workers")
        return self
