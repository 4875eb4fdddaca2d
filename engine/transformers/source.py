"""Engine models with transformers' own layers: see engine.transformers.

Importing this imports transformers, which takes seconds: only a worker with such a model does.

Numerics: linear layers and attention are ours, so they do not depend on the batch. Other operations
of the model's code are torch functions, and their last bit may depend on a tensor's size:
activations and rotary embeddings of widths that are no multiple of 32, or with a number of threads
that is no power of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from baton.errors import AdapterError, ConfigError, UnsupportedModel
from baton.types import DTYPE_BYTES, KEY_VALUE
from baton_kernels.attention_backends import REFERENCE, AttentionBackend
from baton_kernels.sampling import checked_argmax
from engine.checkpoint import HeadFiles
from engine.families.overrides import NO_OVERRIDES, ConfigOverrides
from engine.families.read import read_quantization
from engine.interface import Batch
from engine.kv.tensors.stateful import ELEMENT_BYTES, StatefulKvPool
from engine.memory_plan import HeadMemory
from engine.model_source import EnginePlan, LoadedModel
from engine.quantization.config import QuantizationConfig
from engine.ranks.followers import Followers, NoFollowers, TensorPool
from engine.ranks.mesh import Degrees
from engine.torch.adapters import Adapter
from engine.torch.divided import LayerDone
from engine.torch.sequence_states import SequenceStates
from engine.torch.step import fault, pack_tokens, take_drawn
from engine.torch.step_runner import NO_STATES
from engine.torch.weights import (
    ProgressHook,
    digest_checkpoint,
    read_dequantized,
    terminal_progress,
)
from engine.transformers.describe import Description, describe
from engine.transformers.load import TransformersDecoder, load_model


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

    def for_length(self, max_model_len: int) -> TransformersModel:  # noqa: ARG002
        """See ModelSource: lengths on which it depends are refused."""
        return self

    def check_ranks(self, degrees: Degrees, device: torch.device) -> None:
        if self.num_state_layers and device.type != "cpu":
            raise ConfigError.of(
                "device",
                device.type,
                f"{self._description.architecture} has layers with a state, which run on a CPU "
                "alone yet; use cpu",
            )
        if degrees.num_ranks > 1:
            raise ConfigError.of(
                "pipeline_parallel_size" if degrees.pipeline > 1 else "tensor_parallel_size",
                degrees.num_ranks,
                f"{self._description.architecture} runs by transformers' code, which no ranks "
                "share; leave it out",
            )

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
        dequantised."""
        found = self._description
        return (found.num_weights + found.head_weights) * DTYPE_BYTES[dtype]

    def activation_bytes(self, dtype: str, num_tokens: int, num_seqs: int, max_len: int) -> int:
        """See ModelSource. Norms and activations may be computed in float32."""
        found = self._description
        tokens = num_tokens * found.layer_width * max(4, DTYPE_BYTES[dtype])
        gathered = 2 * max_len * found.num_kv_heads * found.head_dim * DTYPE_BYTES[dtype]
        return tokens + gathered + 3 * num_seqs * found.vocab_size * 4

    def graph_bytes(self, plan: EnginePlan) -> int:  # noqa: ARG002
        return 0

    def head_memory(self, files: HeadFiles, dtype: str, block_size: int) -> HeadMemory:  # noqa: ARG002
        raise ConfigError.of("speculative_method", files.method, NO_STATES)

    def load(self, plan: EnginePlan, progress: ProgressHook | None) -> LoadedModel:
        dtype = getattr(torch, plan.dtype)
        if progress is not None:
            tensors, digest = self._read(dtype, progress)
        else:
            with terminal_progress() as show:
                tensors, digest = self._read(dtype, show)
        decoder = load_model(
            self._folder, self._description, dtype, plan.device, tensors, self._overrides
        )
        return _LoadedTransformers(digest, decoder)

    def _read(
        self, dtype: torch.dtype, progress: ProgressHook
    ) -> tuple[dict[str, torch.Tensor] | None, str]:
        """Tensors that transformers cannot read itself (None if it can), and the digest of all."""
        if self._quantization is None:
            return None, digest_checkpoint(self._folder, progress)
        transposed = self._description.transposed
        return read_dequantized(self._folder, self._quantization, dtype, transposed, progress)


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
    followers: Followers = NoFollowers()

    def __init__(self, digest: str, decoder: TransformersDecoder) -> None:
        self.digest, self._decoder = digest, decoder

    def steps(self, pool: TensorPool) -> TransformersSteps:
        """See LoadedModel. All steps run eagerly."""
        return TransformersSteps(self._decoder, pool)

    def close(self) -> None:
        """See LoadedModel."""


class TransformersSteps:
    """See StepRunner."""

    def __init__(self, decoder: TransformersDecoder, pool: TensorPool) -> None:
        self._decoder, self._pool = decoder, pool

    def run(
        self, batch: Batch, layer_done: LayerDone | None, drawn: torch.Tensor | None = None
    ) -> TransformersStep:
        if not batch.slices:
            return TransformersStep(torch.empty(0, 0), self._decoder)
        pool = self._pool
        tokens = pack_tokens(batch, pool.tensor)
        if drawn is not None:
            take_drawn(tokens.token_ids, batch, drawn)
        if not isinstance(pool, StatefulKvPool):
            hidden = self._decoder.forward(tokens, pool.tensor, layer_done, pool.scales)
            return TransformersStep(hidden, self._decoder)
        of_sequences = tuple(_begin_states(pool, batch))
        hidden = self._decoder.forward(tokens, pool.tensor, layer_done, pool.scales, of_sequences)
        for part in batch.slices:
            pool.end_step(part.block_table, part.start, part.start + len(part.token_ids))
        return TransformersStep(hidden, self._decoder)


def _begin_states(pool: StatefulKvPool, batch: Batch) -> Iterator[SequenceStates]:
    """Yield the states of each slice. Raises EngineFault for a slice with missing earlier
    states."""
    first_token = 0
    for index, part in enumerate(batch.slices):
        num_tokens = len(part.token_ids)
        try:
            before, after = pool.begin_step(part.block_table, part.start)
        except ValueError as error:
            raise fault(str(error), [index]) from error
        yield SequenceStates(first_token, num_tokens, before, after)
        first_token += num_tokens


@dataclass(frozen=True, slots=True)
class TransformersStep:
    """See StepOutput. states: [rows, hidden], at the batch's sample rows."""

    states: torch.Tensor
    decoder: TransformersDecoder

    @property
    def num_rows(self) -> int:
        return len(self.states)

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        return self.decoder.logits(self.states if len(rows) == self.num_rows else self.states[rows])

    def best(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return checked_argmax(self.logits(rows))
