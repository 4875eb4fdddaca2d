"""The schemes that `baton quantize` writes, in compressed-tensors' layout. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

Scheme = Literal["int8", "int4", "fp8", "sparse24"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)

#: Those that gain from a text.
CALIBRATED: tuple[Scheme, ...] = ("int4", "sparse24")
#: What schemes make of the output layer: four bits, or half of the weights, are too few for it (see
#: docs/quantization.md).
OUTPUT_SCHEMES: Mapping[Scheme, Scheme] = {"int8": "int8", "int4": "int8", "fp8": "fp8"}

#: Group sizes of int4, the best for speed first.
GROUP_SIZES = (128, 64, 32)
_FORMATS: Mapping[Scheme, str] = {
    "int8": "int-quantized",
    "int4": "pack-quantized",
    "fp8": "float-quantized",
}


def choose_group_size(num_inputs: Iterable[int]) -> int | None:
    """The first of GROUP_SIZES that divides the inputs of every layer; None if none does."""
    sizes = set(num_inputs)
    return next((g for g in GROUP_SIZES if all(size % g == 0 for size in sizes)), None)


def quantization_config(
    scheme: Scheme, group_size: int | None, output: Scheme | None
) -> dict[str, Any]:
    """What config.json says of a checkpoint whose linear layers are of a scheme, and lm_head of
    `output`, or not quantised.

    scheme: one that rounds. group_size: of int4 alone.
    """
    has_activations = scheme != "int4"
    groups = {"group_0": _group("Linear", scheme, group_size, has_activations)}
    if output not in (None, scheme):
        groups["group_1"] = _group("re:.*lm_head", output, None, has_activations)
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[scheme] if len(groups) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"] if output is None else [],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _group(
    target: str, scheme: Scheme, group_size: int | None, has_activations: bool
) -> dict[str, Any]:
    """has_activations: they are rounded, too, as they come, token by token, by those who run the
    checkpoint in that type."""
    weights: dict[str, Any] = {
        "num_bits": 4 if scheme == "int4" else 8,
        "type": "float" if scheme == "fp8" else "int",
        "symmetric": True,
        "strategy": "group" if scheme == "int4" else "channel",
        "group_size": group_size if scheme == "int4" else None,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    activations = {**weights, "strategy": "token", "dynamic": True, "observer": None}
    return {
        "format": _FORMATS[scheme],
        "targets": [target],
        "weights": weights,
        "input_activations": activations if has_activations else None,
        "output_activations": None,
    }
