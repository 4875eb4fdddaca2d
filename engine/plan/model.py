"""Sizes of a model that memory and time follow from: weights by part, attention, KV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.types import DTYPE_BYTES, KvLayout
from baton_kernels.layer import Experts
from engine.families.layers import LayerSpec, LinearSpec, describe_layers, describe_norm

if TYPE_CHECKING:
    from engine.families.config import ModelConfig
    from engine.quantization.config import QuantizationConfig
    from engine.transformers.describe import Description

#: Bytes of a scale in the roofline: 16 bits.
_SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers of weights. quantized: of those kept as the checkpoint's levels."""

    plain: int = 0
    quantized: int = 0

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.plain + other.plain, self.quantized + other.quantized)

    @property
    def total(self) -> int:
        return self.plain + self.quantized


@dataclass(frozen=True, slots=True)
class Storage:
    """Types of weights. dtype: of plain weights, and of activations; levels: of quantised weights,
    such as int4. level_bytes, loaded_level_bytes: of one with its scale, as a step reads it, and as
    engine.memory_plan.weight_bytes counts it. product_dtype: inputs of the quantised layers'
    products."""

    dtype: str
    levels: str = ""
    level_bytes: float = 0.0
    loaded_level_bytes: float = 0.0
    product_dtype: str = ""

    def read_bytes(self, weights: Weights) -> float:
        return weights.plain * DTYPE_BYTES[self.dtype] + weights.quantized * self.level_bytes

    def loaded_bytes(self, weights: Weights) -> float:
        return weights.plain * DTYPE_BYTES[self.dtype] + weights.quantized * self.loaded_level_bytes


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """One layer. experts: all of them; other: norms, biases and routers. pair_flops: operations of
    attention for one query token and one key token, over all heads. window: tokens that attention
    sees, None for all. has_state: a state takes the place of attention over KV."""

    attention: Weights
    mlp: Weights
    experts: Weights
    other: Weights
    pair_flops: int
    window: int | None = None
    has_state: bool = False

    @property
    def total(self) -> Weights:
        return self.attention + self.mlp + self.experts + self.other


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A model. embeddings: weights of the table; head: of the output layer, which is
    a copy of the table if is_tied. num_experts, num_chosen: of a layer with experts; 0 without.
    attention_width, inner_width: elements of a token between the linear layers of attention and of
    the MLP. layout: KV of the whole model."""

    name: str
    storage: Storage
    layers: tuple[LayerSizes, ...]
    embeddings: int
    head: Weights
    norm: int
    is_tied: bool
    hidden_size: int
    attention_width: int
    inner_width: int
    num_experts: int
    num_chosen: int
    layout: KvLayout
    max_len: int
    longest_len: int

    @property
    def num_parameters(self) -> int:
        """Tied embeddings count once."""
        head = 0 if self.is_tied else self.head.total
        return sum(layer.total.total for layer in self.layers) + self.embeddings + head + self.norm

    def expected_experts(self, num_tokens: int) -> float:
        """Expected share of a layer's experts that some token of a batch chooses, if all are
        equally likely."""
        if not self.num_experts:
            return 0.0
        missed = 1 - self.num_chosen / self.num_experts
        return 1.0 - float(missed**num_tokens)


def native_storage(
    dtype: str, stored: QuantizationConfig | None, *, keeps_levels: bool, has_float8: bool
) -> Storage:
    """Types of the weights of Baton's own families. keeps_levels: quantised layers run as their
    levels."""
    if stored is None or not keeps_levels:
        return Storage(dtype)
    if stored.packed_bytes:
        return Storage(dtype, stored.method, stored.packed_bytes, stored.packed_bytes, dtype)
    per_group = 1 / stored.group_size if stored.group_size else 0.0
    loaded = 1.0 + (4 * per_group if stored.kind == "float" else 0.0)
    name = f"{'float' if stored.kind == 'float' else 'int'}{stored.bits}"
    product = "fp8" if stored.kind == "float" and has_float8 else dtype
    level_bytes = stored.bits / 8 + _SCALE_BYTES * per_group
    return Storage(dtype, name, level_bytes, loaded, product)


def native_sizes(
    config: ModelConfig, storage: Storage, layout: KvLayout, max_len: int, longest_len: int
) -> ModelSizes:
    """Sizes of a model of Baton's own families."""
    keeps, experts, latent = bool(storage.levels), config.traits.experts, config.traits.latent
    head = config.vocab_size * config.hidden_size
    stored = config.quantization
    has_quantized_head = keeps and stored and stored.output_layer and not config.is_tied
    key_dim = config.head_dim
    value_dim = config.head_dim if latent is None else latent.rank
    layers = tuple(
        _native_layer(
            spec, stored if keeps else None, 2 * config.num_heads * (key_dim + value_dim), window
        )
        for spec, window in zip(describe_layers(config), config.windows, strict=True)
    )
    width = config.num_heads * (config.head_dim if latent is None else latent.value_dim)
    inner = config.intermediate_size
    if experts is not None:
        inner = experts.num_chosen * experts.intermediate_size + experts.shared_size
    return ModelSizes(
        name=config.family,
        storage=storage,
        layers=layers,
        embeddings=head,
        head=Weights(quantized=head) if has_quantized_head else Weights(head),
        norm=describe_norm(config).weight.size,
        is_tied=config.is_tied,
        hidden_size=config.hidden_size,
        attention_width=width,
        inner_width=inner,
        num_experts=experts.num_experts if experts else 0,
        num_chosen=experts.num_chosen if experts else 0,
        layout=layout,
        max_len=max_len,
        longest_len=longest_len,
    )


def _native_layer(
    spec: LayerSpec, stored: QuantizationConfig | None, pair_flops: int, window: int | None
) -> LayerSizes:
    """stored: of layers that run as they are stored; None if none does."""
    attention, mlp, experts = Weights(), Weights(), Weights()
    other = sum(vector.size for vector in spec.vectors)
    for part, linear in _linears(spec):
        other += linear.num_out if linear.has_bias else 0
        count = linear.num_in * linear.num_out
        is_kept = stored and linear.is_quantizable and all(map(stored.is_quantized, linear.names))
        weights = Weights(quantized=count) if is_kept else Weights(count)
        if linear.is_router:
            other += count
        elif part == "attention":
            attention += weights
        elif part == "mlp":
            mlp += weights
        else:
            experts += weights
    return LayerSizes(attention, mlp, experts, Weights(other), pair_flops, window)


def _linears(spec: LayerSpec) -> Iterator[tuple[str, LinearSpec]]:
    """Linear layers with the part that they are of: attention, mlp or experts. A shared expert is
    of the mlp, for every token takes it."""
    mlp = spec.mlp
    routed = (
        {id(linear) for each in mlp.experts for linear in (each.gate_up, each.down)}
        if (isinstance(mlp, Experts))
        else set()
    )
    of_mlp = {id(mlp.gate_up), id(mlp.down)} if not isinstance(mlp, Experts) else set()
    if isinstance(mlp, Experts):
        of_mlp.add(id(mlp.router))
        if mlp.shared is not None:
            of_mlp |= {id(mlp.shared.gate_up), id(mlp.shared.down)}
    for linear in spec.linears:
        at = id(linear)
        yield "experts" if at in routed else "mlp" if at in of_mlp else "attention", linear


def described_sizes(found: Description, dtype: str, layout: KvLayout) -> ModelSizes:
    """Sizes of a model by transformers' code: its weights, spread over its layers. A mixture's
    experts are not told apart, so steps of few sequences read fewer weights than counted."""
    windows = found.windows
    num_layers = len(windows) + len(found.state_layers)
    embeddings = found.vocab_size * found.hidden_size
    is_tied = found.head_weights > 0
    in_layers = found.num_weights - embeddings * (1 if is_tied else 2)
    parts = [in_layers // num_layers] * num_layers
    parts[0] += in_layers - sum(parts)
    pair_flops = 4 * found.num_heads * found.head_dim
    layers = tuple(
        LayerSizes(Weights(), Weights(part), Weights(), Weights(), pair_flops, window)
        if index < len(windows)
        else LayerSizes(Weights(), Weights(part), Weights(), Weights(), 0, None, has_state=True)
        for index, (part, window) in enumerate(
            zip(parts, (*windows, *[None] * len(found.state_layers)), strict=True)
        )
    )
    return ModelSizes(
        name=f"{found.architecture} by transformers' code",
        storage=Storage(dtype),
        layers=layers,
        embeddings=embeddings,
        head=Weights(embeddings),
        norm=0,
        is_tied=is_tied,
        hidden_size=found.hidden_size,
        attention_width=found.num_heads * found.head_dim,
        inner_width=found.layer_width,
        num_experts=0,
        num_chosen=0,
        layout=layout,
        max_len=found.max_len,
        longest_len=found.max_len,
    )


def parts_of(model: ModelSizes) -> Mapping[str, Weights]:
    """Weights by part, in the order of a forward, parts without weights left out."""
    layers = model.layers
    parts = {
        "embeddings": Weights(model.embeddings),
        "attention": sum((layer.attention for layer in layers), Weights()),
        "mlp": sum((layer.mlp for layer in layers), Weights()),
        "experts": sum((layer.experts for layer in layers), Weights()),
        "norms, biases, routers": sum((layer.other for layer in layers), Weights(model.norm)),
        "output layer" if not model.is_tied else "output layer (a copy)": model.head,
    }
    return {name: weights for name, weights in parts.items() if weights.total}
