"""Families with attention code outside transformers' attention interface: replacement methods that
call our attention.

Each function here replaces a method of a module, between its linear layers, and returns the same
values. ALiBi slopes are read from tensors made by the family's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from engine.transformers.attention import IMPLEMENTATION, WITH_MASK, attend

_Method = Callable[..., tuple[torch.Tensor, None]]


def _bloom(
    module: Any, hidden_states: torch.Tensor, residual: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    slopes = module.baton_slopes
    mixed, _none = attend(
        module, query, key, value, None, scaling=module.inv_norm_factor, slopes=slopes
    )
    return residual + module.dense(mixed.flatten(2)), None


def _mpt(module: Any, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = (
        part.unflatten(-1, (module.n_heads, module.head_dim)).transpose(1, 2)
        for part in fused.chunk(3, dim=2)
    )
    mixed, _none = attend(
        module,
        query,
        key,
        value,
        None,
        scaling=module.softmax_scale,
        slopes=module.baton_slopes,
    )
    return module.out_proj(mixed.flatten(2)), None


def _falcon(
    module: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None = None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    fused = module.query_key_value(hidden_states)
    if module.new_decoder_architecture:
        # The original method repeats keys and values for each query head.
        group = module.num_heads // module.num_kv_heads
        grouped = fused.unflatten(-1, (-1, group + 2, module.head_dim))
        query = grouped[:, :, :, :-2].flatten(2, 3)
        key, value = grouped[:, :, :, -2], grouped[:, :, :, -1]
    else:
        query, key, value = module._split_heads(fused)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    slopes = None
    if alibi is not None:
        slopes = module.baton_slopes
    elif position_embeddings is not None:
        rotate: Any = apply_rotary_pos_emb
        query, key = rotate(query, key, *position_embeddings)
    mixed, _none = attend(
        module, query, key, value, None, scaling=module.inv_norm_factor, slopes=slopes
    )
    return module.dense(mixed.flatten(2)), None


def _xglm(module: Any, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    query, key, value = (
        project(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    mixed, _none = attend(module, query, key, value, None, scaling=module.scaling)
    return module.out_proj(mixed.flatten(2)), None


def _gpt_neo(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,  # noqa: ARG001
    *,
    window: int | None,
) -> tuple[torch.Tensor, None]:
    """Replaces `_attn`, which is the whole attention: [1, heads, tokens, head_dim] in and out."""
    settings = {"scaling": 1.0, "sliding_window": window}
    mixed, _none = attend(module, query, key, value, None, **settings)
    return mixed.transpose(1, 2), None


def _gpt_neo_attn(module: Any, parent: Any, config: Any) -> _Method:
    window = config.window_size if parent.attention_type == "local" else None
    return partial(_gpt_neo, module, window=window)


def _forward_of(function: _Method) -> Callable[[Any, Any, Any], _Method]:
    return lambda module, _parent, _config: partial(function, module)


#: By class of the attention module: the name of the method, and the factory of its replacement.
_STAND_INS: Mapping[str, tuple[str, Callable[[Any, Any, Any], _Method]]] = MappingProxyType(
    {
        "BloomAttention": ("forward", _forward_of(_bloom)),
        "MptAttention": ("forward", _forward_of(_mpt)),
        "FalconAttention": ("forward", _forward_of(_falcon)),
        "XGLMAttention": ("forward", _forward_of(_xglm)),
        "GPTNeoSelfAttention": ("_attn", _gpt_neo_attn),
    }
)


def _slopes(config: Any) -> torch.Tensor | None:
    """ALiBi slopes [heads] float32, None for models without: the growth of the family's bias tensor
    from one key to the next, as added to scores."""
    if config.model_type not in ("bloom", "falcon", "mpt"):
        return None
    heads: int = config.num_attention_heads
    if config.model_type == "mpt":
        from transformers.models.mpt import modeling_mpt

        make: Any = modeling_mpt.build_mpt_alibi_tensor
        return _growth(make(heads, 2, device=torch.device("cpu")))
    two_keys = torch.ones(1, 2, dtype=torch.int64, device="cpu")
    if config.model_type == "bloom":
        from transformers.models.bloom.modeling_bloom import build_alibi_tensor

        return _growth(build_alibi_tensor(two_keys, heads, torch.float32))
    if config.model_type == "falcon" and config.alibi:
        from transformers.models.falcon.modeling_falcon import build_alibi_tensor as of_falcon

        # Falcon scales scores after adding the bias.
        scale: float = (config.hidden_size // heads) ** -0.5
        return _growth(of_falcon(two_keys, heads, torch.float32)) * scale
    return None


def _growth(alibi: torch.Tensor) -> torch.Tensor:
    """Difference between the two keys of alibi [heads, 1, 2]: [heads] float32."""
    return (alibi[:, 0, 1] - alibi[:, 0, 0]).float()


def implementation_of(model_type: str) -> str:
    """Attention name for configs of this model type."""
    return WITH_MASK if model_type == "mpt" else IMPLEMENTATION


def install(model: nn.Module, config: Any, device: torch.device) -> None:
    """Replace the methods of the model's modules, if it is such a family. device: where they
    run."""
    slopes = _slopes(config)
    for name, module in model.named_modules():
        stand_in = _STAND_INS.get(type(module).__name__)
        if stand_in is None:
            continue
        method, make = stand_in
        parent = model.get_submodule(name.rpartition(".")[0])
        own = cast(Any, module)
        own.baton_slopes = None if slopes is None else slopes.to(device)
        setattr(module, method, make(module, parent, config))


@contextmanager
def removed(model: nn.Module) -> Iterator[None]:
    """Restore the modules' own methods within the context."""
    taken = []
    for module in model.modules():
        stand_in = _STAND_INS.get(type(module).__name__)
        if stand_in is not None and stand_in[0] in vars(module):
            taken.append((module, stand_in[0], vars(module).pop(stand_in[0])))
    try:
        yield
    finally:
        for module, name, method in taken:
            setattr(module, name, method)
