"""Reads the rotary embedding from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.errors import UnsupportedModel, UnsupportedSetting
from engine.families.config import ORIGINAL_LENGTH, RopeConfig
from engine.families.fields import Settings

#: Required parameters of each type of rotary embedding, besides rope_theta.
ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "dynamic_yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_FACTORS = ROPE_TYPES["longrope"]


def read_rope(settings: Settings) -> RopeConfig:
    """Read the rotary embedding of a model that has one. Raises UnsupportedModel,
    UnsupportedSetting."""
    return make_rope_config(settings, rope_parameters(settings))


def rope_parameters(settings: Settings, default: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Rotary parameters of config.json, or `default` if it has none. Older files have rope_scaling,
    which takes precedence over rope_parameters, and rope_theta next to it."""
    raw, fields = settings.raw, settings.fields
    found = raw.get("rope_scaling") or fields["rope_parameters"] or default or {}
    if not isinstance(found, dict):
        raise UnsupportedModel(f"rope_scaling={found!r}: must be an object")
    return {"rope_theta": rope_theta(settings), **found}


def rope_theta(settings: Settings) -> Any:
    """rope_theta outside rope_scaling."""
    return settings.raw.get("rope_theta", settings.fields.get("rope_theta", 10000.0))


def make_rope_config(settings: Settings, parameters: dict[str, Any]) -> RopeConfig:
    """Check and convert the parameters. Raises UnsupportedModel, UnsupportedSetting."""
    raw, fields = settings.raw, settings.fields
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedSetting("rope_parameters differ by layer type: not known to Baton")
    rope_type = str(parameters.setdefault("rope_type", parameters.get("type", "default")))
    if rope_type not in ROPE_TYPES:
        raise UnsupportedSetting(
            f"rope_type={rope_type!r}: Baton knows {', '.join(ROPE_TYPES)}; use another checkpoint"
        )
    if "partial_rotary_factor" in fields:
        parameters.setdefault("partial_rotary_factor", fields["partial_rotary_factor"])
        known = ("default", "linear", "longrope")
        if parameters["partial_rotary_factor"] != 1.0 and rope_type not in known:
            raise UnsupportedSetting(
                f"partial_rotary_factor={parameters['partial_rotary_factor']} with "
                f"rope_type={rope_type!r}: known with {', '.join(known)}"
            )
    elif parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedSetting("partial_rotary_factor other than 1 is not known to Baton")
    if rope_type in ("llama3", "yarn", "dynamic_yarn", "longrope"):
        parameters.setdefault(ORIGINAL_LENGTH, fields["max_position_embeddings"])
        of_model = fields.get(ORIGINAL_LENGTH) or raw.get(ORIGINAL_LENGTH)
        parameters[ORIGINAL_LENGTH] = of_model or parameters[ORIGINAL_LENGTH]
    if rope_type == "longrope":
        _check_longrope(parameters)
    for name in ("rope_theta", *ROPE_TYPES[rope_type]):
        if name not in parameters:
            raise UnsupportedModel(f"rope_type={rope_type!r} without {name}: add it to config.json")
        # yarn derives a null factor from the ratio of the two lengths.
        is_ratio = rope_type == "yarn" and name == "factor" and parameters[name] is None
        if name in _FACTORS:
            _check_factors(name, parameters[name])
        elif not is_ratio:
            _check_number(name, parameters[name])
    if rope_type in ("yarn", "dynamic_yarn"):
        _check_yarn(parameters)
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in parameters.items()}
    return RopeConfig(rope_type, float(parameters["rope_theta"]), tuple(sorted(plain.items())))


def _check_number(name: str, value: object) -> None:
    """Raise UnsupportedModel unless the value is a number, of a factor a positive one."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UnsupportedModel(f"{name}={value!r} of rope: must be a number")
    if name == "factor" and value <= 0:
        raise UnsupportedModel(f"factor={value!r} of rope: must be positive")


def _check_longrope(parameters: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel unless the numbers that longrope scaling uses are valid."""
    original = parameters[ORIGINAL_LENGTH]
    if type(original) is not int or original < 2:
        raise UnsupportedModel(f"{ORIGINAL_LENGTH}={original!r}: must be a number of tokens, 2 up")
    for name in ("factor", "attention_factor"):
        if type(value := parameters.get(name)) not in (int, float, type(None)):
            raise UnsupportedModel(f"{name}={value!r} of rope: must be a number")


def _check_yarn(parameters: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel unless logarithms of rope_theta and of the original length exist; the
    former is a divisor, and must not be 0."""
    if (theta := parameters["rope_theta"]) <= 0 or theta == 1:
        raise UnsupportedModel(
            f"rope_theta={theta!r} with rope_type='yarn': must be positive and not 1; "
            "correct it in config.json"
        )
    original = parameters[ORIGINAL_LENGTH]
    if type(original) not in (int, float) or original <= 0:
        raise UnsupportedModel(
            f"{ORIGINAL_LENGTH}={original!r} with rope_type='yarn': must be a positive number of "
            "tokens; correct it in config.json"
        )


def _check_factors(name: str, factors: object) -> None:
    """Raise UnsupportedModel unless all factors are positive numbers. check_num_factors checks
    their count, which depends on the model's heads."""
    if (
        not isinstance(factors, list)
        or not factors
        or not all(type(each) in (int, float) and each > 0 for each in factors)
    ):
        raise UnsupportedModel(f"{name} of rope: must be a list of positive numbers")


def check_num_factors(rope: RopeConfig, rotary_dim: int) -> None:
    """Raise UnsupportedModel unless a longrope model has one short and one long factor per pair of
    rotated dimensions."""
    parameters = dict(rope.parameters)
    for name in _FACTORS if rope.rope_type == "longrope" else ():
        if (found := len(parameters[name])) != (wanted := rotary_dim // 2):
            raise UnsupportedModel(f"{name} of rope has {found} numbers: this model has {wanted}")


def rotary_dim(settings: Settings, head_dim: int) -> int | None:
    """See Traits. None for families without the field partial_rotary_factor."""
    fields = settings.fields
    if "partial_rotary_factor" not in fields:
        return None
    parameters = rope_parameters(settings)
    share = parameters.get("partial_rotary_factor", fields["partial_rotary_factor"])
    dim = int(head_dim * share)
    if not 2 <= dim <= head_dim or dim % 2:
        raise UnsupportedModel(
            f"partial_rotary_factor={share}: of head_dim={head_dim} an even number of dimensions "
            "must be rotated"
        )
    return None if dim == head_dim else dim
