"""From a checkpoint's folder to parameters that run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from baton_kernels.cpu.library import level, multiplies_bytes
from baton_kernels.linear import keeps_float8, keeps_levels
from baton_kernels.mxfp4_linear import keeps_mxfp4
from engine.families.config import ModelConfig
from engine.quantization.config import QuantizationConfig
from engine.quantization.weight import Float8Weight, Mxfp4Weight, StoredWeight
from engine.ranks.mesh import ALL_LAYERS, Stage
from engine.shard import WHOLE, Shard
from engine.torch.packed import PackedParameters, Packing, pack_parameters
from engine.torch.parameters import empty_parameters
from engine.torch.weights import ProgressHook, load_weights, terminal_progress

_log = logging.getLogger(__name__)


def keeps_stored_levels(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the checkpoint's linear layers run as the levels or codes that it has."""
    stored = config.quantization
    if stored is None:
        return False
    if stored.kind == "mxfp4":
        return keeps_mxfp4(device, dtype)
    if stored.kind == "float":
        num_in = config.hidden_size
        return keeps_float8(device, dtype, num_in, stored.group_size or num_in)
    return keeps_levels(device, dtype, stored.bits, stored.group_size or config.hidden_size)


def keeps_as_stored(dtype: torch.dtype, device: torch.device) -> Callable[[StoredWeight], bool]:
    """Whether a linear layer's weight runs as it is stored, for load_weights."""

    def keeps(weight: StoredWeight) -> bool:
        if isinstance(weight, Mxfp4Weight):
            return weight.has_whole_blocks and keeps_mxfp4(device, dtype)
        if isinstance(weight, Float8Weight):
            return keeps_float8(device, dtype, weight.shape[1], weight.group_size)
        return keeps_levels(device, dtype, weight.bits, weight.group_size)

    return keeps


def _log_types(stored: QuantizationConfig, is_kept: bool) -> None:
    counts = Counter(layer.block_type for layer in stored.layers.values())
    types = ", ".join(f"{name} ({count} tensors)" for name, count in counts.most_common())
    how = "linear layers run as stored" if is_kept else "dequantised: no kernel runs them here"
    _log.info("GGUF weights of %s: %s", types, how)


def _log_int8(stored: QuantizationConfig, device: torch.device) -> None:
    """Say so where steps of several sequences may be slower than with weights of 16 bits."""
    is_int8 = stored.kind == "int" and stored.bits == 8
    if is_int8 and device.type == "cpu" and not multiplies_bytes(name := level()):
        _log.info(
            "int8 weights at level %s, which widens bytes to multiply them: steps of one sequence "
            "are faster than in bfloat16, those of several may be slower (docs/quantization.md)",
            name,
        )


def load_parameters(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: ProgressHook | None = None,
    shard: Shard = WHOLE,
    stage: Stage = ALL_LAYERS,
    *,
    batch_invariant: bool = False,
) -> tuple[PackedParameters, str]:
    """A rank's parameters, ready to run, and the digest of the whole checkpoint.

    batch_invariant: see Packing. progress: sees each tensor read; by default there is a bar
    on a terminal. Files are mapped: what a rank does not keep takes no memory of its own. Raises
    ModelError.
    """
    # Unfilled dense linear layers take no host memory, but would take a GPU's.
    of_linears = torch.device("cpu") if keeps_stored_levels(config, dtype, device) else device
    parameters = empty_parameters(config, dtype, device, shard, of_linears, stage)
    keeps = keeps_as_stored(dtype, device)
    if (stored := config.quantization) is not None:
        is_kept = keeps_stored_levels(config, dtype, device)
        if stored.method == "gguf":
            _log_types(stored, is_kept)
            keeps = keeps if is_kept else lambda _: False
        if is_kept:
            _log_int8(stored, device)
    packing = Packing(device, parameters.linears, keeps, batch_invariant=batch_invariant)

    def load(hook: ProgressHook) -> str:
        return load_weights(
            folder, parameters, hook, config.quantization, packing, parameters.is_elsewhere
        )

    if progress is not None:
        digest = load(progress)
    else:
        with terminal_progress() as show:
            digest = load(show)
    return pack_parameters(parameters, packing), digest
