"""Definition of a family of decoders: how its config.json is read, and how its layers differ from
Llama's. Each family is one file that defines FAMILY; engine.families.registry lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.errors import UnsupportedSetting
from engine.families.config import ExpertsConfig, LatentConfig, RopeConfig, Traits
from engine.families.fields import Fields, Settings
from engine.families.rope import read_rope
from engine.families.windows import read_windows
from engine.quantization.config import QuantizationConfig


def read_activation(settings: Settings, field: str = "hidden_act") -> str:
    """Activation of the gate, see Traits. field: config field with its transformers name. Raises
    UnsupportedSetting."""
    name = settings[field]
    known = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if name not in known:
        raise UnsupportedSetting(f"hidden_act={name!r}: {' and '.join(map(repr, known))} are known")
    return known[name]


@dataclass(frozen=True, slots=True)
class Family:
    """A family. name: model_type in config.json. architecture: transformers' class for text
    generation.

    Functions raise UnsupportedSetting for a setting that transformers' code may support, and
    UnsupportedModel for a config that no code can run. The defaults are Llama's.
    """

    name: str
    architecture: str
    fields: Fields
    check: Callable[[Settings], None] = lambda _: None
    """Refuses unsupported settings before the config is computed."""
    rope: Callable[[Settings], RopeConfig] = read_rope
    windows: Callable[[Settings], tuple[int | None, ...]] = read_windows
    activation: Callable[[Settings], str] = read_activation
    experts: Callable[[Settings], ExpertsConfig | None] = lambda _: None
    latent: Callable[[Settings], LatentConfig | None] = lambda _: None
    traits: Callable[[Settings, Traits], Traits] = lambda _, traits: traits
    """Returns the family's traits, from Llama's traits with the activation and experts above."""
    has_qkv_bias: bool = False
    """Whether queries, keys and values have biases even without attention_bias."""
    has_output_bias: bool = True
    """Whether attention_bias also applies to attention's output layer."""
    has_qk_norm: bool = False
    """Whether queries and keys have norms even without use_qk_norm."""
    has_mtp_layers: bool = False
    """Whether checkpoints may have MTP layers that engine.torch.mtp reads."""
    quantizations: Mapping[str, QuantizationConfig] = field(default_factory=dict)
    """Storage of weights in this family's own layouts, by quant_method."""
