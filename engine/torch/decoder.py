"""The decoder's forward over a packed batch: prefill, decode and verification alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from baton_kernels.attention_backends import REFERENCE, AttentionBackend
from baton_kernels.experts import GroupedLinear, combine, headwise_linear, route
from baton_kernels.gated_activation import clamped_swiglu, geglu, swiglu
from baton_kernels.kv_write import head_rows
from baton_kernels.latent_kv_write import latent_kv_write
from baton_kernels.layer import (
    Attention,
    AttentionShape,
    Experts,
    LatentAttention,
    Mlp,
    Norm,
)
from baton_kernels.linear import Linear
from baton_kernels.paged_attention import (
    NO_TERMS,
    AttentionPlan,
    AttentionSlice,
    ScoreTerms,
)
from baton_kernels.rms_norm import rms_norm
from baton_kernels.rope_kv_write import rope_kv_write
from baton_kernels.sampling import NOT_FINITE, checked_argmax
from engine.families.config import ModelConfig
from engine.ranks.cuts import CUTS, Product
from engine.ranks.exchange import Alone, Ranks
from engine.ranks.stages import OneStage, Stages
from engine.torch.adapters import AdapterLayer
from engine.torch.grouped_experts import GroupedExperts, PlacedExperts, group_experts
from engine.torch.packed import PackedLayer, PackedParameters
from engine.torch.rope import Rotation
from engine.torch.sent_experts import SentExperts, send_experts

PackedNorm = Norm[torch.Tensor]
#: Ops that combine gate and up into one row, by Mlp.activation.
GATES = {"silu": swiglu, "gelu_tanh": geglu, "clamped_silu": clamped_swiglu}


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """A step's tokens, the sequences concatenated. All tensors are on the engine's device.

    token_ids, positions, first_rows [tokens] int64; first_rows: see
    baton_kernels.kv_write.head_rows; slices: the tokens of each sequence; sampled [rows] int64:
    tokens to compute logits for, in that order, with repeats; None for all tokens, once each.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    first_rows: torch.Tensor
    slices: Sequence[AttentionSlice]
    sampled: torch.Tensor | None


class Addition(Protocol):
    """What an adapter adds to a product, see engine.torch.adapters.LowRank; or all adapters, each
    to its own rows, see engine.torch.grouped_adapters."""

    def add_to(self, y: torch.Tensor, x: torch.Tensor, rows: Any) -> None: ...


class LogitsAddition(Protocol):
    """The same for the output layer, which has float32 results."""

    def add_to_logits(self, y: torch.Tensor, x: torch.Tensor, rows: Any) -> None: ...


class AdapterRows(NamedTuple):
    """A step's additions of one adapter, or of all. layers, embeddings, output: as in
    engine.torch.adapters.Adapter; rows: those that they are for, of the step's tokens, as each
    Addition takes them; sampled: likewise of its sampled tokens."""

    layers: Sequence[AdapterLayer]
    embeddings: Addition | None
    output: LogitsAddition | None
    rows: Any
    sampled: Any


#: Additions to a layer's products, each with its rows.
_Added = Sequence[tuple[AdapterLayer, Any]]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Metadata of a step for the layers of baton's own families. All tensors are on the engine's
    device.

    token_ids, first_rows, sampled: see PackedTokens; rotations: by AttentionShape.rope, of the
    model's dtype; plans: by window; adapters: for some of the tokens; windowed: KV of windowed
    layers, if it has its own pool.
    """

    token_ids: torch.Tensor
    rotations: tuple[Rotation, ...]
    first_rows: torch.Tensor
    plans: Mapping[int | None, AttentionPlan]
    sampled: torch.Tensor | None
    adapters: tuple[AdapterRows, ...] = ()
    windowed: WindowedKv | None = None


@dataclass(frozen=True, slots=True)
class WindowedKv:
    """KV of windowed layers in its own pool. pool, scales: windowed layers only, in order; the
    forward's main pool has the other layers only. first_rows: the tokens' rows in this pool, see
    PackedTokens."""

    pool: torch.Tensor
    scales: torch.Tensor | None
    first_rows: torch.Tensor


class LayerKv(NamedTuple):
    """Location of a layer's KV: pool, scales, the layer's number in the pool, and the rows of the
    step's tokens, see baton_kernels.kv_write."""

    pool: torch.Tensor
    scales: torch.Tensor | None
    number: int
    rows: torch.Tensor


class Watch:
    """Collects the sampled tokens' hidden states at the inputs of some layers during a forward.

    layers: ascending; the number of layers stands for the output of the last layer, before the
    norm.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._states: list[torch.Tensor] = []

    def add(self, hidden: torch.Tensor, sampled: torch.Tensor | None) -> None:
        """Record the input of the next watched layer: a copy of hidden [tokens, hidden], or of its
        rows `sampled`."""
        self._states.append(hidden.clone() if sampled is None else hidden[sampled])

    def take(self) -> torch.Tensor:
        """Recorded states [rows, layers * hidden], after the forward."""
        return torch.cat(self._states, -1)


class Decoder:
    """A decoder's parameters and its forward, or a stage of it: some of its layers. Holds no
    sequence's data: KV is in the pool.

    With tensor parallelism each rank has a Decoder with its part of the parameters and a pool of
    its heads; all ranks make the same calls.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: PackedParameters,
        ranks: Ranks | None = None,
        attention: AttentionBackend = REFERENCE,
        stages: Stages | None = None,
        experts: Ranks | None = None,
    ) -> None:
        """config: with this rank's heads, see Shard.attention_config, and this stage's layers.
        ranks: the other ranks of the stage, None for a single rank. attention: backend that makes
        the plans of batches. stages: links to other stages, None if this one has all layers.
        experts: ranks with other tokens that share the experts of each layer; None without."""
        self._stages: Stages = stages or OneStage()
        self.stage = self._stages.stage
        self._attend = attention.attend
        self._ranks: Ranks = ranks or Alone()
        self._cut = CUTS[self._ranks.shard.cut](self._ranks)
        self._config = config
        self._parameters = parameters
        self.dtype = parameters.embeddings.dtype
        """Dtype of weights and computation."""
        device = parameters.embeddings.device
        self._grouped = {
            index: group_experts(layer.mlp, self._ranks.shard.rank, device)
            if experts is None
            else send_experts(layer.mlp, experts, device)
            for index, layer in enumerate(parameters.layers)
            if isinstance(layer.mlp, Experts)
        }
        """Runs the experts of a layer, by the layer's index."""
        self._heads = {
            index: _Heads.of(layer.attention)
            for index, layer in enumerate(parameters.layers)
            if isinstance(layer.attention, LatentAttention)
        }
        """Runs the per-head linear layers of latent attention, by the layer's index."""
        scale = torch.tensor(config.traits.embedding_scale, dtype=self.dtype)
        # Rounded to the model's dtype, as in training.
        self._embedding_scale = scale.item()

    def expert_loads(self) -> dict[int, list[int]]:
        """Tokens of each expert so far, by layer of this stage; only of experts that ranks have as
        a whole."""
        placed = self._grouped.items()
        return {
            i: g.loads.tolist() for i, g in placed if isinstance(g, PlacedExperts | SentExperts)
        }

    def forward(
        self,
        batch: PackedBatch,
        pool: torch.Tensor,
        layer_done: Callable[[int], None] | None = None,
        scales: torch.Tensor | None = None,
        watch: Watch | None = None,
    ) -> torch.Tensor:
        """Write the tokens' KV into `pool` (with `scales` if quantised) and into the pool of
        `batch.windowed`; return the sampled tokens' states [rows, hidden], the input of `logits`.
        watch: collects the inputs of other layers.

        One of several stages gets its input from the previous one and sends its result to the
        next: [tokens, hidden], or from the last one [rows, hidden] before the norm. The states are
        then those of `collect`.

        `layer_done` is called with each layer's index once all ranks have written the KV of that
        layer; either every rank passes a hook or none does. After the last layer's KV is written,
        only sampled tokens continue. On return, all ranks have finished with the pool.
        """
        parameters = self._parameters
        hidden = self.begin(batch)
        places = self._places(batch, pool, scales)
        last = len(parameters.layers) - 1 if self.stage.is_last else None
        for index, layer in enumerate(parameters.layers):
            if watch is not None and index in watch.layers:
                watch.add(hidden, batch.sampled)
            added: _Added = [(each.layers[index], each.rows) for each in batch.adapters]
            x = normed(layer.before_attention, hidden)
            mixed = self._attention(index, layer, x, batch, places[index], layer_done, added)
            if index == last and batch.sampled is not None:
                hidden, mixed = hidden[batch.sampled], mixed[batch.sampled]
                added = [(each.layers[index], each.sampled) for each in batch.adapters]
            output, own = layer.attention.output, _of(added, _output)
            inputs = self._cut.inputs(mixed)
            hidden = self._add(output, inputs, hidden, layer.after_attention, own)
            hidden = self._mlp(index, layer, hidden, added)
        if watch is not None and len(parameters.layers) in watch.layers:
            watch.add(hidden, None)
        if self.stage.size > 1:
            self._stages.send(hidden)
            return hidden
        return normed(parameters.norm, hidden)

    def serve_experts(self, layer_done: Callable[[int], None] | None) -> torch.Tensor:
        """In the place of `forward` on a rank that has no tokens of a step: run this rank's experts
        for those of others. Returns the states of no rows."""
        layers = self._parameters.layers
        none = self._parameters.embeddings.new_empty(0, self._config.hidden_size)
        for index, layer in enumerate(layers):
            if layer_done is not None:
                layer_done(index)
            if isinstance(mlp := layer.mlp, Experts):
                chosen = torch.empty(0, mlp.routing.num_chosen, dtype=torch.int32)
                gate = GATES[mlp.experts[0].activation]
                self._grouped[index].parts(none, chosen.to(none.device), gate, self._cut)
        return none

    def collect(self, num_rows: int) -> torch.Tensor:
        """States [rows, hidden] of the oldest forward that was not collected, when the last of
        several stages has sent them. First stage only."""
        hidden = self._parameters.embeddings.new_empty(num_rows, self._config.hidden_size)
        self._stages.receive(hidden)
        return normed(self._parameters.norm, hidden)

    def begin(self, batch: PackedBatch) -> torch.Tensor:
        """The input of this stage's first layer [tokens, hidden], which may be overwritten."""
        if self.stage.is_first:
            return self.embed(batch.token_ids, batch.adapters)
        num_tokens = len(batch.token_ids)
        hidden = self._parameters.embeddings.new_empty(num_tokens, self._config.hidden_size)
        self._stages.receive(hidden)
        return hidden

    def _places(
        self, batch: PackedBatch, pool: torch.Tensor, scales: torch.Tensor | None
    ) -> list[LayerKv]:
        """The KV location of each layer."""
        rows, windows = head_rows(batch.first_rows, pool), self._config.windows
        apart = batch.windowed
        if apart is None:
            return [LayerKv(pool, scales, index, rows) for index in range(len(windows))]
        own_rows, numbers = head_rows(apart.first_rows, apart.pool), (count(), count())
        return [
            LayerKv(pool, scales, next(numbers[0]), rows)
            if window is None
            else LayerKv(apart.pool, apart.scales, next(numbers[1]), own_rows)
            for window in windows
        ]

    def embed(self, token_ids: torch.Tensor, adapters: Sequence[AdapterRows] = ()) -> torch.Tensor:
        """States [tokens, hidden], the input of the first layer. adapters: only with one rank."""
        table, shard = self._parameters.embeddings, self._ranks.shard
        if shard.size == 1:
            hidden = F.embedding(token_ids, table)
            for each in adapters:
                if each.embeddings is not None:
                    each.embeddings.add_to(hidden, token_ids, each.rows)
        else:
            # The table holds this rank's part of the vocabulary. Other rows are -0, because x + -0
            # is x for every x.
            rows = token_ids - shard.part(self._config.vocab_size).start
            is_elsewhere = (rows < 0) | (rows >= len(table))
            hidden = F.embedding(rows.masked_fill(is_elsewhere, 0), table)
            hidden = self._ranks.reduce(hidden.masked_fill_(is_elsewhere[:, None], -0.0))
        return hidden if self._embedding_scale == 1.0 else hidden * self._embedding_scale

    def logits(self, states: torch.Tensor, adapters: Sequence[AdapterRows] = ()) -> torch.Tensor:
        """Logits [rows, vocab] float32 of states [rows, hidden] on rank 0; other ranks return their
        part. adapters: of the step, only with one rank. First stage only."""
        part = self._own_logits(states, adapters)
        return self._ranks.gather_first(part, self._config.vocab_size)

    def best(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """checked_argmax of the logits of states [rows, hidden], on rank 0; others return their
        part's. First stage only. Ranks exchange 8 bytes a row, instead of all logits."""
        part, ranks = self._own_logits(states), self._ranks
        chosen, verdicts = checked_argmax(part)
        size = ranks.shard.size
        if size == 1:
            return chosen, verdicts
        values = part.gather(1, chosen[:, None])[:, 0].masked_fill(verdicts < 0, torch.nan)
        # float32 holds any id below 2^24.
        ids = chosen + ranks.shard.part(self._config.vocab_size).start
        best = ranks.gather_first(torch.stack((values, ids.float()), 1), 2 * size)
        if ranks.shard.rank:
            return chosen, verdicts
        values, ids = best.view(-1, size, 2).unbind(2)
        # The first of equal values is of the lowest id; NaN is above all others.
        first = values.argmax(1, keepdim=True)
        chosen = ids.gather(1, first)[:, 0].long()
        return chosen, chosen.masked_fill(values.gather(1, first)[:, 0].isnan(), NOT_FINITE)

    def _own_logits(
        self, states: torch.Tensor, adapters: Sequence[AdapterRows] = ()
    ) -> torch.Tensor:
        """This rank's part of the logits, [rows, part of vocab]."""
        lm_head = self._parameters.lm_head
        if lm_head is None:
            raise RuntimeError("only the first stage has the output layer")
        part = lm_head(states, None, torch.float32)
        for each in adapters:
            if each.output is not None:
                each.output.add_to_logits(part, states, each.sampled)
        cap = self._config.traits.logit_softcap
        if cap is not None:
            part = torch.tanh(part / cap) * cap
        return part

    def _attention(
        self,
        index: int,
        layer: PackedLayer,
        x: torch.Tensor,
        batch: PackedBatch,
        kv: LayerKv,
        layer_done: Callable[[int], None] | None,
        added: _Added = (),
    ) -> torch.Tensor:
        """Outputs of this rank's heads for x [tokens, hidden], concatenated: [tokens, heads *
        output width], before the output layer."""
        attention, shape = layer.attention, layer.attention.shape
        pool, scales, number, rows = kv
        cos, sin = batch.rotations[shape.rope]
        if isinstance(attention, Attention):
            query, key, value = _fused_heads(attention, x, _of(added, _qkv))
            norms = _own_norm(attention.q_norm, shape), _own_norm(attention.k_norm, shape)
            query, key = rope_kv_write(
                query, key, value, cos, sin, pool, number, rows, scales, *norms
            )
            terms = ScoreTerms(shape.softcap, attention.sinks)
        else:
            absorbed, turned = self._heads[index].queries(attention, x, added)
            latent = _adapted(attention.latent(x), x, _of(added, _latent))
            norm = attention.latent_norm
            query, key = latent_kv_write(
                absorbed, turned, latent, norm, cos, sin, pool, number, rows, scales
            )
            value, terms = key[..., : absorbed.shape[2]], NO_TERMS
        if layer_done is not None:
            self._ranks.meet()
            layer_done(index)
        plan = batch.plans[shape.window]
        mixed = self._attend(query, key, value, pool, number, plan, scales, terms)
        if isinstance(attention, LatentAttention):
            return self._heads[index].results(mixed, added)
        return mixed.flatten(1)

    def _mlp(
        self, index: int, layer: PackedLayer, hidden: torch.Tensor, added: _Added = ()
    ) -> torch.Tensor:
        x = normed(layer.before_mlp, hidden)
        if isinstance(layer.mlp, Experts):
            return self._experts(index, layer.mlp, x, hidden, layer.after_mlp, added)
        inner = self._gated(layer.mlp, x, _of(added, _gate_up))
        return self._add(layer.mlp.down, inner, hidden, layer.after_mlp, _of(added, _down))

    def _gated(self, mlp: Mlp[Linear], x: torch.Tensor, own: Own = ()) -> torch.Tensor:
        """Input of the MLP's last layer."""
        gate_up = _adapted(mlp.gate_up(x), x, own)
        return self._cut.inputs(GATES[mlp.activation](gate_up))

    def _experts(
        self,
        index: int,
        mlp: Experts[Linear, torch.Tensor],
        x: torch.Tensor,
        hidden: torch.Tensor,
        after: PackedNorm | None,
        added: _Added,
    ) -> torch.Tensor:
        grouped, gate = self._grouped[index], GATES[mlp.experts[0].activation]
        seen = x.float() if mlp.routing.is_sigmoid else x
        chosen, weights = route(mlp.router(seen, None, torch.float32), mlp.bias, mlp.routing)
        if isinstance(grouped, GroupedExperts):
            parts = grouped.parts(x, chosen, gate, self._cut, added)
        else:
            parts = grouped.parts(x, chosen, gate, self._cut)
        shared = None
        if mlp.shared is not None:
            inner = self._gated(mlp.shared, x, _of(added, _shared_gate_up))
            shared = _adapted(mlp.shared.down(inner), inner, _of(added, _shared_down))
        return self._complete(partial(combine, parts, weights, shared), hidden, after)

    def _add(
        self,
        linear: Linear,
        x: torch.Tensor,
        hidden: torch.Tensor,
        after: PackedNorm | None,
        own: Own = (),
    ) -> torch.Tensor:
        """hidden + after(linear(x)), complete on every rank; may reuse the memory of hidden."""
        return self._complete(
            lambda own_hidden: _adapted(linear(x, own_hidden), x, own), hidden, after
        )

    def _complete(
        self, product: Product, hidden: torch.Tensor, after: PackedNorm | None
    ) -> torch.Tensor:
        """hidden + after(product), complete on every rank; may reuse the memory of hidden."""
        if after is None:
            return self._cut.add(product, hidden)
        return hidden + normed(after, self._cut.whole(product))


@dataclass(frozen=True, slots=True)
class _Heads:
    """The per-head linear layers of latent attention, run as a mixture of experts: a row's result
    depends on that row alone."""

    keys: GroupedLinear
    values: GroupedLinear

    @classmethod
    def of(cls, attention: LatentAttention[Linear, torch.Tensor]) -> _Heads:
        return cls(GroupedLinear(attention.keys), GroupedLinear(attention.values))

    def queries(
        self, attention: LatentAttention[Linear, torch.Tensor], x: torch.Tensor, added: _Added = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries for x [tokens, hidden]: absorbed ones [tokens, heads, rank], and the part to
        rotate [tokens, heads, rope_dim]."""
        low, down = x, attention.query_down
        if down is not None:
            own = _of(added, _query_down)
            low = normed(attention.query_norm, _adapted(down(x), x, own))
        query = _adapted(attention.query(low), low, _of(added, _query))
        heads = query.view(len(x), attention.shape.num_heads, -1)
        plain, turned = heads.split_with_sizes((self.keys.num_in, attention.rope_dim), dim=2)
        absorbed = headwise_linear(plain, self.keys)
        for layer, rows in added:
            if layer.keys is not None:
                absorbed[rows] += layer.keys.headwise(plain[rows])
        return absorbed, turned

    def results(self, mixed: torch.Tensor, added: _Added = ()) -> torch.Tensor:
        """Turn sums over latents [tokens, heads, rank] into outputs [tokens, heads * value_dim]."""
        values = headwise_linear(mixed, self.values)
        for layer, rows in added:
            if layer.values is not None:
                values[rows] += layer.values.headwise(mixed[rows])
        return values.flatten(1)


def _fused_heads(
    attention: Attention[Linear, torch.Tensor], x: torch.Tensor, own: Own
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim], before
    rotation and per-head norms."""
    shape = attention.shape
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    fused = _adapted(attention.qkv(x), x, own).view(-1, heads + 2 * kv_heads, shape.head_dim)
    query, key, value = fused.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
    query, key = _norm_all(attention.q_norm, query), _norm_all(attention.k_norm, key)
    return query, key, value


#: Additions to one product, each with its rows; only the nonempty ones.
Own = Sequence[tuple[Addition, Any]]


def _of(added: _Added, part: Callable[[AdapterLayer], Addition | None]) -> Own:
    found = ((part(layer), rows) for layer, rows in added)
    return [(own, rows) for own, rows in found if own is not None]


def _adapted(y: torch.Tensor, x: torch.Tensor, own: Own) -> torch.Tensor:
    """Add in place to y [rows, num_out] the adapters' outputs for their rows of x [rows,
    num_in]."""
    for addition, rows in own:
        addition.add_to(y, x, rows)
    return y


def _qkv(layer: AdapterLayer) -> Addition | None:
    return layer.attention.qkv if isinstance(layer.attention, Attention) else None


def _query_down(layer: AdapterLayer) -> Addition | None:
    return layer.attention.query_down if isinstance(layer.attention, LatentAttention) else None


def _query(layer: AdapterLayer) -> Addition | None:
    return layer.attention.query if isinstance(layer.attention, LatentAttention) else None


def _latent(layer: AdapterLayer) -> Addition | None:
    return layer.attention.latent if isinstance(layer.attention, LatentAttention) else None


def _output(layer: AdapterLayer) -> Addition | None:
    found: Addition | None = layer.attention.output
    return found


def _gate_up(layer: AdapterLayer) -> Addition | None:
    return layer.mlp.gate_up if isinstance(layer.mlp, Mlp) else None


def _down(layer: AdapterLayer) -> Addition | None:
    return layer.mlp.down if isinstance(layer.mlp, Mlp) else None


def _shared_gate_up(layer: AdapterLayer) -> Addition | None:
    shared = layer.mlp.shared if isinstance(layer.mlp, Experts) else None
    return None if shared is None else shared.gate_up


def _shared_down(layer: AdapterLayer) -> Addition | None:
    shared = layer.mlp.shared if isinstance(layer.mlp, Experts) else None
    return None if shared is None else shared.down


def _norm_all(norm: PackedNorm | None, heads: torch.Tensor) -> torch.Tensor:
    """Normalise heads [tokens, heads, head_dim] over all heads, if the norm is of that kind: see
    Attention."""
    if norm is not None and len(norm.weight) > heads.shape[2]:
        return normed(norm, heads.flatten(1)).view(heads.shape)
    return heads


def _own_norm(norm: PackedNorm | None, shape: AttentionShape) -> PackedNorm | None:
    """The norm if it is per head, else None."""
    return norm if norm is not None and len(norm.weight) == shape.head_dim else None


def normed(norm: PackedNorm | None, x: torch.Tensor) -> torch.Tensor:
    """Normalise x [tokens, hidden]; unchanged without a norm."""
    return x if norm is None else rms_norm(x, norm.weight, norm.eps)
