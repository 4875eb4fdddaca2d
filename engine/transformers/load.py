"""A transformers model from a checkpoint, ready to run steps over a paged KV pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from baton_kernels.paged_attention import AttentionPlan, AttentionSlice, plan_attention
from engine.families.overrides import NO_OVERRIDES, ConfigOverrides
from engine.torch.decoder import PackedTokens
from engine.torch.sequence_states import SequenceStates
from engine.transformers import own_attention, states
from engine.transformers.attention import (
    ForwardContext,
    ForwardContextHolder,
    LayerAttention,
    PlanKey,
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
from engine.transformers.linears import pack_linears

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
) -> TransformersDecoder:
    """Load the checkpoint's model on `device`. tensors: the checkpoint's, if transformers cannot
    read them from `folder`; emptied by this call. Raises ModelError, and UnsupportedModel if
    results with our attention differ from the model's own."""
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
    pack_linears(model)
    decoder = TransformersDecoder(model, description, dtype)
    with quietly():
        decoder.check(stock)
    return decoder


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
        self, model: PreTrainedModel, description: Description, dtype: torch.dtype
    ) -> None:
        """model: see load_model; dtype: of its weights."""
        self._model, self._description, self.dtype = model, description, dtype
        self._holder = ForwardContextHolder()
        for layer in description.layers:
            attention = LayerAttention(
                self._holder, layer.kv_layer, layer.key, is_reader=layer.is_reader
            )
            set_attention(model.get_submodule(layer.module), attention)
        states.install(model, description.state_layers, lambda: self._holder.step)
        self._body = cast(Any, model.get_submodule(description.body))
        self._takes_positions = takes_positions(self._body)
        self._forward_body: Callable[..., Any] = self._body.forward
        self._body.forward = self._forward
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
        of_sequences: the sequences' states, in order, if the model has state layers."""
        step = ForwardContext(
            pool,
            scales,
            head_rows(tokens.first_rows, pool),
            {key: self._plan(key, tokens.slices, pool) for key in self._description.plan_keys},
            layer_done,
            of_sequences,
        )
        arguments = {"input_ids": tokens.token_ids[None], "use_cache": False}
        if self._takes_positions:
            arguments["position_ids"] = tokens.positions[None]
        output = self._holder.run(step, lambda: self._body(**arguments))
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden if tokens.sampled is None else hidden[tokens.sampled]

    def _plan(
        self, key: PlanKey, slices: Sequence[AttentionSlice], pool: torch.Tensor
    ) -> AttentionPlan:
        found = self._description
        return plan_attention(slices, pool, found.num_heads, key.scale, key.window, self.dtype)

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

    def check(self, stock: Sequence[tuple[PreTrainedConfig, str]]) -> None:
        """Compare with the model's own forward. stock: the attention names originally in the
        model's configs.

        Raises UnsupportedModel if the two differ.
        """
        device = self._model.device
        with torch.inference_mode():
            places = torch.arange(_CHECKED_TOKENS, device=device)
            ids = (places * 7 + 3) % self._description.vocab_size
            expected = self._stock_logits(ids, stock)
            found = self._checked_logits(ids)
        difference = (expected - found).abs().max() / expected.abs().max().clamp(min=1e-6)
        if not difference <= _CHECKED_SHARE[self.dtype == torch.float32]:
            raise UnsupportedModel(
                f"{self._description.architecture}: with our attention its logits differ from its "
                f"own by {float(difference):.2g} of their size; it is not served"
            )

    def _stock_logits(
        self, ids: torch.Tensor, stock: Sequence[tuple[PreTrainedConfig, str]]
    ) -> torch.Tensor:
        """Logits [tokens, vocab] computed by the unmodified model."""
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
        shape = (2, len(found.windows), 2, found.num_kv_heads, block_size, found.head_dim)
        pool = torch.zeros(shape, dtype=self.dtype, device=ids.device)
        # Both sequences' states, before and after a step.
        sizes = (3, 2, len(found.state_layers), found.state_elements)
        kept = torch.zeros(*sizes, dtype=torch.float32, device=ids.device)
        hidden = []
        for number, (start, end) in enumerate(
            ((0, _FIRST_TOKENS), (_FIRST_TOKENS, _CHECKED_TOKENS))
        ):
            positions = torch.arange(start, end, device=ids.device)
            # The other sequence has these tokens in reverse.
            packed = PackedTokens(
                token_ids=torch.cat((ids[start:end].flip(0), ids[start:end])),
                positions=torch.cat((positions, positions)),
                first_rows=first_rows(torch.cat((positions, positions + block_size)), pool),
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
                    kept[number, place] if start else None,
                    kept[number + 1, place],
                )
                for place in (0, 1)
            )
            hidden.append(self.forward(packed, pool, of_sequences=of_sequences))
        return self.logits(torch.cat(hidden))
