"""Engine models with transformers' own layers: see engine.transformers.

Importing this imports transformers, which takes seconds: only a worker with such a model does.

Numerics: linear layers and attention are ours, so they do not depend on the batch. Other operations
of the model's code are torch functions, and their last bit may depend on a tensor's size:
activations and rotary embeddings of widths that are no multiple of 32, or with a number of threads
that is no power of two.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import transformers

from baton.errors import AdapterError, ConfigError, UnsupportedModel
from baton.types import DTYPE_BYTES, KEY_VALUE, KvLayout
from baton_kernels.attention_backends import REFERENCE, AttentionBackend
from engine.checkpoint import HeadFiles
from engine.families.overrides import NO_OVERRIDES, ConfigOverrides
from engine.families.read import read_quantization
from engine.kv.part import KvPart
from engine.kv.tensors.ranks import pool_sizes
from engine.memory_plan import HeadMemory
from engine.model_source import EnginePlan, Graphs, LoadedModel
from engine.quantization.config import QuantizationConfig
from engine.ranks.followers import Followers, TensorPool
from engine.ranks.mesh import Degrees, Stage
from engine.ranks.parts import rank_parts
from engine.ranks.rank_spec import ForeignConfig, Recording, part_bytes
from engine.ranks.start import start_followers
from engine.shard import Shard
from engine.torch.adapters import Adapter
from engine.torch.sequence_states import ELEMENT_BYTES
from engine.torch.step_runner import NO_STATES, StepRunner
from engine.torch.weights import (
    ProgressHook,
    digest_checkpoint,
    read_dequantized,
    terminal_progress,
)
from engine.transformers.describe import Description, describe
from engine.transformers.load import TransformersDecoder, load_model
from engine.transformers.recordable import why_not
from engine.transformers.steps import TransformersSteps

_log = logging.getLogger(__name__)

#: See RankSpec.code.
RANK_MODEL = "engine.transformers.rank_model"


class TransformersModel:
    """ModelSource of any decoder that transformers supports with KV of softmax attention, or with
    states of the kinds in engine.transformers.states."""

    kernels = f"transformers{transformers.__version__}"

    takes_grouped_kv = False

    def __init__(self, folder: Path, overrides: ConfigOverrides = NO_OVERRIDES) -> None:
        """Raises UnsupportedModel with the unsupported feature."""
        self._overrides = overrides
        found, self._quantization = describe(folder, overrides), read_quantization(folder)
        if self._quantization is not None and found.transposed:
            _check_transposed(found, self._quantization)
        self._folder, self._description = folder, found
        self.name = f"{found.architecture} by transformers {transformers.__version__}"
        self.dtype, self.vocab_size = found.dtype, found.vocab_size
        self.windows, self.num_kv_heads = found.windows, found.num_kv_heads
        self.num_layers = len(found.windows)
        self.num_state_layers = len(found.state_layers)
        self.state_layer_bytes = found.state_elements * ELEMENT_BYTES
        self.head_dim, self.kv_parts = found.head_dim, KEY_VALUE
        self.max_len = self.longest_len = found.max_len
        self.kv_digest = found.kv_digest
        self._why_not_recorded: str | None = None
        """See why_not; None until it was asked."""

    def for_length(self, max_model_len: int) -> TransformersModel:  # noqa: ARG002
        """See ModelSource: lengths on which it depends are refused."""
        return self

    def check_ranks(self, degrees: Degrees, device: torch.device) -> None:
        _check_degrees(self._description, degrees, device)

    def rank_parts(self, layout: KvLayout, degrees: Degrees) -> tuple[KvPart, ...]:
        """See ModelSource."""
        stages = (Stage(number, degrees.pipeline) for number in range(degrees.pipeline))
        return rank_parts(layout, degrees, tuple(map(self._description.stage_states, stages)))

    def choose_attention(
        self,
        name: str,
        dtype: str,  # noqa: ARG002
        kv_dtype: str,  # noqa: ARG002
        device: torch.device,  # noqa: ARG002
        block_size: int,  # noqa: ARG002
    ) -> AttentionBackend:
        """See ModelSource. Baton's own alone."""
        if name not in ("auto", REFERENCE.name):
            raise ConfigError.of(
                "attention_backend",
                name,
                f"{self._description.architecture} runs by transformers' code with Baton's "
                "attention; use auto",
            )
        return REFERENCE

    def check_batch_invariant(self, dtype: str, device: torch.device) -> None:  # noqa: ARG002
        """See ModelSource. What else the model computes is torch's."""
        raise ConfigError.of(
            "batch_invariant",
            True,
            f"{self._description.architecture} runs by transformers' code, which promises no such "
            "thing; leave it out",
        )

    def read_adapter(
        self,
        folder: Path,
        dtype: str,  # noqa: ARG002
        device: torch.device,  # noqa: ARG002
        max_rank: int,  # noqa: ARG002
    ) -> Adapter:
        """See ModelSource. Not supported."""
        raise AdapterError(
            f"{folder}: {self._description.architecture} runs by transformers' code, which takes "
            "no adapters here; merge the adapter into the model, and serve that"
        )

    def weight_bytes(self, dtype: str, device: torch.device, degrees: Degrees) -> int:  # noqa: ARG002
        """See ModelSource. A tied output layer is a separate copy; quantised weights are
        dequantised. Each rank has all embeddings."""
        found = self._description
        shared = -(-found.num_weights // (degrees.tensor * degrees.pipeline))
        return (shared + found.head_weights) * DTYPE_BYTES[dtype]

    def activation_bytes(self, dtype: str, num_tokens: int, num_seqs: int, max_len: int) -> int:
        """See ModelSource. Norms and activations may be computed in float32."""
        found = self._description
        tokens = num_tokens * found.layer_width * max(4, DTYPE_BYTES[dtype])
        gathered = 2 * max_len * found.num_kv_heads * found.head_dim * DTYPE_BYTES[dtype]
        return tokens + gathered + 3 * num_seqs * found.vocab_size * 4

    def graph_bytes(self, plan: EnginePlan) -> int:
        recording = self._recording(plan)
        if recording is None:
            return 0
        # Imported here, because it imports Triton, which is optional.
        from engine.transformers.recorded import recorded_bytes

        dtype = getattr(torch, plan.dtype)
        return recorded_bytes(recording, self._description, plan.layout, dtype)

    def _recording(self, plan: EnginePlan) -> Recording | None:
        """Decode steps to record; None if all run operation by operation."""
        # Ranks share memory of the host: no GPU has several.
        if plan.graphs is None or plan.degrees.num_ranks > 1:
            return None
        if self._why_not_recorded is None:
            self._why_not_recorded = why_not(self._folder, self._description, self._overrides)
            if self._why_not_recorded:
                name = self._description.architecture
                _log.warning(
                    "decode steps of %s run operation by operation: %s",
                    name,
                    self._why_not_recorded,
                )
        if self._why_not_recorded:
            return None
        return Recording(plan.graphs.max_tokens, plan.max_seqs, plan.max_len)

    def head_memory(self, files: HeadFiles, dtype: str, block_size: int) -> HeadMemory:  # noqa: ARG002
        raise ConfigError.of("speculative_method", files.method, NO_STATES)

    def load(self, plan: EnginePlan, progress: ProgressHook | None) -> LoadedModel:
        found = self._description
        config = ForeignConfig(found.hidden_size, self._overrides)
        parts = self.rank_parts(plan.layout, plan.degrees)
        followers = start_followers(
            *(plan.degrees, plan.backend, self._folder, config, plan.dtype),
            pool_sizes(plan.layout, plan.num_blocks, 0, parts),
            plan.max_tokens + plan.max_seqs,
            nodes=plan.nodes,
            kv_service=plan.kv_service,
            parts=parts,
            staging_bytes=part_bytes(found.widest, plan.degrees.tensor, 4),
            code=RANK_MODEL,
            num_state_slots=plan.max_seqs,
        )
        stage = Stage(0, plan.degrees.pipeline)

        def load(progress: ProgressHook) -> tuple[TransformersDecoder, str]:
            dtype = getattr(torch, plan.dtype)
            return self.load_decoder(dtype, plan.device, progress, followers.shard, stage)

        try:
            if progress is not None:
                decoder, digest = load(progress)
            else:
                with terminal_progress() as show:
                    decoder, digest = load(show)
            groups = followers.wait_ready(digest)
            decoder.join(groups.tensor, followers.stages)
        except BaseException:
            followers.close()
            raise
        return _LoadedTransformers(
            digest, decoder, followers, found, plan.graphs, self._recording(plan)
        )

    def load_decoder(
        self,
        dtype: torch.dtype,
        device: torch.device,
        progress: ProgressHook,
        shard: Shard,
        stage: Stage,
    ) -> tuple[TransformersDecoder, str]:
        """A rank's part of the model, to be joined, and the digest of the whole checkpoint. Raises
        ModelError."""
        tensors, digest = self._read(dtype, progress)
        found = self._description
        decoder = load_model(
            *(self._folder, found, dtype, device, tensors, self._overrides, shard, stage)
        )
        return decoder, digest

    def _read(
        self, dtype: torch.dtype, progress: ProgressHook
    ) -> tuple[dict[str, torch.Tensor] | None, str]:
        """Tensors that transformers cannot read itself (None if it can), and the digest of all."""
        if self._quantization is None:
            return None, digest_checkpoint(self._folder, progress)
        transposed = self._description.transposed
        return read_dequantized(self._folder, self._quantization, dtype, transposed, progress)


def _check_degrees(found: Description, degrees: Degrees, device: torch.device) -> None:
    """Raise ConfigError unless ranks can share the model."""
    others = {
        degrees.context_option: degrees.context,
        "enable_expert_parallel": degrees.whole_experts,
    }
    for name, value in others.items():
        if value > 1 or value is True:
            raise ConfigError.of(
                name,
                value,
                f"{found.architecture} runs by transformers' code, which ranks share by layers "
                "(tensor_parallel_size, pipeline_parallel_size) alone; leave it out",
            )
    if degrees.num_summands > 1:
        raise ConfigError.of(
            *("tensor_parallel_cut", degrees.cut),
            f"{found.architecture} runs by transformers' code, of which ranks share the outputs; "
            "leave it out",
        )
    size, num_stages, num_layers = degrees.tensor, degrees.pipeline, len(found.windows)
    if degrees.num_ranks > 1 and device.type != "cpu":
        raise ConfigError.of(
            *("device", device.type),
            f"{degrees.num_ranks} ranks share memory of the host; use cpu, or one rank",
        )
    if num_stages > 1 and any(layer.is_reader for layer in found.layers):
        raise ConfigError.of(
            *("pipeline_parallel_size", num_stages),
            f"layers of {found.architecture} read the KV of earlier ones, which another stage may "
            "have; leave it out",
        )
    if num_stages > num_layers:
        raise ConfigError.of(
            *("pipeline_parallel_size", num_stages),
            f"the model has {num_layers} layers with KV, and each stage needs one; use 1 to "
            f"{num_layers}",
        )
    heads, kv_heads = found.num_heads, found.num_kv_heads
    fitting = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
    ]
    if size not in fitting:
        raise ConfigError.of(
            *("tensor_parallel_size", size),
            f"num_heads={heads} and num_kv_heads={kv_heads} do not divide by it; this model takes "
            f"{', '.join(map(str, fitting))}",
        )


def _check_transposed(found: Description, quantization: QuantizationConfig) -> None:
    """Raise UnsupportedModel for quantised [in, out] weights, except from GPTQ: its tools transpose
    them; what other methods do is unknown."""
    if quantization.method != "gptq":
        raise UnsupportedModel(
            f"{found.architecture} keeps its weights as [in, out], of which "
            f"quantization_config.quant_method={quantization.method} is not known: gptq is read; "
            "use the unquantised checkpoint"
        )


class _LoadedTransformers:
    """See LoadedModel."""

    shared_prompt_limit = None

    def __init__(
        self,
        digest: str,
        decoder: TransformersDecoder,
        followers: Followers,
        description: Description,
        graphs: Graphs | None,
        recording: Recording | None,
    ) -> None:
        """recording: decode steps to record by `graphs`; None if all run operation by operation."""
        self.digest, self._decoder, self.followers = digest, decoder, followers
        self._description, self._graphs, self._recording = description, graphs, recording

    def steps(self, pool: TensorPool) -> StepRunner:
        """See LoadedModel."""
        eager = TransformersSteps(self._decoder, pool, self.followers)
        if self._graphs is None or self._recording is None:
            return eager
        from engine.transformers.recorded import RecordedTransformers, record

        model = RecordedTransformers(self._decoder, self._description, pool)
        return record(self._recording, self._graphs, model, eager, self.followers)

    def close(self) -> None:
        """See LoadedModel."""
        self.followers.close()
