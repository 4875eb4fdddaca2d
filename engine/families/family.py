"""What a family of decoders defines: how its config.json is read, and where its layers differ from
a Llama's. Each family is one file, which defines FAMILY; engine.families.registry lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import UnsupportedSetting
from engine.families.config import ExpertsConfig, LatentConfig, RopeConfig, Traits
from engine.families.fields import Fields, Settings
from engine.families.rope import read_rope
from engine.families.windows import read_windows


def read_activation(settings: Settings, field: str = "hidden_act") -> str:
    """See Traits.activation. field: which names it as transformers does. Raises
    UnsupportedSetting."""
    name = settings[field]
    known = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if name not in known:
        raise UnsupportedSetting(f"hidden_act={name!r}: {' and '.join(map(repr, known))} are known")
    return known[name]


@dataclass(frozen=True, slots=True)
class Family:
    """name: model_type in config.json. architecture: transformers' class, which generates text.

    Functions raise UnsupportedSetting for a setting that transformers' code may know, and
    UnsupportedModel for what no code runs. The defaults are a Llama's.
    """

    name: str
    architecture: str
    fields: Fields
    check: Callable[[Settings], None] = lambda _: None
    """Refuses settings before anything is computed with them."""
    rope: Callable[[Settings], RopeConfig] = read_rope
    windows: Callable[[Settings], tuple[int | None, ...]] = read_windows
    activation: Callable[[Settings], str] = read_activation
    experts: Callable[[Settings], ExpertsConfig | None] = lambda _: None
    latent: Callable[[Settings], LatentConfig | None] = lambda _: None
    traits: Callable[[Settings, Traits], Traits] = lambda _, traits: traits
    """The family's traits, from a Llama's with the activation and experts above."""
    has_qkv_bias: bool = False
    """Whether queries, keys and values have a bias even without attention_bias."""
    has_output_bias: bool = True
    """Whether attention's output layer follows attention_bias, too."""
    has_qk_norm: bool = False
    """Whether queries and keys have norms even without use_qk_norm."""
    has_mtp_layers: bool = False
    """Whether checkpoints may have layers for multi-token prediction that engine.torch.mtp
    reads."""
    dequantized_methods: tuple[str, ...] = ()
    """Each quant_method of which weights are dequantised as they are read: none is left."""
