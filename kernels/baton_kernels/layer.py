"""The parts of a decoder layer, each with its linear layers, norms and sizes.

    h = h + after(attention(before(h)))      norms before and after a part may be missing
    h = h + after(mlp(before(h)))

One description serves from checkpoint to kernels: `LinearT` is the type of a linear layer,
`VectorT` that of a norm's weight, and `Layer.map` converts both: names and shapes, then tensors to
fill, then packed weights, then arguments of native code. A model family composes these parts
(engine.families.layers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

LinearT = TypeVar("LinearT")
VectorT = TypeVar("VectorT")
_L = TypeVar("_L")
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class Norm(Generic[VectorT]):
    """See baton_kernels.rms_norm."""

    weight: VectorT
    eps: float

    def map(self, vector: Callable[[VectorT], _V]) -> Norm[_V]:
        return Norm(vector(self.weight), self.eps)


def _map(norm: Norm[VectorT] | None, vector: Callable[[VectorT], _V]) -> Norm[_V] | None:
    return None if norm is None else norm.map(vector)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes and options of attention; heads are those of this rank.

    KV per token: num_kv_heads keys and values of head_dim elements. scale: factor of scores;
    window: positions that a token sees, itself included, or None for all; rope: index of the
    model's rotary embedding; softcap: see baton_kernels.paged_attention.ScoreTerms.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    rope: int = 0
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Attention(Generic[LinearT, VectorT]):
    """Attention with a KV head for one or more query heads. qkv stacks queries, keys and values.
    q_norm and k_norm run before RoPE, per head ([head_dim]) or over all heads. sinks [heads]
    float32: see baton_kernels.paged_attention.ScoreTerms."""

    shape: AttentionShape
    qkv: LinearT
    q_norm: Norm[VectorT] | None
    k_norm: Norm[VectorT] | None
    output: LinearT
    sinks: VectorT | None = None

    def map(
        self, linear: Callable[[LinearT], _L], vector: Callable[[VectorT], _V]
    ) -> Attention[_L, _V]:
        return Attention(
            self.shape,
            linear(self.qkv),
            _map(self.q_norm, vector),
            _map(self.k_norm, vector),
            linear(self.output),
            None if self.sinks is None else vector(self.sinks),
        )


@dataclass(frozen=True, slots=True)
class LatentAttention(Generic[LinearT, VectorT]):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), with the
    up-projections of keys and values absorbed into queries and outputs.

        c | k = latent(x), q | r = query(query_norm(query_down(x)))    the latter of each head h
        row   = latent_norm(c) | rope(k)                               all that is kept of a token
        out   = values[h](sum_j softmax_j((keys[h](q) | rope(r)) . row_j * scale) c_j)

    shape: of the attention over rows; head_dim is the size of a row. rope_dim: number of rotated
    elements, at the end of a row. Without query_down, x goes into query directly. keys and values
    have one linear layer per head.
    """

    shape: AttentionShape
    rope_dim: int
    query_down: LinearT | None
    query_norm: Norm[VectorT] | None
    query: LinearT
    latent: LinearT
    latent_norm: Norm[VectorT]
    keys: tuple[LinearT, ...]
    values: tuple[LinearT, ...]
    output: LinearT

    def map(
        self, linear: Callable[[LinearT], _L], vector: Callable[[VectorT], _V]
    ) -> LatentAttention[_L, _V]:
        return LatentAttention(
            self.shape,
            self.rope_dim,
            None if self.query_down is None else linear(self.query_down),
            _map(self.query_norm, vector),
            linear(self.query),
            linear(self.latent),
            self.latent_norm.map(vector),
            tuple(map(linear, self.keys)),
            tuple(map(linear, self.values)),
            linear(self.output),
        )


@dataclass(frozen=True, slots=True)
class Mlp(Generic[LinearT]):
    """down(gated(gate_up(x))), gated by swiglu ("silu"), geglu ("gelu_tanh") or clamped_swiglu
    ("clamped_silu"); gate_up stacks gate and up."""

    activation: str
    gate_up: LinearT
    down: LinearT

    def map(self, linear: Callable[[LinearT], _L]) -> Mlp[_L]:
        return Mlp(self.activation, linear(self.gate_up), linear(self.down))


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen and weighted: see baton_kernels.experts.route.

    is_sigmoid: scores are sigmoids of the logits, not their softmax; is_normalised: weights add up
    to `scale`; num_groups: groups of consecutive experts; num_chosen_groups: groups that may be
    chosen from, ranked by the sum of their group_top (1 or 2) largest scores.
    """

    num_experts: int
    num_chosen: int
    is_sigmoid: bool
    is_normalised: bool
    scale: float
    num_groups: int
    num_chosen_groups: int
    group_top: int = 2


@dataclass(frozen=True, slots=True)
class Experts(Generic[LinearT, VectorT]):
    """Mixture of experts: each token runs through the MLPs that the router chooses, and through the
    shared one, if there is one. bias [experts] float32: see baton_kernels.experts. owners: the
    process that has each expert as a whole; empty if this one has all, or a part of each."""

    routing: Routing
    router: LinearT
    bias: VectorT | None
    experts: tuple[Mlp[LinearT], ...]
    shared: Mlp[LinearT] | None
    owners: tuple[int, ...] = ()

    def map(
        self, linear: Callable[[LinearT], _L], vector: Callable[[VectorT], _V]
    ) -> Experts[_L, _V]:
        return Experts(
            self.routing,
            linear(self.router),
            None if self.bias is None else vector(self.bias),
            tuple(expert.map(linear) for expert in self.experts),
            None if self.shared is None else self.shared.map(linear),
            self.owners,
        )


@dataclass(frozen=True, slots=True)
class Layer(Generic[LinearT, VectorT]):
    """Attention and an MLP or a mixture of experts, each between its norms."""

    before_attention: Norm[VectorT] | None
    attention: Attention[LinearT, VectorT] | LatentAttention[LinearT, VectorT]
    after_attention: Norm[VectorT] | None
    before_mlp: Norm[VectorT] | None
    mlp: Mlp[LinearT] | Experts[LinearT, VectorT]
    after_mlp: Norm[VectorT] | None

    def map(
        self, linear: Callable[[LinearT], _L], vector: Callable[[VectorT], _V]
    ) -> Layer[_L, _V]:
        """Convert the layer: `linear` and `vector` are called for each linear layer and vector, in
        the order of `linears` and `vectors`."""
        mlp = self.mlp
        return Layer(
            _map(self.before_attention, vector),
            self.attention.map(linear, vector),
            _map(self.after_attention, vector),
            _map(self.before_mlp, vector),
            mlp.map(linear) if isinstance(mlp, Mlp) else mlp.map(linear, vector),
            _map(self.after_mlp, vector),
        )

    def with_linears(self, linears: Iterable[_L]) -> Layer[_L, VectorT]:
        """Replace the linear layers; new ones come in the order of `linears`."""
        given = iter(linears)
        return self.map(lambda _: next(given), lambda vector: vector)

    @property
    def linears(self) -> tuple[LinearT, ...]:
        found: list[LinearT] = []
        self.map(found.append, _ignore)
        return tuple(found)

    @property
    def vectors(self) -> tuple[VectorT, ...]:
        found: list[VectorT] = []
        self.map(_ignore, found.append)
        return tuple(found)


def _ignore(_: object) -> None:
    """Callback for a walk that skips these items."""
