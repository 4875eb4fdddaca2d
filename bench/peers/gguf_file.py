"""A Llama checkpoint as the file that llama.cpp reads: `bench/peers/.venv/bin/python -m
bench.peers.gguf_file FOLDER DTYPE FILE`.

DTYPE is bfloat16, float32, or int8, which becomes Q8_0: 8 bits for each weight and a float16 scale
for 32 of them. Prompts are token ids: its vocabulary is made of numbers, for llama.cpp's server
writes text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

_TYPES = {
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "float32": gguf.GGMLQuantizationType.F32,
    "int8": gguf.GGMLQuantizationType.Q8_0,
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tensors_of(path: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Name and values of each bfloat16 tensor of a safetensors file, which begins with the length
    of its JSON header."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
        for name, about in header.items():
            if name == "__metadata__":
                continue
            if about["dtype"] != "BF16":
                raise ValueError(f"{path}: {name} is {about['dtype']}; only BF16 is read here")
            first, end = about["data_offsets"]
            file.seek(start + first)
            halves = np.frombuffer(file.read(end - first), np.uint16).astype(np.uint32)
            yield name, (halves << 16).view(np.float32).reshape(about["shape"])


def gguf_name(name: str) -> str:
    """GGUF name of a tensor of transformers' Llama. Raises KeyError for an unknown one."""
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.weight"
    return f"{_NAMES[stem]}.weight"


def interleaved(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of each head as llama.cpp rotates them: pairs side by side, not half a head apart."""
    num_rows, num_columns = weight.shape
    halves = weight.reshape(num_heads, 2, num_rows // num_heads // 2, num_columns)
    return halves.swapaxes(1, 2).reshape(num_rows, num_columns)


def write_gguf(folder: Path, dtype: str, path: Path) -> None:
    """Raises ValueError for a checkpoint of another kind."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"{folder}: {config['model_type']} is not llama")
    writer = gguf.GGUFWriter(path, "llama")
    describe(writer, config)
    add_numbered_vocabulary(writer, config["vocab_size"])
    for name, values in tensors_of(folder / "model.safetensors"):
        if ".q_proj." in name:
            _add(writer, name, interleaved(values, config["num_attention_heads"]), dtype)
        elif ".k_proj." in name:
            _add(writer, name, interleaved(values, config["num_key_value_heads"]), dtype)
        else:
            _add(writer, name, values, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the sizes of a model. config: of transformers."""
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    rope: dict[str, Any] = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def add_numbered_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Write a vocabulary in which each token's text is its id."""
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"\u2581{token}" for token in range(size)])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_add_bos_token(False)


def _add(writer: gguf.GGUFWriter, name: str, values: NDArray[np.float32], dtype: str) -> None:
    """Norms stay float32, as llama.cpp wants them."""
    kind = _TYPES[dtype] if values.ndim > 1 else _TYPES["float32"]
    writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)


def main() -> None:
    """Write the file whole, or not at all."""
    folder, dtype, path = sys.argv[1:]
    part = Path(f"{path}.part")
    write_gguf(Path(folder), dtype, part)
    part.rename(path)


if __name__ == "__main__":
    main()
