"""Describes a transformers model for the engine, by running its code once without data; explains
why unsupported models cannot be served.

The model is built on torch's meta device, where tensors have shapes and no memory, and a recording
attention collects its calls.
"""

from __future__ import annotations

import hashlib
import inspect
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from baton.errors import UnsupportedModel
from baton_kernels.paged_attention import PlanKey
from engine.families.config import DTYPES
from engine.families.overrides import NO_OVERRIDES, ROPE_FIELDS, ConfigOverrides
from engine.families.read import read_raw
from engine.ranks.mesh import Stage
from engine.transformers import own_attention
from engine.transformers.attention import register, set_attention
from engine.transformers.states import (
    STATE_LAYER_TYPES,
    LayerCache,
    StateLayer,
    layer_of,
    watched,
)

#: Tokens of the recorded forward.
_NUM_TOKENS = 8
#: Keyword arguments of attention that have no effect here, at any value.
_IDLE_SETTINGS = frozenset(
    {
        *("position_ids", "cache_position", "use_cache", "return_dict", "is_causal"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep"),
    }
)
_SETTINGS = frozenset({"scaling", "sliding_window", "dropout", "softcap", "s_aux", "slopes"})
#: Config fields with the maximum sequence length; the first present one counts.
_LENGTHS = ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length")
#: Training length of models with ALiBi alone and no such field.
_UNNAMED_LENGTHS = {"bloom": 2048}
#: RoPE types with frequencies that depend on the longest sequence of a batch, above a limit.
_BY_LENGTH = ("dynamic", "longrope")
_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A layer's call of attention. module: its name within the model. kv_layer: index of the KV
    that it reads; with is_reader an earlier layer computes that KV."""

    module: str
    key: PlanKey
    kv_layer: int
    is_reader: bool


@dataclass(frozen=True, slots=True)
class Description:
    """A model that can be served. body: name of the module that computes the inputs of the output
    layer; kv_digest: of all settings that define the KV, without the weights; layer_width:
    estimated elements per token in a layer; widest: elements of the widest row that any product
    takes or makes; head_weights: weights shared by embeddings and output layer; state_layers: all
    of one size; transposed: last parts of the names of layers with weights [in, out]."""

    architecture: str
    body: str
    dtype: str
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    layers: tuple[LayerCall, ...]
    max_len: int
    num_weights: int
    head_weights: int
    num_layers: int
    layer_width: int
    widest: int
    kv_digest: str
    state_layers: tuple[StateLayer, ...] = ()
    transposed: frozenset[str] = frozenset()

    @property
    def state_elements(self) -> int:
        """Elements of a sequence's state per state layer; 0 without state layers."""
        return self.state_layers[0].num_elements if self.state_layers else 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer of the KV, the number of last tokens that are ever read; None for all."""
        widest: dict[int, int | None] = {}
        for layer in self.layers:
            window, known = layer.key.window, widest.get(layer.kv_layer, 0)
            widest[layer.kv_layer] = (
                None if None in (window, known) else max(window or 0, known or 0)
            )
        return tuple(window for _, window in sorted(widest.items()))

    @property
    def container(self) -> str:
        """Name of the module with the numbered layers."""
        return _numbered(self.layers[0].module)[0]

    def stage_layers(self, stage: Stage) -> range:
        """Numbers of a stage's layers: those with the stage's part of the KV, and those without any
        that follow or, in the first stage, precede these."""
        first_ones = [_numbered(layer.module)[1] for layer in self.layers]
        own = stage.layers(len(self.windows))
        start = 0 if stage.is_first else first_ones[own.start]
        return range(start, self.num_layers if stage.is_last else first_ones[own.stop])

    def stage_states(self, stage: Stage) -> range:
        """A stage's layers with a state, counted among these."""
        numbers = [_numbered(layer.module)[1] for layer in self.state_layers]
        own = self.stage_layers(stage)
        return range(bisect_left(numbers, own.start), bisect_left(numbers, own.stop))

    @property
    def plan_keys(self) -> frozenset[PlanKey]:
        return frozenset(layer.key for layer in self.layers)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of attention, with tensors without data."""

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    has_mask: bool
    settings: Mapping[str, Any]


class _Watch:
    """An Attention that records its calls."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        settings: Mapping[str, Any],
    ) -> torch.Tensor:
        self.calls.append(_Call(module, query, key, value, mask is not None, settings))
        return query.new_empty(*query.shape[:1], query.shape[2], query.shape[1], value.shape[3])


def read_transformers_config(
    folder: Path, overrides: ConfigOverrides = NO_OVERRIDES
) -> PreTrainedConfig:
    """The checkpoint's config, as of an unquantised model. Runs no code of the checkpoint. Raises
    UnsupportedModel."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise UnsupportedModel(
            f"{folder}: transformers {transformers.__version__} has no such model ({reason}); code "
            "that a checkpoint brings along is never run"
        ) from error
    if overrides:
        with overrides.named():
            config = _overridden(config, read_raw(folder), overrides)
    if hasattr(config, "quantization_config"):
        # transformers gets dequantised weights.
        del config.quantization_config
    _check_config(config)
    return config


def _overridden(
    config: PreTrainedConfig, raw: Mapping[str, Any], overrides: ConfigOverrides
) -> PreTrainedConfig:
    """The config as if config.json had the changed fields. Raises UnsupportedModel."""
    known = ROPE_FIELDS | config.to_dict().keys()
    try:
        changed = type(config).from_dict(dict(overrides.applied(raw, known)))
    except (StrictDataclassError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModel(f"transformers refuses these fields ({reason})") from error
    rope = getattr(changed, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):
        rope_type = parameters.get("rope_type") if isinstance(parameters, Mapping) else None
        if rope_type not in (None, "default", *ROPE_INIT_FUNCTIONS):
            raise UnsupportedModel(
                f"rope_type={rope_type!r}: transformers, whose code runs this model, knows "
                f"{', '.join(('default', *ROPE_INIT_FUNCTIONS))}"
            )
    return changed


def _check_config(config: PreTrainedConfig) -> None:
    """Raise UnsupportedModel for unsupported settings of the config."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(kind, "an encoder and a decoder: only decoders are served")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise _refused(kind, "no model in transformers that generates text alone")
    if config.get_text_config() is not config:
        raise _refused(kind, "more than text; save its text model alone")
    if getattr(config, "kv_lora_rank", None):
        raise _refused(
            kind,
            f"kv_lora_rank={config.kv_lora_rank}: latent attention, whose KV is of other shapes",
        )
    unknown = set(_layer_types(config)) - _ATTENTION_TYPES - STATE_LAYER_TYPES
    if unknown:
        raise _refused(
            kind,
            f"layer_types with {', '.join(sorted(unknown))}: only softmax "
            "attention over all keys, or a window of them, has a KV cache here",
        )


def _layer_types(config: PreTrainedConfig) -> list[str]:
    return [str(name) for name in getattr(config, "layer_types", None) or ()]


def _refused(kind: str, has: str) -> UnsupportedModel:
    return UnsupportedModel(f"model_type={kind!r} has {has}; use another checkpoint")


def describe(folder: Path, overrides: ConfigOverrides = NO_OVERRIDES) -> Description:
    """Describe the checkpoint in `folder` from config.json alone. Raises UnsupportedModel with the
    unsupported feature."""
    config = read_transformers_config(folder, overrides)
    return describe_config(config)


@contextmanager
def _unvalidated_distributions() -> Iterator[None]:
    """Do not check parameters of torch.distributions: on the meta device they have no values.
    Gemma 3n makes a normal distribution in its forward."""
    distribution = torch.distributions.Distribution
    was_on = distribution._validate_args
    distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        distribution.set_default_validate_args(was_on)


def describe_config(config: PreTrainedConfig) -> Description:
    """See describe."""
    kind = config.model_type
    with torch.device("meta"), torch.inference_mode(), quietly(), _unvalidated_distributions():
        model = make_model(config)
        with watched(model) as caches:
            watch, body, num_logits = _run(model, kind)
    names = {module: name for name, module in model.named_modules()}
    state_layers = tuple(layer_of(name, cache) for name, cache in caches.items())
    first = _check_calls(kind, config, watch.calls, _num_without_attention(model, watch, caches))
    layers = tuple(_layers(kind, config, watch.calls, names))
    _check_states(kind, state_layers, layers)
    weights = dict(model.named_parameters())
    # Count layers only: embeddings are looked up, not multiplied.
    width = sum(_width(weight, config) for name, weight in weights.items() if _in_layer(name))
    return Description(
        architecture=type(model).__name__,
        body=body,
        dtype=_dtype(config),
        vocab_size=num_logits,
        num_heads=first.query.shape[1],
        num_kv_heads=first.key.shape[1],
        head_dim=first.key.shape[3],
        hidden_size=config.hidden_size,
        layers=layers,
        num_layers=config.num_hidden_layers,
        max_len=_max_len(kind, config),
        num_weights=sum(weight.numel() for weight in weights.values()),
        head_weights=num_logits * config.hidden_size,
        layer_width=-(-width // len(layers)) + 8 * config.hidden_size,
        widest=max(max(weight.shape[-2:], default=1) for weight in weights.values()),
        kv_digest=_digest(config),
        state_layers=state_layers,
        transposed=frozenset(
            name.rpartition(".")[2] for module, name in names.items() if isinstance(module, Conv1D)
        ),
    )


@contextmanager
def quietly() -> Iterator[None]:
    """Silence transformers' progress bars and warnings: missing weights raise an error anyway, and
    its suggested packages are for GPUs."""
    log: Any = transformers_logging
    had_bars, verbosity = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if had_bars:
            log.enable_progress_bar()


def make_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model without weights, on the current device, ready for `set_attention`."""
    from_config: Any = AutoModelForCausalLM.from_config
    model: PreTrainedModel = from_config(config).eval()
    prepare(model)
    return model


def prepare(model: PreTrainedModel, device: torch.device | None = None) -> None:
    """Switch the model's attention to ours, and its experts to those named `experts`."""
    register()
    name = own_attention.implementation_of(model.config.model_type)
    for config in configs_of(model):
        config._attn_implementation_internal = name
        config._experts_implementation_internal = "batched_mm"
        config.return_dict = True
    own_attention.install(model, model.config, device or torch.device("cpu"))


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Distinct configs that the model's modules consult for their attention."""
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(c): c for c in found if isinstance(c, PreTrainedConfig)}.values())


def _run(model: PreTrainedModel, kind: str) -> tuple[_Watch, str, int]:
    """Run one forward: its calls of attention, the name of the model's body, and the size of its
    logits."""
    watch = _Watch()
    called: list[str] = []
    for name, module in model.named_modules():
        set_attention(module, watch)
        module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    arguments: dict[str, Any] = {"input_ids": torch.zeros(1, _NUM_TOKENS, dtype=torch.int64)}
    if takes_positions(model):
        arguments["position_ids"] = torch.arange(_NUM_TOKENS)[None]
    try:
        with _without_experts(model):
            output = model(use_cache=False, **arguments)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _refused(
            kind, f"code that does not run without a cache of its own ({error!r:.200})"
        ) from error
    names = [name for name, module in model.named_modules() if _is_called(module, watch)]
    body = next(
        (n for n in called if n and all(other.startswith(f"{n}.") for other in names)), None
    )
    if not watch.calls or body is None:
        raise _refused(
            kind, "code with an attention of its own, or none: not one that can be replaced"
        )
    return watch, body, output.logits.shape[-1]


def _is_called(module: nn.Module, watch: _Watch) -> bool:
    return any(call.module is module for call in watch.calls)


def takes_positions(module: nn.Module) -> bool:
    """Whether the model, or its body, accepts position_ids."""
    known = inspect.signature(module.forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
    return takes_all or "position_ids" in known


@contextmanager
def _without_experts(model: nn.Module) -> Iterator[None]:
    """Replace modules of experts that branch on routed tokens (impossible without data) by one that
    returns the right shape."""
    asking = [
        module
        for module in model.modules()
        if type(module).__name__.endswith("Experts") and not hasattr(module, "has_gate")
    ]
    for module in asking:
        module.forward = lambda hidden, *_, **__: torch.empty_like(hidden)
    yield
    for module in asking:
        del module.forward


def _num_without_attention(
    model: nn.Module, watch: _Watch, caches: Mapping[str, LayerCache]
) -> int:
    """Number of layers with a state and without KV."""
    attending = {getattr(call.module, "layer_idx", None) for call in watch.calls}
    return sum(model.get_submodule(name).layer_idx not in attending for name in caches)


def _check_states(
    kind: str, state_layers: tuple[StateLayer, ...], layers: tuple[LayerCall, ...]
) -> None:
    """Raises UnsupportedModel."""
    if len({layer.num_elements for layer in state_layers}) > 1:
        raise _refused(kind, "layers with states of different sizes")
    if state_layers and all(layer.key.window for layer in layers):
        raise _refused(
            kind,
            "layers with a state, and a window in all others: a sequence's states lie with its "
            "first block, which such a model gives back",
        )


def _check_calls(
    kind: str, config: PreTrainedConfig, calls: list[_Call], num_without: int
) -> _Call:
    """Raise UnsupportedModel for unsupported calls; return the first call. num_without: layers with
    a state instead of KV."""
    num_layers: int = config.num_hidden_layers - num_without
    if len(calls) < num_layers:
        raise _refused(
            kind,
            f"{num_layers} layers, of which {num_layers - len(calls)} keep a state that is no KV "
            "of softmax attention, and none that is known here",
        )
    if len(calls) > num_layers or len({id(call.module) for call in calls}) < len(calls):
        raise _refused(kind, "layers that call attention more than once")
    for call in calls:
        if call.has_mask:
            raise _refused(kind, "a mask of its own making")
        settings = call.settings
        if not settings.get("is_causal", getattr(call.module, "is_causal", True)):
            raise _refused(kind, "attention to later tokens")
        for name, value in settings.items():
            if name not in _SETTINGS | _IDLE_SETTINGS and value is not None:
                raise _refused(kind, f"attention with {name}, which is not known here")
        of_query, of_key, of_value = (x.shape[3] for x in (call.query, call.key, call.value))
        if not of_query == of_key == of_value:
            raise _refused(kind, f"keys of {of_key} and values of {of_value} elements a head")
    shapes = {(call.query.shape, call.key.shape) for call in calls}
    if len(shapes) > 1:
        raise _refused(kind, "layers with KV of different shapes")
    query, key = next(iter(shapes))
    if query[1] % key[1]:
        raise _refused(kind, f"{query[1]} heads over {key[1]} KV heads")
    return calls[0]


def _layers(
    kind: str, config: PreTrainedConfig, calls: list[_Call], names: Mapping[nn.Module, str]
) -> Iterator[LayerCall]:
    """Yield each call with the index of its KV: a new one, or that of an earlier call with the same
    tensors."""
    types = [name for name in _layer_types(config) if name in _ATTENTION_TYPES]
    written: list[_Call] = []
    for index, call in enumerate(calls):
        settings = call.settings
        scale, window = settings.get("scaling"), settings.get("sliding_window")
        if types and types[index] == "sliding_attention" and window is None:
            raise _refused(kind, "a sliding window that its attention is not given")
        key = PlanKey(float(scale if scale is not None else call.key.shape[3] ** -0.5), window)
        same = (i for i, c in enumerate(written) if c.key is call.key and c.value is call.value)
        kv_layer = next(same, len(written))
        is_reader = kv_layer < len(written)
        if not is_reader:
            written.append(call)
        yield LayerCall(names[call.module], key, kv_layer, is_reader)


def _numbered(module: str) -> tuple[str, int]:
    """The name of a module split at its number: the name of what contains the layer, the layer's
    number."""
    parts = module.split(".")
    at = next(i for i, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[:at]), int(parts[at])


def _max_len(kind: str, config: PreTrainedConfig) -> int:
    """Maximum sequence length in tokens at which RoPE does not depend on the other sequences of a
    batch."""
    known = (getattr(config, name, None) for name in _LENGTHS)
    longest = next((length for length in known if length), _UNNAMED_LENGTHS.get(kind))
    if longest is None:
        raise _refused(kind, f"no length in its config: one of {', '.join(_LENGTHS)}")
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)] or [rope]
    for parameters in nested:
        if parameters.get("rope_type") in _BY_LENGTH:
            limit = parameters.get("original_max_position_embeddings")
            limit = limit or getattr(config, "original_max_position_embeddings", None) or longest
            longest = min(longest, int(limit))
    return int(longest)


def _dtype(config: PreTrainedConfig) -> str:
    name = str(config.dtype or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype={name}: one of {', '.join(DTYPES)} is known")
    return name


def _in_layer(name: str) -> bool:
    """Whether a weight belongs to a numbered layer."""
    return any(part.isdigit() for part in name.split("."))


def _width(weight: torch.Tensor, config: PreTrainedConfig) -> int:
    """Estimated elements per token that a product with the weight produces."""
    if weight.dim() == 2:
        return max(weight.shape)
    if weight.dim() == 3:  # experts; a token goes to a few of them
        return max(weight.shape[1:]) * int(getattr(config, "num_experts_per_tok", None) or 1)
    return 0


def _digest(config: PreTrainedConfig) -> str:
    fields = config.to_dict()
    for name in ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures"):
        fields.pop(name, None)
    text = f"transformers:{sorted(fields.items(), key=lambda item: item[0])!r}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
