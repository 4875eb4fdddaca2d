"""Draft heads from the multi-token prediction (MTP) layers that checkpoints have after their last
layer.

    h = fc(norm(e) | norm(s)), a layer of the target's own kind; logits: head(norm(h))

(DeepSeek-V3, arXiv 2412.19437, section 2.2.) e: the embedding of the token, s: the target's last
states after its norm, or h of the draft before. Tensors of layer N, the first one that the target
does not use, are named as in vLLM: model.layers.N.{enorm, hnorm, eh_proj, shared_head.norm,
shared_head.head, embed_tokens}, besides those of every layer.

Embeddings and output layer are shared with the target if the checkpoint has equal ones, or none,
for the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open

from baton.errors import UnsupportedModel
from baton_kernels.layer import Norm
from engine.checkpoint import find_shards
from engine.families.config import ModelConfig
from engine.families.layers import LinearSpec, Source, VectorSpec, describe_layer
from engine.families.registry import FAMILIES
from engine.torch.decoder import Decoder
from engine.torch.draft_head import DraftHead, HeadConfig, HeadParts, stored_sizes
from engine.torch.load import keeps_as_stored
from engine.torch.packed import Packing
from engine.torch.parameters import (
    DenseLayer,
    EmptyTensors,
    Linear,
    Target,
    Vector,
    layer_targets,
    quantizable_names,
    whole_target,
)
from engine.torch.weights import load_weights


def read_mtp_config(folder: Path, target: ModelConfig) -> HeadConfig:
    """Config of the checkpoint's first layer for multi-token prediction. Raises
    UnsupportedModel."""
    if not FAMILIES[target.family].has_mtp_layers or not target.traits.num_unused_layers:
        known = (name for name, family in FAMILIES.items() if family.has_mtp_layers)
        raise UnsupportedModel(
            f"{folder}: a {target.family} model with "
            f"num_nextn_predict_layers={target.traits.num_unused_layers}: layers for multi-token "
            f"prediction are read of {', '.join(known)}; give another --speculative-method"
        )
    stored = target.quantization
    if stored is not None and stored.kind != "float":
        raise UnsupportedModel(
            f"{folder}: layers for multi-token prediction are read in 16 or 32 bits, or float8; "
            "give another --speculative-method"
        )
    experts = target.traits.experts
    if experts is not None:
        experts = replace(experts, layers=(*experts.layers, True))
    model = replace(
        target,
        num_layers=target.num_layers + 1,
        windows=(*target.windows, target.windows[-1]),
        traits=replace(target.traits, experts=experts),
    )
    return HeadConfig("mtp", model, (), None)


def mtp_weight_bytes(folder: Path, config: HeadConfig, dtype_bytes: int) -> int:
    """Bytes of the layer without tensors shared with the target. Assumes that float8 is widened."""
    shared = {_name(config, part) for part in ("embed_tokens.weight", "shared_head.head.weight")}
    sizes = stored_sizes(folder)
    shared -= _own_tensors(folder, config, sizes)
    prefix = _name(config, "")
    own = (sizes[name] for name in sizes if name.startswith(prefix) and name not in shared)
    return sum(own) * dtype_bytes


def load_mtp_head(
    folder: Path, config: HeadConfig, target: Decoder, device: torch.device
) -> DraftHead:
    """Raises MissingTensor, TensorMismatch, ModelError."""
    own = _own_tensors(folder, config, stored_sizes(folder))
    found = _empty_head(config, own, target.dtype, device)
    stored = config.model.quantization
    keeps = keeps_as_stored(target.dtype, device)
    linears = [*found.layer.linears, found.fc, *([found.lm_head] if found.lm_head else ())]
    packing = Packing(device, linears, keeps)
    load_weights(folder, found, quantization=stored, keeper=packing)
    parts = HeadParts(
        fc=packing.linear(found.fc),
        layer=packing.layer(found.layer),
        token_norm=packing.norm(found.token_norm),
        state_norm=packing.norm(found.state_norm),
        norm=packing.norm(found.norm),
        lm_head=None if found.lm_head is None else packing.linear(found.lm_head),
        embeddings=found.embeddings,
    )
    # Only one layer runs; it is the first in the head's own KV.
    runs = replace(config.model, num_layers=1, windows=config.model.windows[-1:])
    return DraftHead(replace(config, model=runs), parts, target)


def _name(config: HeadConfig, part: str) -> str:
    return f"model.layers.{config.model.num_layers - 1}.{part}"


def _own_tensors(folder: Path, config: HeadConfig, names: Iterable[str]) -> frozenset[str]:
    """Names of the layer's embeddings and output layer, if present and different from the
    target's."""
    output = "model.embed_tokens.weight" if config.model.is_tied else "lm_head.weight"
    pairs = (
        (_name(config, "embed_tokens.weight"), "model.embed_tokens.weight"),
        (_name(config, "shared_head.head.weight"), output),
    )
    known = set(names)
    mapped = _mapped(folder, {name for pair in pairs for name in pair})
    return frozenset(
        own
        for own, shared in pairs
        if own in known and not (shared in known and torch.equal(mapped[own], mapped[shared]))
    )


def _mapped(folder: Path, names: set[str]) -> dict[str, torch.Tensor]:
    """Map the tensors that exist, by name."""
    found = {}
    for path in find_shards(folder):
        with safe_open(path, framework="pt", device="cpu") as shard:
            for name in names.intersection(shard.keys()):
                found[name] = shard.get_tensor(name)
    return found


@dataclass(frozen=True, slots=True)
class _MtpParameters:
    """A Fillable. lm_head, embeddings [vocab, hidden]: None for the target's. prefix: of the
    layer's tensor names."""

    fc: Linear
    layer: DenseLayer
    token_norm: Norm[Vector]
    state_norm: Norm[Vector]
    norm: Norm[Vector]
    lm_head: Linear | None
    embeddings: torch.Tensor | None
    prefix: str
    has_stacked_experts: bool = False

    @property
    def device(self) -> torch.device:
        return self.norm.weight.numbers.device

    @property
    def _linears(self) -> list[Linear]:
        return [self.fc, *([] if self.lm_head is None else [self.lm_head])]

    def targets(self) -> Iterator[tuple[str, Target]]:
        yield from layer_targets(self.layer)
        for norm in (self.token_norm, self.state_norm, self.norm):
            yield norm.weight.target()
        for linear in self._linears:
            yield from linear.targets()
        if self.embeddings is not None:
            yield f"{self.prefix}embed_tokens.weight", whole_target(self.embeddings)

    def linear_names(self) -> frozenset[str]:
        return quantizable_names([*self.layer.linears, *self._linears])

    def ignores(self, name: str) -> bool:
        """Whether the tensor belongs to the target, or equals one of the target's."""
        shared = ("embed_tokens.weight", "shared_head.head.weight")
        return not name.startswith(self.prefix) or name.removeprefix(self.prefix) in shared


def _empty_head(
    config: HeadConfig, own: frozenset[str], dtype: torch.dtype, device: torch.device
) -> _MtpParameters:
    """own: see _own_tensors."""
    model, empty = config.model, EmptyTensors(dtype, device, device)
    size, vocab = model.hidden_size, model.vocab_size

    def norm(part: str) -> Norm[Vector]:
        name = _name(config, f"{part}.weight")
        return Norm(empty.vector(VectorSpec(name, size)), model.rms_norm_eps)

    def linear(part: str, num_in: int, num_out: int) -> Linear:
        source = Source(_name(config, part), range(num_out), num_out)
        return empty.linear(LinearSpec((source,), num_in))

    has_output = _name(config, "shared_head.head.weight") in own
    has_embeddings = _name(config, "embed_tokens.weight") in own
    embeddings = torch.empty(vocab, size, dtype=dtype, device=device) if has_embeddings else None
    return _MtpParameters(
        linear("eh_proj", 2 * size, size),
        describe_layer(model, model.num_layers - 1).map(empty.linear, empty.vector),
        norm("enorm"),
        norm("hnorm"),
        norm("shared_head.norm"),
        linear("shared_head.head", size, vocab) if has_output else None,
        embeddings,
        _name(config, ""),
    )
