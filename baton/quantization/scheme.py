"""The schemes that `baton quantize` writes, in compressed-tensors' layout. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

Scheme = Literal["int8", "int4", "fp8"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)

#: Group sizes of int4, the best for speed first.
GROUP_SIZES = (128, 64, 32)
_FORMATS: dict[Scheme, str] = {
    "int8": "int-quantized",
    "int4": "pack-quantized",
    "fp8": "float-quantized",
}


def choose_group_size(num_inputs: Iterable[int]) -> int | None:
    """The first of GROUP_SIZES that divides the inputs of every layer; None if none does."""
    sizes = set(num_inputs)
    return next((g for g in GROUP_SIZES if all(size % g == 0 for size in sizes)), None)


def quantization_config(scheme: Scheme, group_size: int | None) -> dict[str, Any]:
    """What config.json says of a checkpoint whose linear layers, all but lm_head, are of a scheme.

    group_size: of int4 alone. Activations of int8 and fp8 are rounded as they come, token by token, by those who run the
    checkpoint in that type.
    """
    is_float = scheme == "fp8"
    weights: dict[str, Any] = {
        "num_bits": 4 if scheme == "int4" else 8,
        "type": "float" if is_float else "int",
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
        "quant_method": "compressed-tensors",
        "format": _FORMATS[scheme],
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None if scheme == "int4" else activations,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
