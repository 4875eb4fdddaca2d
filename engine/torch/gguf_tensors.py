"""Tensors of a GGUF file under transformers' names, mapped: floats as they are, and the blocks of
quantised weights as pieces of engine.quantization.decode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from baton.gguf.architectures import Architecture, Reading, architecture_of, tensor_name
from baton.gguf.reader import GgufFile, TensorInfo, read_gguf

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EMBEDDINGS, _OUTPUT = "model.embed_tokens", "lm_head"


def gguf_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors: `.weight` or `.bias` of floats, `.blocks` [rows, bytes] uint8 of quantised
    layers. An output layer that shares quantised weights with the embeddings occurs as one of its
    own, as baton.gguf.folder declares it. Raises ModelError."""
    file = read_gguf(path)
    architecture = architecture_of(file)
    mapped = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    for info in file.tensors.values():
        name = tensor_name(architecture, info.name)
        if name is None:
            continue
        tensor = _rows(file, architecture, info, mapped)
        if not info.type.is_quantized:
            yield name, tensor
            continue
        layer = name.removesuffix(".weight")
        yield f"{layer}.blocks", tensor
        if layer == _EMBEDDINGS and "output.weight" not in file.tensors:
            yield f"{_OUTPUT}.blocks", tensor


def _rows(
    file: GgufFile, architecture: Architecture, info: TensorInfo, mapped: torch.Tensor
) -> torch.Tensor:
    """A tensor in transformers' order of rows and with its norms, as far as both differ."""
    raw = mapped[info.offset : info.offset + info.num_bytes]
    kind = info.type.name
    # Not every file aligns tensors to their elements.
    aligned = raw if info.offset % 4 == 0 else raw.clone()
    tensor = aligned.view(_FLOATS[kind]) if kind in _FLOATS else raw
    tensor = tensor.view(*info.shape[:-1], -1)
    if architecture.norm_offset and info.name.endswith("norm.weight"):
        return tensor - architecture.norm_offset
    heads = Reading(file).num_paired_heads(info.name) if architecture.is_interleaved else 0
    if not heads:
        return tensor
    paired = tensor.view(heads, -1, 2, *tensor.shape[1:])
    return paired.transpose(1, 2).reshape(tensor.shape)
