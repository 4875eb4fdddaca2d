"""Draft heads over a target's hidden states: their forward, and their checkpoints.

At position t a head gets token t + 1 and the target's states at t; it predicts token t + 2 and a
state of its own, from which it drafts further. All heads have one decoder layer with its own KV;
they differ in the layer's input.

    eagle    h = fc(e | s), a layer without a norm before its attention; the target's output layer
             (EAGLE, arXiv 2401.15077). s: the target's last states, normalised.
    eagle3   h = fc(s), and attention over norm(e) | norm(h); a vocabulary of its own
             (EAGLE-3, arXiv 2503.01840). s: states at three of the target's layers, side by side.
    mtp      see engine.torch.mtp.

e is the target's embedding of the token. The folders of the first two are those that vLLM and
SGLang read: LlamaForCausalLMEagle and LlamaForCausalLMEagle3.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open

from baton.errors import MissingTensor, ModelError, TensorMismatch, UnsupportedModel
from baton.types import KvLayout
from baton_kernels.kv_write import head_rows
from baton_kernels.layer import Attention, AttentionShape, Layer, Mlp, Norm
from baton_kernels.linear import Linear, pack_linear
from engine.checkpoint import find_shards
from engine.families.config import ModelConfig
from engine.families.read import parse_config
from engine.torch.decoder import Decoder, LayerKv, PackedBatch, normed
from engine.torch.packed import PackedParameters

#: Kind of head, by architecture.
ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLMEagle": "eagle",
    "EagleLlamaForCausalLM": "eagle",
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
}

#: Logit of tokens outside the head's vocabulary; finite, unlike -inf.
IMPOSSIBLE = -1e30


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """kind: see the module. model: config with the head's layer as its last one, and the target's
    vocabulary. layers: layers of the target with inputs that the head gets (the number of layers
    stands for the last one's output); empty: the target's last states after the norm.
    draft_vocab_size: None for the target's."""

    kind: str
    model: ModelConfig
    layers: tuple[int, ...]
    draft_vocab_size: int | None


def read_raw_config(folder: Path, what: str) -> dict[str, Any]:
    """Read config.json of a folder with heads. what: name of the heads, for the error. Raises
    ModelError."""
    path = folder / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}; give the folder of {what}") from error
    return raw


def read_head_config(folder: Path, target: ModelConfig) -> HeadConfig:
    """Raises ModelError, UnsupportedModel."""
    raw = read_raw_config(folder, "an EAGLE head")
    names = raw.get("architectures") or [""]
    kind = ARCHITECTURES.get(names[0])
    if kind is None:
        raise UnsupportedModel(
            f"{folder}: architectures={names}: heads are {', '.join(ARCHITECTURES)}; give one"
        )
    model = parse_config({"model_type": "llama", **raw, "architectures": ["LlamaForCausalLM"]})
    if (
        model.num_layers != 1
        or model.quantization is not None
        or model.has_qkv_bias
        or model.has_mlp_bias
    ):
        raise UnsupportedModel(
            f"{folder}: heads of one layer without biases and quantisation are read"
        )
    if (model.hidden_size, model.vocab_size) != (target.hidden_size, target.vocab_size):
        raise ModelError(
            f"{folder}: hidden_size={model.hidden_size}, vocab_size={model.vocab_size}, but the "
            f"target has {target.hidden_size} and {target.vocab_size}; give a head that was made "
            "for it"
        )
    if kind == "eagle":
        return HeadConfig(kind, model, (), None)
    return HeadConfig(
        kind, model, _layers(folder, raw, target.num_layers), raw.get("draft_vocab_size")
    )


def _layers(folder: Path, raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers that config.json names, else vLLM's default."""
    given = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(given or (2, num_layers // 2, num_layers - 3))
    if not all(isinstance(layer, int) and 0 <= layer <= num_layers for layer in layers):
        raise ModelError(
            f"{folder}: eagle_aux_hidden_state_layer_ids={list(layers)}, but the target has "
            f"{num_layers} layers"
        )
    return layers


class DraftHead(Decoder):
    """A head on one device. Holds no sequence's data."""

    def __init__(self, config: HeadConfig, parts: HeadParts, target: Decoder) -> None:
        """target: provides embeddings and output layer if the head has none."""
        # Placeholders: the inherited decoder code runs the layer only.
        nothing = torch.empty(0, dtype=target.dtype)
        eps = config.model.rms_norm_eps
        super().__init__(
            config.model,
            PackedParameters(nothing, (parts.layer,), Norm(nothing, eps), parts.fc),
        )
        self.head = config
        self._parts, self._target = parts, target

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Combine the target's states [tokens, layers * hidden] for `forward_head`: [tokens,
        hidden]."""
        return self._parts.fc(states) if self.head.kind == "eagle3" else states

    def forward_head(
        self, batch: PackedBatch, states: torch.Tensor, pool: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the tokens' KV; return the sampled rows' states [rows, hidden] and logits [rows,
        vocab] float32.

        states [tokens, hidden]: of the position before each token's.
        """
        parts, layer = self._parts, self._parts.layer
        if parts.embeddings is None:
            embedded = self._target.embed(batch.token_ids)
        else:
            embedded = F.embedding(batch.token_ids, parts.embeddings)
        x = torch.cat((normed(parts.token_norm, embedded), normed(parts.state_norm, states)), -1)
        hidden = states
        if self.head.kind != "eagle3":
            hidden = parts.fc(x)
            x = normed(layer.before_attention, hidden)
        kv = LayerKv(pool, None, 0, head_rows(batch.first_rows, pool))
        mixed = self._attention(0, layer, x, batch, kv, None)
        if batch.sampled is not None:
            hidden, mixed = hidden[batch.sampled], mixed[batch.sampled]
        hidden = self._add(layer.attention.output, mixed, hidden, None)
        hidden = self._mlp(0, layer, hidden)
        last = normed(parts.norm, hidden)
        if parts.lm_head is None:
            return hidden, self._target.logits(last)
        found = parts.lm_head(last, None, torch.float32)
        return hidden, spread(found, parts.tokens, self.head.model.vocab_size)


@dataclass(frozen=True, slots=True)
class HeadParts:
    """token_norm, state_norm: norms of the two inputs; norm: before the output layer; each may be
    None. lm_head, embeddings [vocab, hidden]: None for the target's. tokens [draft vocabulary]
    int64: ids of lm_head's rows; None for all."""

    fc: Linear
    layer: Layer[Linear, torch.Tensor]
    token_norm: Norm[torch.Tensor] | None = None
    state_norm: Norm[torch.Tensor] | None = None
    norm: Norm[torch.Tensor] | None = None
    lm_head: Linear | None = None
    tokens: torch.Tensor | None = None
    embeddings: torch.Tensor | None = None


def load_head(folder: Path, config: HeadConfig, target: Decoder, device: torch.device) -> DraftHead:
    """Raises MissingTensor, TensorMismatch, ModelError."""
    tensors = HeadTensors(folder, target.dtype, device, ("model.",))
    model, is_eagle3 = config.model, config.kind == "eagle3"
    size, inner = model.hidden_size, model.intermediate_size
    num_q, num_kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    name = (
        "midlayer" if is_eagle3 and tensors.has("midlayer.self_attn.q_proj.weight") else "layers.0"
    )
    wide = 2 * size if is_eagle3 else size

    def norm(part: str) -> Norm[torch.Tensor]:
        return Norm(tensors.take(f"{part}.weight", size), model.rms_norm_eps)

    def linear(num_in: int, *outs: tuple[str, int]) -> Linear:
        return pack_linear(
            torch.cat([tensors.take(f"{part}.weight", out, num_in) for part, out in outs]), None
        )

    shape = AttentionShape(
        model.num_heads, model.num_kv_heads, model.head_dim, model.traits.attention_scale, None
    )
    attention: Attention[Linear, torch.Tensor] = Attention(
        shape,
        linear(
            wide,
            (f"{name}.self_attn.q_proj", num_q),
            (f"{name}.self_attn.k_proj", num_kv),
            (f"{name}.self_attn.v_proj", num_kv),
        ),
        None,
        None,
        linear(num_q, (f"{name}.self_attn.o_proj", size)),
    )
    mlp = Mlp(
        model.traits.activation,
        linear(size, (f"{name}.mlp.gate_proj", inner), (f"{name}.mlp.up_proj", inner)),
        linear(inner, (f"{name}.mlp.down_proj", size)),
    )
    layer = Layer(None, attention, None, norm(f"{name}.post_attention_layernorm"), mlp, None)
    num_states = len(config.layers) if is_eagle3 else 2
    fc_bias = tensors.take("fc.bias", size) if tensors.has("fc.bias") else None
    fc = pack_linear(tensors.take("fc.weight", size, num_states * size), fc_bias)
    if not is_eagle3:
        return DraftHead(config, HeadParts(fc, layer), target)
    num_tokens = config.draft_vocab_size or model.vocab_size
    tokens = None
    if tensors.has("d2t"):
        tokens = tensors.take_whole("d2t", num_tokens).to(torch.int64) + torch.arange(
            num_tokens, device=device
        )
        check_tokens(folder, "d2t", tokens, model.vocab_size)
    parts = HeadParts(
        fc,
        layer,
        norm(f"{name}.input_layernorm"),
        norm(f"{name}.hidden_norm"),
        norm("norm"),
        linear(size, ("lm_head", num_tokens)),
        tokens,
    )
    return DraftHead(config, parts, target)


def check_tokens(folder: Path, name: str, tokens: torch.Tensor, vocab_size: int) -> None:
    """Raises TensorMismatch if tokens of a head's vocabulary are none of the target's."""
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise TensorMismatch(f"{folder}: {name!r} names tokens that are not in [0, {vocab_size})")


def spread(logits: torch.Tensor, tokens: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Logits [..., tokens of a head's vocabulary] as [..., vocab_size]. tokens: None for the
    target's vocabulary."""
    if tokens is None:
        return logits
    whole = logits.new_full((*logits.shape[:-1], vocab_size), IMPOSSIBLE)
    return whole.index_copy_(-1, tokens, logits)


class HeadTensors:
    """Tensors of a head's folder, by name without prefix."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, prefixes: Sequence[str]
    ) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self._found: dict[str, torch.Tensor] = {}
        for path in find_shards(folder):
            with safe_open(path, framework="pt", device="cpu") as shard:
                for name in shard.keys():  # noqa: SIM118, it is no mapping
                    prefix = next((p for p in prefixes if name.startswith(p)), "")
                    self._found[name.removeprefix(prefix)] = shard.get_tensor(name)

    def has(self, name: str) -> bool:
        return name in self._found

    def size(self, name: str) -> int:
        """Number of elements; 0 if the tensor is missing."""
        return self._found[name].numel() if self.has(name) else 0

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Take a tensor in the target's dtype. Raises as take_whole does."""
        return self.take_whole(name, *shape).to(self._dtype)

    def take_whole(self, name: str, *shape: int) -> torch.Tensor:
        """Take a tensor in its stored dtype. Raises MissingTensor, TensorMismatch."""
        tensor = self._found.get(name)
        if tensor is None:
            raise MissingTensor(
                f"{self._folder}: tensor {name!r} is missing; the head is not whole"
            )
        if tuple(tensor.shape) != shape:
            raise TensorMismatch(
                f"{self._folder}: tensor {name!r} is {list(tensor.shape)}, but config.json makes "
                f"it {list(shape)}"
            )
        return tensor.to(self._device)


def stored_sizes(folder: Path) -> dict[str, int]:
    """Number of elements of each tensor in a folder's safetensors, by name; reads headers only.
    Raises ModelError."""
    sizes = {}
    for path in find_shards(folder):
        with safe_open(path, framework="pt", device="cpu") as shard:
            for name in shard.keys():  # noqa: SIM118, it is no mapping
                sizes[name] = math.prod(shard.get_slice(name).get_shape())
    return sizes


def head_layout(config: HeadConfig, dtype: str, block_size: int) -> KvLayout:
    """Layout of a block of the head's KV."""
    model = config.model
    return KvLayout(
        "", 1, model.num_kv_heads, model.head_dim, dtype, block_size, parts=model.kv_parts
    )


def head_kv_config(config: HeadConfig, max_model_len: int) -> ModelConfig:
    """Config of the head's layer for contexts as long as the target's."""
    return replace(
        config.model,
        max_position_embeddings=max(max_model_len, config.model.max_position_embeddings),
    )
