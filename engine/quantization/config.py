"""Parses quantization_config of a config.json into the layouts that Baton supports. Imports no
torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from baton.errors import UnsupportedModel
from baton.gguf.block_types import BLOCK_TYPES

Method = Literal["compressed-tensors", "gptq", "awq", "fp8", "gguf", "mxfp4"]

#: Formats of compressed-tensors, by kind of number.
_FORMATS = {
    "pack-quantized": "int",
    "int-quantized": "int",
    "float-quantized": "float",
}


#: Any linear layer other than lm_head.
_SOME_LAYER = "model.layers.0.mlp.down_proj"


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Storage of a checkpoint's linear layers.

    group_size: inputs that share a scale; 0: all inputs of an output share one.
    block_rows: outputs that share a scale; 0: each output has its own.
    is_packed: several levels per int32, instead of one number per element.
    has_order: an index assigns inputs to groups (act-order), instead of their position.
    zero_offset: added to a stored zero point.
    output_layer: storage of lm_head; None if it is not quantised.
    layers: storage of each layer, by name, where they differ (gguf); others are not quantised.
    block_type: of a layer in a GGUF file, a name of BLOCK_TYPES.
    packed_bytes: bytes of a weight with its part of the scales, loaded as it is stored; 0 for
    others. packed_group: inputs that share a scale there. only_experts: a mixture's experts alone
    are quantised.
    """

    method: Method
    kind: Literal["int", "float", "mxfp4"]
    bits: int
    group_size: int
    is_symmetric: bool
    is_packed: bool
    has_order: bool = False
    zero_offset: int = 0
    block_rows: int = 0
    output_layer: QuantizationConfig | None = None
    layers: Mapping[str, QuantizationConfig] = field(default_factory=dict)
    block_type: str = ""
    packed_bytes: float = 0.0
    packed_group: int = 0
    only_experts: bool = False

    def of(self, layer: str) -> QuantizationConfig:
        """Storage of a layer, by its name in the checkpoint."""
        if layer in self.layers:
            return self.layers[layer]
        return self.output_layer or self if layer == "lm_head" else self

    def is_quantized(self, layer: str) -> bool:
        """Whether a layer that may be quantised is."""
        if self.only_experts:
            return ".experts." in layer
        return self.method != "gguf" or layer in self.layers

    def loaded_bytes(self, layer: str) -> float:
        """Bytes of one of a layer's weights as loaded, with its part of the scales. During loading
        each level takes a byte regardless of its bits, except in layers of a GGUF file, which are
        packed one by one, and those with packed_bytes."""
        own = self.of(layer)
        if own.packed_bytes:
            return own.packed_bytes
        if own.block_type:
            return BLOCK_TYPES[own.block_type].packed_bytes
        return 1.0 + (4 / own.group_size if own.kind == "float" and own.group_size else 0.0)


#: A mixture's experts in mxfp4: 32 numbers of half a byte, and a byte of all.
MXFP4 = QuantizationConfig(
    *("mxfp4", "mxfp4", 4, 0),
    is_symmetric=True,
    is_packed=True,
    packed_bytes=17 / 32,
    packed_group=32,
    only_experts=True,
)


def parse_quantization(raw: Mapping[str, Any] | None) -> QuantizationConfig | None:
    """Parse quantization_config; None for an unquantised checkpoint. Raises UnsupportedModel for
    unsupported layouts."""
    if not raw:
        return None
    method = raw.get("quant_method", "unknown")
    try:
        if method == "gptq":
            return _gptq(raw)
        if method == "awq":
            return _awq(raw)
        if method == "compressed-tensors":
            return _compressed_tensors(raw)
        if method == "fp8":
            return _fp8(raw)
        if method == "gguf":
            return _gguf(raw)
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise UnsupportedModel(f"quantization_config cannot be read: {error!r}") from error
    raise _refusal("quant_method", method, "compressed-tensors, gptq, awq, fp8 or gguf")


def _refusal(name: str, value: object, known: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"quantization_config.{name}={value}: {known} is read; "
        "use the unquantised checkpoint, or one in a format of docs/quantization.md"
    )


def _gptq(raw: Mapping[str, Any]) -> QuantizationConfig:
    if raw["bits"] not in (4, 8):
        raise _refusal("bits", raw["bits"], "4 or 8")
    layers = QuantizationConfig(
        method="gptq",
        kind="int",
        bits=raw["bits"],
        group_size=max(0, int(raw["group_size"])),
        is_symmetric=False,
        is_packed=True,
        has_order=True,
        # The first version of the format stores zero points minus one.
        zero_offset=0 if raw.get("checkpoint_format") == "gptq_v2" else 1,
    )
    return replace(layers, output_layer=layers) if raw.get("lm_head") else layers


def _awq(raw: Mapping[str, Any]) -> QuantizationConfig:
    if str(raw.get("version", "gemm")).lower() != "gemm":
        raise _refusal("version", raw["version"], "gemm")
    bits = raw.get("bits", raw.get("w_bit"))
    if bits != 4:
        raise _refusal("bits", bits, "4")
    group_size = max(0, int(raw.get("group_size", raw.get("q_group_size", 0))))
    return QuantizationConfig("awq", "int", 4, group_size, is_symmetric=False, is_packed=True)


def _fp8(raw: Mapping[str, Any]) -> QuantizationConfig:
    """transformers' FineGrainedFP8Config: blocks of weights share a scale, or all of a weight's do.
    Activations are rounded as they come, with either activation_scheme: see PendingLayers."""
    if raw.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refusal("fmt", raw["fmt"], "e4m3")
    if raw.get("activation_scheme", "dynamic") not in ("dynamic", "static"):
        raise _refusal("activation_scheme", raw["activation_scheme"], "dynamic or static")
    block = raw.get("weight_block_size")
    rows, columns = (int(size) for size in block) if block else (0, 0)
    if block and (rows < 1 or columns < 1):
        raise _refusal("weight_block_size", block, "a pair of sizes from 1")
    return QuantizationConfig(
        method="fp8",
        kind="float",
        bits=8,
        group_size=columns,
        is_symmetric=True,
        is_packed=False,
        block_rows=rows,
    )


def _gguf(raw: Mapping[str, Any]) -> QuantizationConfig:
    """As baton.gguf.folder writes it: the type of each layer."""
    known = {name: _of_blocks(name) for name, kind in BLOCK_TYPES.items() if kind.is_quantized}
    layers = {layer: known[name] for layer, name in raw["layers"].items()}
    # For all layers together: what holds the levels of any.
    whole = QuantizationConfig("gguf", "int", 8, 16, is_symmetric=False, is_packed=False)
    return replace(whole, layers=layers, output_layer=layers.get("lm_head"))


def _of_blocks(name: str) -> QuantizationConfig:
    kind = BLOCK_TYPES[name]
    return QuantizationConfig(
        *("gguf", "int", kind.bits, kind.group_size),
        is_symmetric=not kind.has_mins,
        is_packed=False,
        block_type=name,
    )


def _compressed_tensors(raw: Mapping[str, Any]) -> QuantizationConfig:
    groups = list(raw["config_groups"].values())
    of_output = [group for group in groups if all(map(_names_output, group["targets"]))]
    of_all = [group for group in groups if group not in of_output]
    if len(of_all) != 1 or len(of_output) > 1:
        raise _refusal("config_groups", len(groups), "one group, and one more for lm_head,")
    layers = _group(of_all[0], raw["format"])
    if of_output:
        return replace(layers, output_layer=_group(of_output[0], raw["format"]))
    is_left_out = any(map(_names_output, raw.get("ignore") or ()))
    return layers if is_left_out else replace(layers, output_layer=layers)


def _names_output(target: str) -> bool:
    """Whether a target names lm_head, literally or by an expression such as `re:.*lm_head`."""
    if not target.startswith("re:"):
        return target == "lm_head"
    expression = re.compile(target.removeprefix("re:"))
    return bool(expression.match("lm_head")) and not expression.match(_SOME_LAYER)


def _group(group: Mapping[str, Any], form_of_all: str) -> QuantizationConfig:
    """Parse a group. form_of_all: format of groups without one."""
    weights = group["weights"]
    form = group.get("format") or form_of_all
    if form not in _FORMATS or _FORMATS[form] != weights["type"]:
        raise _refusal("format", f"{form} of {weights['type']}", ", ".join(_FORMATS))
    bits, strategy = weights["num_bits"], weights["strategy"]
    if bits not in ((4, 8) if weights["type"] == "int" else (8,)):
        raise _refusal("weights.num_bits", bits, "4 or 8, and 8 for floats")
    if strategy not in ("group", "channel", "tensor"):
        raise _refusal("weights.strategy", strategy, "group, channel or tensor")
    return QuantizationConfig(
        method="compressed-tensors",
        kind="int" if weights["type"] == "int" else "float",
        bits=bits,
        group_size=int(weights["group_size"]) if strategy == "group" else 0,
        is_symmetric=bool(weights.get("symmetric", True)),
        is_packed=form == "pack-quantized",
        has_order=weights.get("actorder") in ("group", True),
    )
