"""Describes a model's layers: its config as a composition of baton_kernels.layer.

The composition depends on the traits of a config, not on its family. Parameters, packing, ranks,
quantisation, the memory plan and decoders are derived from the description. A linear layer is
described by its place in a checkpoint and by the outputs that a rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from baton_kernels.layer import (
    Attention,
    AttentionShape,
    Experts,
    LatentAttention,
    Layer,
    Mlp,
    Norm,
    Routing,
)
from engine.families.config import ExpertsConfig, LatentConfig, MlpNames, ModelConfig
from engine.shard import WHOLE, Shard

if TYPE_CHECKING:
    import torch


class Columns(NamedTuple):
    """Columns `part` of a checkpoint's weight with `num` columns."""

    part: range
    num: int

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Select the columns of a weight [rows, num], or the groups of columns that hold them from
        scales [rows, groups]."""
        width = rows.shape[1]
        start, stop = self.part.start * width // self.num, -(-self.part.stop * width // self.num)
        return rows[:, start:stop]


@dataclass(frozen=True, slots=True)
class Source:
    """Rows `rows` (possibly with a step of 2) of a checkpoint's layer `name`, which has `num_rows`.

    order: permutation of the rows of each head, where it differs from the checkpoint's: row i is
    row order[i] of the checkpoint. columns: those of the layer's weight; None for all.
    """

    name: str
    rows: range
    num_rows: int
    order: tuple[int, ...] = ()
    columns: Columns | None = None

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Select the rows, and of a weight the columns, of a tensor [num_rows, ...]; returns the
        tensor itself if it selects all in order."""
        own = whole
        if len(self.rows) < self.num_rows:
            own = whole[self.rows.start : self.rows.stop : self.rows.step]
        if self.columns is not None and own.ndim == 2:
            own = self.columns.take(own)
        if not self.order:
            return own
        heads = own.view(-1, len(self.order), *own.shape[1:])
        return heads[:, list(self.order)].flatten(0, 1)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A linear layer: the outputs of one or several checkpoint layers, concatenated.

    is_router: not split among ranks, never quantised, and float32 if is_wide. is_split: its
    checkpoint tensor is shared with other layers, so it is dequantised during reading.
    is_transposed: it computes x W, from num_out to num_in, both as in the checkpoint. num_in: of
    the inputs held here. is_part: another rank adds the bias, which is zero here.
    """

    sources: tuple[Source, ...]
    num_in: int
    has_bias: bool = False
    is_router: bool = False
    is_wide: bool = False
    is_split: bool = False
    is_transposed: bool = False
    is_part: bool = False

    @property
    def is_quantizable(self) -> bool:
        """Whether it may stay quantised."""
        return not (self.is_router or self.is_split)

    @property
    def num_out(self) -> int:
        return sum(len(source.rows) for source in self.sources)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the checkpoint's layers, without repetition."""
        return tuple(dict.fromkeys(source.name for source in self.sources))


@dataclass(frozen=True, slots=True)
class VectorSpec:
    """A vector [size], such as a norm's weights. name: of its tensor; rows: the part held here,
    None for all.

    offset: added to the checkpoint's values; is_wide: float32 regardless of the model's dtype;
    order: see Source.
    """

    name: str
    size: int
    offset: float = 0.0
    is_wide: bool = False
    order: tuple[int, ...] = ()
    rows: range | None = None

    @property
    def source(self) -> Source:
        return Source(self.name, self.rows or range(self.size), self.size, self.order)


LayerSpec = Layer[LinearSpec, VectorSpec]


def describe_layers(
    config: ModelConfig, shard: Shard = WHOLE, layers: range | None = None
) -> tuple[LayerSpec, ...]:
    """Some layers of a model, or all, each reduced to the rank's part."""
    layers = range(config.num_layers) if layers is None else layers
    return tuple(describe_layer(config, index, shard) for index in layers)


def describe_layer(config: ModelConfig, index: int, shard: Shard = WHOLE) -> LayerSpec:
    """Layer `index` of a model."""
    return _Composing(config, shard, index).layer()


def describe_output(config: ModelConfig, shard: Shard = WHOLE) -> LinearSpec:
    """The layer that computes logits; with tied embeddings its tensor is that of the embeddings."""
    source = Source("lm_head", shard.part(config.vocab_size), config.vocab_size)
    return LinearSpec((source,), config.hidden_size)


def describe_norm(config: ModelConfig) -> Norm[VectorSpec]:
    """The norm after the last layer."""
    return _norm(config, "model.norm.weight", config.hidden_size)


def _norm(
    config: ModelConfig, name: str, size: int, order: tuple[int, ...] = ()
) -> Norm[VectorSpec]:
    traits = config.traits
    spec = VectorSpec(name, size, traits.norm_offset, traits.has_wide_norms, order)
    return Norm(spec, config.rms_norm_eps)


#: Names of the norms before and after attention, and before and after the MLP, by Traits.norms.
_NORMS: Mapping[str, tuple[str | None, ...]] = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


class _Composing:
    """Composes layer `index` for one rank."""

    def __init__(self, config: ModelConfig, shard: Shard, index: int) -> None:
        self._config = config
        self._shard = shard
        self._index = index

    def layer(self) -> LayerSpec:
        config, experts, latent = (
            self._config,
            self._config.traits.experts,
            self._config.traits.latent,
        )
        norms = [
            self._norm(part, config.hidden_size) if part else None
            for part in _NORMS[config.traits.norms]
        ]
        before_attention, after_attention, before_mlp, after_mlp = norms
        has_experts = experts is not None and experts.layers[self._index]
        return Layer(
            before_attention,
            self._attention() if latent is None else self._latent_attention(latent),
            after_attention,
            before_mlp,
            self._experts(experts)
            if experts and has_experts
            else self._mlp("mlp", MlpNames(), config.intermediate_size, config.traits.is_fused),
            after_mlp,
        )

    def _name(self, part: str) -> str:
        return f"model.layers.{self._index}.{part}"

    def _norm(self, part: str, size: int, order: tuple[int, ...] = ()) -> Norm[VectorSpec]:
        return _norm(self._config, self._name(f"{part}.weight"), size, order)

    def _source(self, part: str, num_rows: int) -> Source:
        return Source(self._name(part), self._shard.part(num_rows), num_rows)

    def _second(
        self, part: str, num_out: int, num_in: int, *, has_bias: bool = False
    ) -> LinearSpec:
        """A layer that reads the outputs of another."""
        rows, inputs = self._shard.second(num_out, num_in)
        is_cut = len(inputs) < num_in
        columns = Columns(inputs, num_in) if is_cut else None
        source = Source(self._name(part), rows, num_out, columns=columns)
        is_part = is_cut and self._shard.rank > 0
        return LinearSpec((source,), len(inputs), has_bias, is_part=is_part)

    def _attention(self) -> Attention[LinearSpec, VectorSpec]:
        config, traits, shard = self._config, self._config.traits, self._shard
        dim, window = config.head_dim, config.windows[self._index]
        num_q, num_kv = config.num_heads * dim, config.num_kv_heads * dim
        heads, kv_heads = shard.part(config.num_heads), shard.kv_heads(config.num_kv_heads)
        has_own_rope = traits.window_rope is not None and window is not None
        shape = AttentionShape(
            num_heads=len(heads),
            num_kv_heads=len(kv_heads),
            head_dim=dim,
            scale=config.traits.attention_scale,
            window=window,
            rope=int(has_own_rope),
            softcap=traits.attention_softcap,
        )
        kv_rows = range(kv_heads.start * dim, kv_heads.stop * dim)
        order = _head_order(config)
        sources: tuple[Source, ...] = (
            Source(self._name("self_attn.q_proj"), shard.part(num_q), num_q, order),
            Source(self._name("self_attn.k_proj"), kv_rows, num_kv, order),
            Source(self._name("self_attn.v_proj"), kv_rows, num_kv),
        )
        if traits.is_fused:
            sources = _fuse(self._name("self_attn.qkv_proj"), sources)
        q_norm = k_norm = None
        if config.has_qk_norm and traits.has_whole_qk_norm:
            q_norm = self._norm("self_attn.q_norm", num_q, order)
            k_norm = self._norm("self_attn.k_norm", num_kv, order)
        elif config.has_qk_norm:
            q_norm = self._norm("self_attn.q_norm", dim, order)
            k_norm = self._norm("self_attn.k_norm", dim, order)
        hidden, has_bias = config.hidden_size, config.has_output_bias
        sinks = None
        if traits.has_sinks:
            name = self._name("self_attn.sinks")
            sinks = VectorSpec(name, config.num_heads, is_wide=True, rows=heads)
        return Attention(
            shape,
            LinearSpec(sources, config.hidden_size, config.has_qkv_bias),
            q_norm,
            k_norm,
            self._second("self_attn.o_proj", hidden, num_q, has_bias=has_bias),
            sinks,
        )

    def _latent_attention(self, latent: LatentConfig) -> LatentAttention[LinearSpec, VectorSpec]:
        """Each rank holds its query heads, and the whole latent row, which all heads read."""
        config, heads = self._config, self._shard.part(self._config.num_heads)
        hidden, rank = config.hidden_size, latent.rank
        plain, value = latent.plain_dim, latent.value_dim
        shape = AttentionShape(
            len(heads),
            1,
            config.head_dim,
            config.traits.attention_scale,
            self._config.windows[self._index],
        )

        def whole(part: str, num: int, order: tuple[int, ...] = ()) -> LinearSpec:
            source = Source(self._name(f"self_attn.{part}"), range(num), num, order)
            return LinearSpec((source,), hidden, config.has_qkv_bias)

        def of_head(head: int, first: int, num: int, *, is_transposed: bool) -> LinearSpec:
            start = head * (plain + value) + first
            rows = range(start, start + num)
            total = config.num_heads * (plain + value)
            source = Source(self._name("self_attn.kv_b_proj"), rows, total)
            return LinearSpec((source,), rank, is_split=True, is_transposed=is_transposed)

        query_rank, down, norm, name = latent.query_rank, None, None, "q_proj"
        if query_rank is not None:
            down, name = whole("q_a_proj", query_rank), "q_b_proj"
            norm = self._norm("self_attn.q_a_layernorm", query_rank)
        query = self._source(f"self_attn.{name}", config.num_heads * (plain + latent.rope_dim))
        query = replace(query, order=_rope_order(latent, plain))
        return LatentAttention(
            shape,
            latent.rope_dim,
            down,
            norm,
            LinearSpec((query,), query_rank or hidden),
            whole("kv_a_proj_with_mqa", config.head_dim, _rope_order(latent, rank)),
            self._norm("self_attn.kv_a_layernorm", rank),
            tuple(of_head(head, 0, plain, is_transposed=True) for head in heads),
            tuple(of_head(head, plain, value, is_transposed=False) for head in heads),
            self._second(
                "self_attn.o_proj",
                *(hidden, config.num_heads * value),
                has_bias=config.has_output_bias,
            ),
        )

    def _mlp(
        self, folder: str, names: MlpNames, inner: int, is_fused: bool = False
    ) -> Mlp[LinearSpec]:
        config = self._config
        sources = tuple(self._source(f"{folder}.{part}", inner) for part in (names.gate, names.up))
        if is_fused:
            sources = _fuse(self._name(f"{folder}.gate_up_proj"), sources)
        hidden, has_bias = config.hidden_size, config.has_mlp_bias
        return Mlp(
            config.traits.activation,
            LinearSpec(sources, hidden, has_bias),
            self._second(f"{folder}.{names.down}", hidden, inner, has_bias=has_bias),
        )

    def _stacked_mlp(self, name: str, inner: int) -> Mlp[LinearSpec]:
        """An expert of stacked tensors, where rows of gate and up alternate."""
        config, rows = self._config, self._shard.part(inner)
        gate_up = self._name(f"{name}.gate_up_proj")
        gate = range(2 * rows.start, 2 * rows.stop, 2)
        up = range(gate.start + 1, gate.stop + 1, 2)
        sources = tuple(Source(gate_up, part, 2 * inner) for part in (gate, up))
        return Mlp(
            config.traits.activation,
            LinearSpec(sources, config.hidden_size, has_bias=True),
            self._second(f"{name}.down_proj", config.hidden_size, inner, has_bias=True),
        )

    def _experts(self, experts: ExpertsConfig) -> Experts[LinearSpec, VectorSpec]:
        config, names, num = self._config, experts.names, experts.num_experts

        def expert(index: int) -> Mlp[LinearSpec]:
            name, inner = f"{names.folder}.{index}", experts.intermediate_size
            own = _Composing(config, self._shard.of_expert(self._index, index), self._index)
            if experts.is_stacked:
                return own._stacked_mlp(name, inner)
            return own._mlp(name, names.parts, inner)

        router = Source(self._name(names.router), range(num), num)
        bias = VectorSpec(self._name(f"{names.router}.e_score_correction_bias"), num, is_wide=True)
        return Experts(
            Routing(
                num_experts=num,
                num_chosen=experts.num_chosen,
                is_sigmoid=experts.is_sigmoid,
                is_normalised=experts.is_normalised,
                scale=experts.scale,
                num_groups=experts.num_groups,
                num_chosen_groups=experts.num_chosen_groups,
                group_top=experts.group_top,
            ),
            LinearSpec(
                (router,),
                config.hidden_size,
                has_bias=experts.is_stacked,
                is_router=True,
                is_wide=experts.is_sigmoid,
            ),
            bias if experts.is_sigmoid else None,
            tuple(map(expert, range(num))),
            self._mlp("mlp.shared_experts", MlpNames(), experts.shared_size)
            if experts.shared_size
            else None,
            self._shard.experts[self._index] if self._shard.experts else (),
        )


def _head_order(config: ModelConfig) -> tuple[int, ...]:
    """Row order of a head with partial rotation. Kernels expect paired dimensions half a head
    apart; unrotated dimensions fill the rest of both halves. Queries and keys have the same order,
    so their products do not change."""
    rotated, dim = config.rotary_dim, config.head_dim
    if rotated == dim:
        return ()
    half, middle = rotated // 2, rotated + (dim - rotated) // 2
    return (*range(half), *range(rotated, middle), *range(half, rotated), *range(middle, dim))


def _rope_order(latent: LatentConfig, first: int) -> tuple[int, ...]:
    """Row order of a latent head with `first` unrotated rows. The checkpoint stores rotated pairs
    side by side; kernels expect the two of a pair in different halves."""
    if not latent.is_interleaved:
        return ()
    end = first + latent.rope_dim
    return (*range(first), *range(first, end, 2), *range(first + 1, end, 2))


def _fuse(name: str, sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """The same rows, from a checkpoint that stores all these layers in one tensor."""
    total, start, fused = sum(source.num_rows for source in sources), 0, []
    for source in sources:
        rows = range(start + source.rows.start, start + source.rows.stop)
        fused.append(Source(name, rows, total, source.order))
        start += source.num_rows
    return tuple(fused)
