"""SmolLM2-135M-Instruct as weights without blocks, by the gguf package's reading of its file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import torch

from baton.gguf.folder import unfold


def dequantised(file: Path) -> Any:
    """transformers' model, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(file)
    config: Any = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    found = {tensor.name: tensor for tensor in reader.tensors}
    for name, parameter in model.named_parameters():
        tensor = found[str(names.get_name(name, try_suffixes=(".weight",)))]
        dense = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = torch.from_numpy(dense.copy())
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            pairs = values.view(-1, 32, 2, values.shape[1])
            values = pairs.transpose(1, 2).reshape(values.shape)
        parameter.data = values.view(parameter.shape).float()
    return model.eval()


def write_tokenizer(file: Path, folder: Path) -> None:
    """Write the file's tokenizer as transformers reads it."""
    unfolded = unfold(file)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(unfolded / name, folder)
