"""Medusa heads (Medusa-1, arXiv 2401.10774): their forward, and their checkpoints.

The target's last state at position t, after its norm, predicts token t + 1; head k predicts token t
+ 2 + k from the same state, all heads at once:

    h = x, then h = h + silu(W h + b) of each of its layers; logits: output_k(h)

Heads do not see earlier heads' drafts and have no state per sequence. Two checkpoint layouts are
supported, of num_heads heads (medusa_num_heads) with num_hidden_layers layers (medusa_num_layers):

    vLLM              blocks.K.layers.J.weight and .bias, lm_heads.K.weight, token_map; with
                      original_lm_head, lm_heads.0.weight (or else the target's) is for all heads
    FasterDecoding    K.J.linear.weight and .bias, K.NUM_LAYERS.weight

Names may begin with "medusa_heads." or "medusa_head.".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from baton.errors import ModelError, UnsupportedModel
from baton_kernels.linear import Linear, pack_linear
from engine.checkpoint import HeadFiles
from engine.families.config import ModelConfig
from engine.interface import SampleRow
from engine.torch.decoder import Decoder
from engine.torch.draft_head import HeadTensors, check_tokens, read_raw_config, spread
from engine.torch.engine import TorchEngine
from engine.torch.hidden_states import HiddenStates, draw_several

#: Names in config.json.
MODEL_TYPE, ARCHITECTURE = "medusa", "MedusaModel"


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """hidden_size, vocab_size: the target's. num_tokens: size of the heads' vocabulary; if smaller
    than vocab_size, `token_map` lists its ids. has_one_output: all heads share one output layer.
    logit_scale: factor of their logits."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_tokens: int
    has_one_output: bool
    logit_scale: float


def read_medusa_config(folder: Path, target: ModelConfig) -> MedusaConfig:
    """Raises ModelError, UnsupportedModel."""
    raw = read_raw_config(folder, "Medusa heads")
    kind, names = raw.get("model_type"), raw.get("architectures") or []
    if "medusa_num_heads" not in raw and kind != MODEL_TYPE and ARCHITECTURE not in names:
        raise UnsupportedModel(
            f"{folder}: model_type={kind}, architectures={names}: Medusa heads have {MODEL_TYPE} "
            f"or {ARCHITECTURE} there, or medusa_num_heads; give such, or another "
            "--speculative-method"
        )
    given = {
        "hidden_size": raw.get("hidden_size", target.hidden_size),
        "vocab_size": raw.get("vocab_size", target.vocab_size),
    }
    if given != {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}:
        raise ModelError(
            f"{folder}: hidden_size={given['hidden_size']}, vocab_size={given['vocab_size']}, but "
            f"the target has {target.hidden_size} and {target.vocab_size}; give heads that were "
            "made for it"
        )
    num_heads = _count(folder, raw, ("medusa_num_heads", "num_heads"), 5)
    num_layers = _count(folder, raw, ("medusa_num_layers", "num_hidden_layers"), 1)
    num_tokens = raw.get("truncated_vocab_size") or target.vocab_size
    return MedusaConfig(
        num_heads,
        num_layers,
        target.hidden_size,
        target.vocab_size,
        num_tokens,
        bool(raw.get("original_lm_head", False)),
        float(raw.get("logit_scale", 1.0)),
    )


def _count(folder: Path, raw: Mapping[str, Any], names: tuple[str, ...], default: int) -> int:
    """Value of the first of `names` in config.json; default: vLLM's."""
    name = next((name for name in names if name in raw), names[0])
    value = raw.get(name, default)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{folder}: {name}={value!r}: must be a number, at least 1")
    return value


@dataclass(frozen=True, slots=True)
class MedusaParts:
    """first: the first layers of all heads, stacked; layers: later layers, by head; outputs: output
    layers, one per head, one for all, or none for the target's. tokens [num_tokens] int64: ids of
    the outputs' rows; None for all."""

    first: Linear
    layers: tuple[tuple[Linear, ...], ...]
    outputs: tuple[Linear, ...]
    tokens: torch.Tensor | None


class MedusaHeads:
    """The heads on one device."""

    def __init__(self, config: MedusaConfig, parts: MedusaParts, target: Decoder) -> None:
        """target: gives the output layer where the heads have none."""
        self._config, self.num_heads = config, config.num_heads
        self._parts, self._target = parts, target

    def draft(
        self,
        states: Sequence[torch.Tensor],
        rows: Sequence[Sequence[SampleRow]],
        num_tokens: int,
    ) -> tuple[tuple[tuple[int, ...], ...], ...] | None:
        """For each sequence's rows, of which all have equally many, num_tokens different tokens:
        those that one of the first heads finds likeliest, the likeliest first. states [1, hidden]:
        of each sequence, the target's. None if nothing can be drawn for one of them."""
        num_heads = len(rows[0])
        with torch.inference_mode():
            logits = self.logits(torch.cat(list(states)), num_heads)
            each = [row for own in rows for row in own]
            found = draw_several(logits.flatten(0, 1), each, num_tokens)
        if found is None:
            return None
        return tuple(found[first : first + num_heads] for first in range(0, len(found), num_heads))

    def logits(self, states: torch.Tensor, num_heads: int) -> torch.Tensor:
        """[rows, num_heads, vocab] float32 of the first heads, for the target's states [rows,
        hidden]."""
        config, parts = self._config, self._parts
        rows, size = states.shape
        first = parts.first(states).view(rows, config.num_heads, size)[:, :num_heads]
        hidden = states[:, None] + F.silu(first)
        if config.num_layers > 1:
            heads = list(hidden.unbind(1))
            for k, layers in enumerate(parts.layers[:num_heads]):
                for layer in layers:
                    heads[k] = heads[k] + F.silu(layer(heads[k].contiguous()))
            hidden = torch.stack(heads, 1)
        if len(parts.outputs) > 1:
            each = zip(parts.outputs, hidden.unbind(1), strict=False)
            found = torch.stack([out(x.contiguous(), None, torch.float32) for out, x in each], 1)
        elif parts.outputs:
            found = parts.outputs[0](hidden.reshape(-1, size), None, torch.float32)
        else:
            found = self._target.logits(hidden.reshape(-1, size))
        found = found.view(rows, num_heads, -1)
        if config.logit_scale != 1.0:
            found = found * config.logit_scale
        return spread(found, parts.tokens, config.vocab_size)


def open_medusa(engine: TorchEngine, files: HeadFiles) -> tuple[MedusaHeads, HiddenStates]:
    """The heads in `files` for the engine's model, and the states that the engine gives when it is
    asked to. Raises ConfigError and ModelError."""
    target = engine.watchable_steps().model
    config = read_medusa_config(files.folder, target.config)
    heads = load_medusa(files.folder, config, target.decoder, engine.device)
    return heads, HiddenStates(partial(engine.watch, ()))


def load_medusa(
    folder: Path, config: MedusaConfig, target: Decoder, device: torch.device
) -> MedusaHeads:
    """Raises MissingTensor, TensorMismatch, ModelError."""
    tensors = HeadTensors(folder, target.dtype, device, ("medusa_heads.", "medusa_head."))
    size, num_tokens, last = config.hidden_size, config.num_tokens, config.num_layers
    is_published = tensors.has("0.0.linear.weight")

    def layer_name(head: int, layer: int) -> str:
        return f"{head}.{layer}.linear" if is_published else f"blocks.{head}.layers.{layer}"

    def layer(heads: range, place: int) -> Linear:
        names = [layer_name(head, place) for head in heads]
        weight = torch.cat([tensors.take(f"{name}.weight", size, size) for name in names])
        has_bias = tensors.has(f"{names[0]}.bias")
        bias = [tensors.take(f"{name}.bias", size) for name in names] if has_bias else []
        return pack_linear(weight, torch.cat(bias) if bias else None)

    def output(head: int) -> Linear:
        name = f"{head}.{last}.weight" if is_published else f"lm_heads.{head}.weight"
        # As in vLLM: full-size outputs keep only the rows of the heads' vocabulary.
        if tokens is not None and tensors.size(name) == config.vocab_size * size:
            return pack_linear(tensors.take(name, config.vocab_size, size)[tokens], None)
        return pack_linear(tensors.take(name, num_tokens, size), None)

    tokens = None
    if num_tokens < config.vocab_size:
        tokens = tensors.take_whole("token_map", num_tokens).to(torch.int64)
        check_tokens(folder, "token_map", tokens, config.vocab_size)
    if not config.has_one_output:
        outputs = tuple(output(head) for head in range(config.num_heads))
    elif tensors.has("lm_heads.0.weight"):
        outputs = (output(0),)
    elif tokens is None:
        outputs = ()
    else:
        raise ModelError(
            f"{folder}: original_lm_head with truncated_vocab_size={num_tokens} needs the tensor "
            "'lm_heads.0.weight'; the heads are not whole"
        )
    first = layer(range(config.num_heads), 0)
    rest = tuple(
        tuple(layer(range(head, head + 1), place) for place in range(1, last))
        for head in range(config.num_heads)
    )
    return MedusaHeads(config, MedusaParts(first, rest, outputs, tokens), target)
