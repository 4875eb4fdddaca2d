"""GGUF files written by the `gguf` package, beside dense checkpoints with the very weights that
they mean: names, metadata and dequantisation are that package's, not the product's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from bench.peers.gguf_file import describe, interleaved
from tests.support.tiny_models import CHAT_TEMPLATE

Type = gguf.GGMLQuantizationType
_ARCHITECTURES = {"gemma3_text": "gemma3"}
#: Byte of a block's float16 scales, by type.
_HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}


def random_blocks(name: str, num_rows: int, num_in: int, size: float, seed: int) -> NDArray[Any]:
    """Random rows of a quantised type [num_rows, bytes], with weights of about `size`."""
    kind, random = Type[name], np.random.default_rng(seed)
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (num_rows * num_in // num_values, num_bytes), dtype=np.uint8)
    for at in _HALVES[name]:
        scales = random.uniform(0.5, 1.0, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    values = gguf.quants.dequantize(blocks, kind)
    for at in _HALVES[name]:
        scales = blocks[:, at : at + 2].copy().view(np.float16) * (size / values.std())
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(num_rows, -1)


def write_gguf(folder: Path, path: Path, type_of: Any = lambda _: "F32", **metadata: Any) -> Path:
    """The checkpoint in `folder` as a GGUF file. type_of: type of a linear layer's or the
    embeddings' tensor, by its name in GGUF; of quantised types weights are drawn anew, and the
    checkpoint gets them too. metadata: further entries, of the architecture."""
    config = json.loads((folder / "config.json").read_text())
    name = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    writer = gguf.GGUFWriter(path, name)
    describe(writer, config)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    for key, value in metadata.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{name}.{key.replace('__', '.')}", value)
    if (folder / "tokenizer.json").is_file():
        _add_vocabulary(writer, folder)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    tensors = load_file(folder / "model.safetensors")
    for seed, (tensor, values) in enumerate(sorted(tensors.items())):
        own = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        assert own is not None
        kind = type_of(own) if values.dim() > 1 else "F32"
        rows = values.float().numpy()
        if name.startswith("gemma") and own.endswith("norm.weight"):
            rows = rows + 1
        if kind in _HALVES:
            raw = random_blocks(kind, *values.shape, float(values.std()), seed)
            tensors[tensor] = torch.from_numpy(gguf.quants.dequantize(raw, Type[kind]))
        else:
            raw = gguf.quants.quantize(rows, Type[kind])
            tensors[tensor] = torch.from_numpy(gguf.quants.dequantize(raw, Type[kind]))
            if name.startswith("gemma") and own.endswith("norm.weight"):
                tensors[tensor] = values
        if name == "llama" and values.dim() > 1 and ".attn_q." in own:
            raw = interleaved(raw, config["num_attention_heads"])
        if name == "llama" and values.dim() > 1 and ".attn_k." in own:
            raw = interleaved(raw, config["num_key_value_heads"])
        writer.add_tensor(own, raw, raw_dtype=Type[kind])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter, folder: Path) -> None:
    """A byte-level vocabulary without merges."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    special = {index for index, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index in special else 1 for index in range(len(tokens))])
    writer.add_token_merges([])
    writer.add_eos_token_id(tokens.index("<|endoftext|>"))
    writer.add_chat_template(CHAT_TEMPLATE)


def dense_twin(folder: Path, twin: Path) -> Path:
    """A copy of a checkpoint, for write_gguf to change."""
    shutil.copytree(folder, twin)
    return twin
