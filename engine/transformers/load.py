"""A transformers model from a checkpoint, ready to run steps over a paged KV pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import MoeModelOutputWithPast

from baton.errors import MissingTensor, ModelError, TensorMismatch, UnsupportedModel
from baton_kernels.kv_write import first_rows, head_rows
from baton_kernels.paged_attention import AttentionPlan, AttentionSlice, PlanKey, plan_attention
from baton_kernels.sampling import checked_argmax
from engine.families.overrides import NO_OVERRIDES, ConfigOverrides
from engine.ranks.exchange import Ranks
from engine.ranks.mesh import ALL_LAYERS, Stage
from engine.ranks.stages import OneStage, Stages
from engine.shard import WHOLE, Shard
from engine.torch.decoder import PackedTokens
from engine.torch.sequence_states import SequenceStates
from engine.transformers import own_attention, states
from engine.transformers.attention import (
    ForwardContext,
    ForwardContextHolder,
    LayerAttention,
    set_attention,
)
from engine.transformers.describe import (
    Description,
    configs_of,
    prepare,
    quietly,
    read_transformers_config,
    takes_positions,
)
from engine.transformers.devices import kind_of
from engine.transformers.shared import Share
from engine.transformers.stages import LayerCut

#: Tokens of the self-check: two steps of one sequence (the first has _FIRST_TOKENS), beside another
#: sequence.
_CHECKED_TOKENS, _FIRST_TOKENS = 11, 6
#: Maximum relative difference of logits in the self-check, for 16 bits and for float32. Rounding
#: causes about 1e-2 and 1e-6; a misplaced token more than 0.5.
_CHECKED_SHARE = (0.15, 1e-3)


def load_model(
    folder: Path,
    description: Description,
    dtype: torch.dtype,
    device: torch.device,
    tensors: dict[str, torch.Tensor] | None = None,
    overrides: ConfigOverrides = NO_OVERRIDES,
    shard: Shard = WHOLE,
    stage: Stage = ALL_LAYERS,
) -> TransformersDecoder:
    """Load a rank's part of the checkpoint's model on `device`, with the layers of all stages until
    it is joined, which precedes any use. tensors: the checkpoint's, if transformers cannot read
    them from `folder`; emptied by this call. Raises ModelError."""
    config = read_transformers_config(folder, overrides)
    read: Any = AutoModelForCausalLM.from_pretrained
    source: dict[str, Any] = {"trust_remote_code": False, "use_safetensors": True}
    if tensors is not None:
        # The auto class accepts no tensors.
        classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
        read, source = classes[type(config)].from_pretrained, {"state_dict": tensors}
    with quietly():
        try:
            model, info = read(
                folder if tensors is None else None,
                config=config,
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                **source,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"{folder}: transformers cannot load it: {error}") from error
    if tensors is not None:
        # Drop references, so that packing frees weights one by one.
        tensors.clear()
    _check_loaded(folder, info)
    model = model.to(device).eval().requires_grad_(False)
    stock = [(config, config._attn_implementation) for config in configs_of(model)]
    prepare(model, device)
    share = Share(shard)
    kind_of(device).prepare(model, share)
    return TransformersDecoder(model, description, dtype, share, stock, stage)


def _check_loaded(folder: Path, info: Any) -> None:
    missing, wrong = sorted(info["missing_keys"]), sorted(map(str, info["mismatched_keys"]))
    if missing:
        raise MissingTensor(
            f"{folder}: {len(missing)} tensors are missing, the first {missing[0]!r}; the "
            "checkpoint is not whole, or not of the architecture in config.json"
        )
    if wrong:
        raise TensorMismatch(
            f"{folder}: {len(wrong)} tensors are of other shapes than config.json makes them, the "
            f"first {wrong[0]}; the config and the weights must be of one model"
        )


@dataclass
class _States(MoeModelOutputWithPast):
    """Output with all fields that models may access."""

    cross_attentions: Any = None
    shared_kv_states: Any = None


class TransformersDecoder:
    """A model that runs steps. Holds no sequence's data: KV and states are in the pool."""

    def __init__(
        self,
        model: PreTrainedModel,
        description: Description,
        dtype: torch.dtype,
        share: Share,
        stock: Sequence[tuple[PreTrainedConfig, str]],
        stage: Stage = ALL_LAYERS,
    ) -> None:
        """model: see load_model; dtype: of its weights. stock: the attention names originally in
        the model's configs. stage: the layers that this rank runs."""
        self.stage = stage
        self._stages: Stages = OneStage()
        self._model, self._description, self.dtype = model, description, dtype
        self._share, self._stock = share, stock
        self._num_heads = len(share.shard.part(description.num_heads))
        self._holder = ForwardContextHolder()
        for layer in description.layers:
            attention = LayerAttention(
                self._holder, layer.kv_layer, layer.key, share, is_reader=layer.is_reader
            )
            set_attention(model.get_submodule(layer.module), attention)
        states.install(model, description.state_layers, lambda: self._holder.step)
        self._body = cast(Any, model.get_submodule(description.body))
        self._takes_positions = takes_positions(self._body)
        self._forward_body: Callable[..., Any] = self._body.forward
        self._body.forward = self._forward
        #: Sequences with one new token that a layer with a state is called with at once.
        self.most_state_rows = 1
        self._cut = LayerCut(model, description) if stage.size > 1 else None
        self._given: torch.Tensor | None = None

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the body. While `_given` is set, returns it as the states, so that calling the
        model computes their logits."""
        if self._given is not None:
            return _States(last_hidden_state=cast(Any, self._given))
        return self._forward_body(*args, **kwargs)

    def forward(
        self,
        tokens: PackedTokens,
        pool: torch.Tensor,
        layer_done: Callable[[int], None] | None = None,
        scales: torch.Tensor | None = None,
        of_sequences: tuple[SequenceStates, ...] = (),
    ) -> torch.Tensor:
        """Write the tokens' KV into `pool`, and `scales` if it has any; returns the sampled tokens'
        states [rows, hidden], which `logits` takes. layer_done: as engine.torch.decoder.Decoder;
        of_sequences: the sequences' states, in order, if the model has state layers. One of several
        stages exchanges states with the others, see engine.torch.decoder.Decoder.forward."""
        incoming = None
        if not self.stage.is_first:
            incoming = self._empty_states(len(tokens.token_ids))
            self._stages.receive(incoming)
        states = self._run(self.stage, incoming, tokens, pool, layer_done, scales, of_sequences)
        if self.stage.size > 1:
            self._stages.send(states)
        return states

    def forward_planned(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        first_rows: torch.Tensor,
        plans: Mapping[PlanKey, AttentionPlan],
        pool: torch.Tensor,
        scales: torch.Tensor | None,
        of_sequences: tuple[SequenceStates, ...],
    ) -> torch.Tensor:
        """`forward` of tokens of which each is sampled, with given plans; of all layers, on one
        rank. Other arguments: see PackedTokens and `forward`."""
        rows = head_rows(first_rows, pool)
        step = ForwardContext(pool, scales, rows, plans, None, of_sequences)
        return self._run_body(step, token_ids, positions)

    def collect(self, num_rows: int) -> torch.Tensor:
        """See engine.torch.decoder.Decoder."""
        states = self._empty_states(num_rows)
        self._stages.receive(states)
        return states

    def _empty_states(self, num_rows: int) -> torch.Tensor:
        return torch.empty(num_rows, self._description.hidden_size, dtype=self.dtype)

    def _run(
        self,
        stage: Stage,
        incoming: torch.Tensor | None,
        tokens: PackedTokens,
        pool: torch.Tensor,
        layer_done: Callable[[int], None] | None = None,
        scales: torch.Tensor | None = None,
        of_sequences: tuple[SequenceStates, ...] = (),
    ) -> torch.Tensor:
        """States [tokens, hidden] after a stage's layers; after the last ones and the norm, those
        of the sampled tokens [rows, hidden]. pool: of the stage's KV. incoming: states [tokens,
        hidden] before the layers of a later stage."""
        first_layer = 0
        if self._cut is not None:
            self._cut.choose(stage, incoming)
            first_layer = self._cut.first_kv_layer
        step = ForwardContext(
            pool,
            scales,
            head_rows(tokens.first_rows, pool),
            {key: self._plan(key, tokens.slices, pool) for key in self._description.plan_keys},
            layer_done,
            of_sequences,
            first_layer,
        )
        hidden = self._run_body(step, tokens.token_ids, tokens.positions)
        if self._cut is not None and not stage.is_last:
            return self._cut.outgoing[0].contiguous()
        return hidden if tokens.sampled is None else hidden[tokens.sampled]

    def _run_body(
        self, step: ForwardContext, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """States [tokens, hidden] after all layers and the norm."""
        arguments = {"input_ids": token_ids[None], "use_cache": False}
        if self._takes_positions:
            arguments["position_ids"] = positions[None]
        hidden: torch.Tensor = self._holder.run(
            step, lambda: self._body(**arguments)
        ).last_hidden_state[0]
        return hidden

    def _plan(
        self, key: PlanKey, slices: Sequence[AttentionSlice], pool: torch.Tensor
    ) -> AttentionPlan:
        return plan_attention(slices, pool, self._num_heads, key.scale, key.window, self.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab] float32 of states [rows, hidden]."""
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        self._given = hidden[None]
        try:
            output = self._model(input_ids=ids, use_cache=False)
        finally:
            self._given = None
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    def best(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """checked_argmax of the logits of states [rows, hidden]."""
        return checked_argmax(self.logits(hidden))

    def join(self, ranks: Ranks, stages: Stages) -> None:
        """Exchange results with the other ranks from now on; compare with the model's own forward,
        on all ranks of a stage at once; then drop the layers of other stages. Raises
        UnsupportedModel if the two differ."""
        found = self._description
        self._share.join(ranks)
        self._check()
        # Ranks exchange results within a layer, so all call it with the same rows.
        kind = kind_of(self._model.device)
        self.most_state_rows = self._share.least(
            kind.most_rows(self._model, found.state_layers, found.hidden_size, self.dtype)
        )
        self._stages = stages
        if self._cut is not None:
            self._cut.drop_others(self.stage)

    def _check(self) -> None:
        with torch.inference_mode(), quietly():
            places = torch.arange(_CHECKED_TOKENS, device=self._model.device)
            ids = (places * 7 + 3) % self._description.vocab_size
            expected = self._stock_logits(ids)
            found = self._checked_logits(ids)
        difference = (expected - found).abs().max() / expected.abs().max().clamp(min=1e-6)
        if not difference <= _CHECKED_SHARE[self.dtype == torch.float32]:
            raise UnsupportedModel(
                f"{self._description.architecture}: with our attention its logits differ from its "
                f"own by {float(difference):.2g} of their size; it is not served"
            )

    def _stock_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, vocab] computed by the model's own attention and layers with a state."""
        stock = self._stock
        ours = [config._attn_implementation for config, _ in stock]
        for config, name in stock:
            config._attn_implementation_internal = name
        try:
            with own_attention.removed(self._model), states.removed(self._model):
                logits: torch.Tensor = self._model(input_ids=ids[None], use_cache=False).logits[0]
        finally:
            for (config, _), name in zip(stock, ours, strict=True):
                config._attn_implementation_internal = name
        return logits.float()

    def _checked_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """The same with our attention: in two steps, beside another sequence."""
        found, block_size = self._description, _CHECKED_TOKENS + 1
        num_kv_heads = len(self._share.shard.kv_heads(found.num_kv_heads))
        shape = (2, num_kv_heads, block_size, found.head_dim)
        stages = [Stage(number, self.stage.size) for number in range(self.stage.size)]
        pools = [
            torch.zeros(
                *(2, len(stage.layers(len(found.windows))), *shape),
                dtype=self.dtype,
                device=ids.device,
            )
            for stage in stages
        ]
        # Both sequences' states, before and after a step.
        sizes = (6, len(found.state_layers), found.state_elements)
        kept = torch.zeros(*sizes, dtype=torch.float32, device=ids.device)
        numbers = torch.arange(6, device=ids.device)
        hidden = []
        for number, (start, end) in enumerate(
            ((0, _FIRST_TOKENS), (_FIRST_TOKENS, _CHECKED_TOKENS))
        ):
            positions = torch.arange(start, end, device=ids.device)
            places = torch.cat((positions, positions + block_size))
            # The other sequence has these tokens in reverse.
            packed = PackedTokens(
                token_ids=torch.cat((ids[start:end].flip(0), ids[start:end])),
                positions=torch.cat((positions, positions)),
                first_rows=places,  # replaced below: each stage has a pool
                slices=(
                    AttentionSlice(0, end - start, start, (0,)),
                    AttentionSlice(end - start, end - start, start, (1,)),
                ),
                sampled=positions - start + (end - start),
            )
            of_sequences = tuple(
                SequenceStates(
                    place * (end - start),
                    end - start,
                    kept,
                    numbers[2 * number + place :][:1] if start else None,
                    numbers[2 * number + 2 + place :][:1],
                )
                for place in (0, 1)
            )
            passed = None
            for stage, pool in zip(stages, pools, strict=True):
                own = replace(packed, first_rows=first_rows(places, pool))
                passed = self._run(stage, passed, own, pool, of_sequences=of_sequences)
            hidden.append(cast(torch.Tensor, passed))
        return self.logits(torch.cat(hidden))
