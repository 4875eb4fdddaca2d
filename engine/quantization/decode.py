"""Decodes a quantised layer's weight from its tensors in a checkpoint.

Layouts, by the names of the tensors (out and in are the layer's sizes, a word is an int32 of 32 /
bits levels):
    compressed-tensors, packed   weight_packed [out, words of in], weight_scale [out, groups],
                                 weight_shape [2] and, where they apply, weight_zero_point
                                 [words of out, groups], weight_g_idx [in]
    compressed-tensors           weight [out, in] int8 or float8, weight_scale [out, groups] or [1]
    GPTQ                         qweight [words of in, out], qzeros [groups, words of out],
                                 scales [groups, out], g_idx [in]
    fp8                          weight [out, in] float8, weight_scale_inv [blocks of out, blocks of
                                 in], which weights are multiplied by for all its name; without
                                 blocks weight_scale_inv or weight_scale, [] or [1]
    AWQ                          qweight [in, words of out], qzeros [groups, words of out],
                                 scales [groups, out]; the eight levels of a word are those of
                                 outputs 0, 2, 4, 6, 1, 3, 5, 7
    GGUF                         blocks [out, bytes] uint8: see engine.quantization.gguf
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.quantization.config import QuantizationConfig
from engine.quantization.gguf import decode_blocks
from engine.quantization.packing import unpack
from engine.quantization.weight import Float8Weight, QuantizedWeight, StoredWeight

Pieces = Mapping[str, torch.Tensor]

#: Position of each of eight outputs in a word of AWQ.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def required_pieces(config: QuantizationConfig) -> frozenset[str]:
    """Last parts of the names of a quantised layer's tensors; none if all experts' are in one."""
    if config.method == "mxfp4":
        return frozenset()
    if config.method == "gptq":
        return frozenset({"qweight", "qzeros", "scales", "g_idx"})
    if config.method == "awq":
        return frozenset({"qweight", "qzeros", "scales"})
    if config.method == "fp8":
        return frozenset({"weight", _scale_name(config)})
    if config.method == "gguf":
        return frozenset({"blocks"})
    names = {"weight_scale"}
    names |= {"weight_packed", "weight_shape"} if config.is_packed else {"weight"}
    if not config.is_symmetric:
        names.add("weight_zero_point")
    if config.has_order:
        names.add("weight_g_idx")
    return frozenset(names)


def layer_of_scheme(name: str, config: QuantizationConfig) -> str | None:
    """Name of the quantised layer that a tensor belongs to, for one marker tensor per layer; None
    for all other tensors."""
    telling = {"gptq": "qweight", "awq": "qweight", "fp8": _scale_name(config), "gguf": "blocks"}
    layer, _, piece = name.rpartition(".")
    is_marker = usual_piece(piece, config) == telling.get(config.method, "weight_scale")
    return layer if is_marker else None


def usual_piece(piece: str, config: QuantizationConfig) -> str:
    """The one name of pieces that checkpoints have by two."""
    is_scale = config.method == "fp8" and piece in ("weight_scale", "weight_scale_inv")
    return _scale_name(config) if is_scale else piece


def _scale_name(config: QuantizationConfig) -> str:
    return "weight_scale_inv" if config.block_rows else "weight_scale"


def decode(pieces: Pieces, config: QuantizationConfig) -> StoredWeight | torch.Tensor:
    """Decode the weight; a dense one [out, in] float32 if the levels cannot be kept (reordered
    groups).

    Raises ValueError if sizes contradict each other.
    """
    if config.method == "gptq":
        return _gptq(pieces, config)
    if config.method == "awq":
        return _awq(pieces)
    if config.method == "fp8":
        return _fp8(pieces, config)
    if config.method == "gguf":
        return decode_blocks(pieces["blocks"], config.block_type)
    return _compressed_tensors(pieces, config)


def _gptq(pieces: Pieces, config: QuantizationConfig) -> QuantizedWeight | torch.Tensor:
    levels = unpack(pieces["qweight"].t(), config.bits)
    num_out = levels.shape[0]
    zeros = unpack(pieces["qzeros"], config.bits, num_out).t().float() + config.zero_offset
    return _grouped(levels, pieces["scales"].t().float(), zeros, pieces["g_idx"], config.bits)


def _awq(pieces: Pieces) -> QuantizedWeight:
    words = (unpack(pieces[name], 4) for name in ("qweight", "qzeros"))
    levels, zeros = (
        each.view(each.shape[0], -1, 8)[:, :, _AWQ_PLACES].flatten(1).t() for each in words
    )
    scales = pieces["scales"].t().float().contiguous()
    return QuantizedWeight(levels.contiguous(), scales, zeros.float().contiguous(), 4)


def _fp8(pieces: Pieces, config: QuantizationConfig) -> Float8Weight:
    """Expand each block's scale to its outputs, so that a rank or another order can select single
    outputs; with blocks of 128 the scales are 3 % of the weight's bytes."""
    codes, scales = _float8(pieces["weight"]), pieces[_scale_name(config)].float()
    if not config.block_rows:
        return _of_one_scale(codes, scales)
    num_out, num_in = codes.shape
    blocks = (-(-num_out // config.block_rows), -(-num_in // config.group_size))
    if scales.shape != blocks:
        raise ValueError(f"weight_scale_inv is {list(scales.shape)}, of blocks {list(blocks)}")
    by_output = scales.repeat_interleave(config.block_rows, 0)[:num_out]
    return Float8Weight(codes, by_output, min(config.group_size, num_in))


def _of_one_scale(codes: torch.Tensor, scales: torch.Tensor) -> Float8Weight:
    """scales: one of all outputs, or one of each."""
    return Float8Weight(codes, scales.flatten().expand(len(codes))[:, None], codes.shape[1])


def _float8(codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"weight is {codes.dtype}; float8_e4m3fn is read")
    return codes


def _compressed_tensors(pieces: Pieces, config: QuantizationConfig) -> StoredWeight | torch.Tensor:
    scales = pieces["weight_scale"].float()
    if config.kind == "float":
        return _of_one_scale(_float8(pieces["weight"]), scales)
    if config.is_packed:
        num_out, num_in = pieces["weight_shape"].tolist()
        levels = unpack(pieces["weight_packed"], config.bits, num_in)
    else:
        num_out = pieces["weight"].shape[0]
        levels = (pieces["weight"].to(torch.int16) + (1 << (config.bits - 1))).to(torch.uint8)
    scales = scales.expand(num_out, -1) if scales.dim() == 2 else scales.expand(num_out)[:, None]
    zeros = _stored_zeros(pieces, config, num_out)
    order = pieces.get("weight_g_idx") if config.has_order else None
    return _grouped(levels, scales, zeros, order, config.bits)


def _stored_zeros(pieces: Pieces, config: QuantizationConfig, num_out: int) -> torch.Tensor | None:
    """Zero points [out, groups], in units of the (nonnegative) levels."""
    if config.is_symmetric:
        return None
    zeros = pieces["weight_zero_point"]
    if config.is_packed:
        return unpack(zeros.t().contiguous(), config.bits, num_out).t().float()
    return zeros.float() + (1 << (config.bits - 1))


def _grouped(
    levels: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None,
    bits: int,
) -> QuantizedWeight | torch.Tensor:
    """order: group of each input; None if groups are consecutive."""
    num_in, num_groups = levels.shape[1], scales.shape[1]
    if num_in % num_groups:
        raise ValueError(f"{num_in} inputs in {num_groups} groups")
    usual = torch.arange(num_in) // (num_in // num_groups)
    if order is not None and not torch.equal(order.long(), usual):
        index = order.long()
        middle = torch.tensor(float(1 << (bits - 1)))
        return (levels.float() - (middle if zeros is None else zeros[:, index])) * scales[:, index]
    kept = None if zeros is None else zeros.contiguous()
    return QuantizedWeight(levels.contiguous(), scales.contiguous(), kept, bits)
