"""Changes of config.json at serving time: the options --hf-overrides and --rope-scaling."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from baton.errors import UnsupportedModel
from engine.families.config import ORIGINAL_LENGTH
from engine.families.rope import ROPE_TYPES

#: Rotary fields of config.json that a family need not list.
ROPE_FIELDS = frozenset({"rope_scaling", "rope_theta", ORIGINAL_LENGTH, "partial_rotary_factor"})
#: Rotary parameters that a change keeps from config.json unless it names them.
_KEPT = ("rope_theta", "partial_rotary_factor")
_NUMBERS = frozenset(
    {
        *("rope_theta", "factor", ORIGINAL_LENGTH, "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"),
        "partial_rotary_factor",
    }
)
_PARAMETERS = _NUMBERS | {"rope_type", "type", "truncate", *ROPE_TYPES["longrope"]}


@dataclass(frozen=True, slots=True)
class ConfigOverrides:
    """fields: replace those of config.json. rope_scaling: replaces its rotary scaling, and keeps
    rope_theta. Both apply to the whole model, not to a draft model."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    rope_scaling: Mapping[str, Any] | None = None

    @classmethod
    def parse(cls, hf_overrides: str | None, rope_scaling: str | None) -> ConfigOverrides:
        """From JSON objects. Raises UnsupportedModel for rotary parameters that are not known."""
        overrides = cls(
            json.loads(hf_overrides or "{}"), json.loads(rope_scaling) if rope_scaling else None
        )
        with overrides.named():
            overrides._check()
        return overrides

    def __bool__(self) -> bool:
        return bool(self.fields) or self.rope_scaling is not None

    def __str__(self) -> str:
        given = (("hf-overrides", self.fields or None), ("rope-scaling", self.rope_scaling))
        return " ".join(
            f"--{name}={json.dumps(value)}" for name, value in given if value is not None
        )

    @contextmanager
    def named(self) -> Iterator[None]:
        """Prefix errors of the changed config with the options."""
        try:
            yield
        except UnsupportedModel as error:
            if not self:
                raise
            raise type(error)(f"{self}: {error.message}", **error.metadata) from error

    @property
    def _scaling(self) -> tuple[str, Any] | None:
        """The new rotary parameters with the name they have; None if they do not change."""
        if self.rope_scaling is not None:
            return "rope_scaling", self.rope_scaling
        names = [name for name in ("rope_scaling", "rope_parameters") if name in self.fields]
        return (names[0], self.fields[names[0]] or {}) if names else None

    def _check(self) -> None:
        """Raise UnsupportedModel for unknown rotary parameters, which would have no effect."""
        names = {"rope_scaling", "rope_parameters"} & self.fields.keys()
        if len(names) + (self.rope_scaling is not None) > 1:
            raise UnsupportedModel(
                f"{min(names)} is given twice; give --rope-scaling or one of --hf-overrides"
            )
        name, scaling = self._scaling or ("", {})
        if not isinstance(scaling, Mapping):
            raise UnsupportedModel(f"{name}={scaling!r}: must be an object")
        is_null = not scaling and self.rope_scaling is None
        if is_null or any(isinstance(value, Mapping) for value in scaling.values()):
            return  # no scaling, or one for each type of layer
        rope_type = scaling.get("rope_type", scaling.get("type"))
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModel(f"rope_type={rope_type!r}: give one of {', '.join(ROPE_TYPES)}")
        for parameter, value in scaling.items():
            if parameter not in _PARAMETERS:
                known = ", ".join(sorted(_PARAMETERS))
                raise UnsupportedModel(f"{parameter}={value!r}: unknown; give some of {known}")
            if parameter in _NUMBERS and type(value) not in (int, float):
                raise UnsupportedModel(f"{parameter}={value!r}: must be a number")

    def applied(self, raw: Mapping[str, Any], known: frozenset[str]) -> Mapping[str, Any]:
        """config.json with the changes. known: fields that its model has, besides those in the
        file. Raises UnsupportedModel for others."""
        if not self:
            return raw
        for name, value in self.fields.items():
            if name not in raw and name not in known:
                raise UnsupportedModel(
                    f"{name}={value!r}: {raw.get('model_type')!r} models have no such field; "
                    "leave it out, or correct its name"
                )
        changed = {**raw, **self.fields}
        if self._scaling is None:
            return changed
        name, scaling = self._scaling
        if any(isinstance(value, Mapping) for value in scaling.values()):
            return {**changed, "rope_parameters": scaling, "rope_scaling": None}
        before = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        kept = {} if scaling else {"rope_type": "default"}
        kept |= {key: before[key] for key in _KEPT if key in before and key not in self.fields}
        # rope_scaling takes precedence over rope_parameters.
        changed["rope_scaling"] = {**kept, **scaling}
        if ORIGINAL_LENGTH in scaling and ORIGINAL_LENGTH in raw:
            changed[ORIGINAL_LENGTH] = scaling[ORIGINAL_LENGTH]
        return changed


NO_OVERRIDES = ConfigOverrides()
