"""Random draft heads for tiny models, as vLLM and SGLang read them. Nothing here was trained."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import Family, make_tiny_model


def make_tiny_head(
    folder: Path, target: Path, kind: str, *, draft_vocab_size: int = 100, seed: int = 0
) -> Path:
    """kind: "eagle" or "eagle3". A head for the tiny Llama in `target`."""
    given = json.loads((target / "config.json").read_text())
    size, inner, dim = given["hidden_size"], 48, given["head_dim"]
    num_q, num_kv = given["num_attention_heads"] * dim, given["num_key_value_heads"] * dim
    is_eagle3 = kind == "eagle3"
    name, wide = ("midlayer", 2 * size) if is_eagle3 else ("layers.0", size)
    shapes = {
        f"{name}.self_attn.q_proj.weight": (num_q, wide),
        f"{name}.self_attn.k_proj.weight": (num_kv, wide),
        f"{name}.self_attn.v_proj.weight": (num_kv, wide),
        f"{name}.self_attn.o_proj.weight": (size, num_q),
        f"{name}.mlp.gate_proj.weight": (inner, size),
        f"{name}.mlp.up_proj.weight": (inner, size),
        f"{name}.mlp.down_proj.weight": (size, inner),
        f"{name}.post_attention_layernorm.weight": (size,),
        "fc.weight": (size, (3 if is_eagle3 else 2) * size),
    }
    if is_eagle3:
        norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
        shapes |= {f"{norm}.weight": (size,) for norm in norms}
        shapes["lm_head.weight"] = (draft_vocab_size, size)
    else:
        shapes["fc.bias"] = (size,)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        part: 0.3 * torch.randn(shape, generator=generator) + (len(shape) == 1)
        for part, shape in shapes.items()
    }
    config = {
        **{key: value for key, value in given.items() if key not in ("architectures", "dtype")},
        "num_hidden_layers": 1,
        "intermediate_size": inner,
        "architectures": ["LlamaForCausalLMEagle"],
    }
    if is_eagle3:
        drafted = torch.randperm(given["vocab_size"], generator=generator)[
            :draft_vocab_size
        ].sort()[0]
        tensors["d2t"] = drafted - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.zeros(given["vocab_size"], dtype=torch.bool).index_fill_(
            0, drafted, 1
        )
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": draft_vocab_size,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_tiny_medusa(
    folder: Path,
    target: Path,
    *,
    num_heads: int = 4,
    num_layers: int = 1,
    is_published: bool = False,
    num_tokens: int | None = None,
    one_output: str = "",
    has_bias: bool = True,
    seed: int = 0,
) -> Path:
    """Medusa heads for the tiny model in `target`. is_published: as FasterDecoding's code writes
    them, else as vLLM reads them. num_tokens: of their vocabulary, if it is not the target's.
    one_output: of all heads: "own", or "target"."""
    given = json.loads((target / "config.json").read_text())
    size, vocab = given["hidden_size"], given["vocab_size"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            name = f"{head}.{layer}.linear" if is_published else f"blocks.{head}.layers.{layer}"
            tensors[f"{name}.weight"] = 0.3 * torch.randn((size, size), generator=generator)
            if has_bias:
                tensors[f"{name}.bias"] = 0.3 * torch.randn(size, generator=generator)
        name = f"{head}.{num_layers}.weight" if is_published else f"lm_heads.{head}.weight"
        if not one_output or (one_output == "own" and head == 0):
            tensors[name] = 0.3 * torch.randn((num_tokens or vocab, size), generator=generator)
    config: dict[str, object] = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers}
    if not is_published:
        config |= {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": size}
        config |= {"vocab_size": vocab, "original_lm_head": bool(one_output)}
    if num_tokens is not None:
        config["truncated_vocab_size"] = num_tokens
        tensors["token_map"] = torch.randperm(vocab, generator=generator)[:num_tokens].sort()[0]
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


#: What tensors of make_tiny_mtp_model's layer for multi-token prediction begin with.
MTP_LAYER = "model.layers.2."


def make_tiny_mtp_model(folder: Path, family: Family, *, is_shared: bool = True) -> Path:
    """A tiny model of two layers with one more in its checkpoint for multi-token prediction, as
    DeepSeek's and GLM's have. is_shared: its embeddings and output layer are the model's.

    Beside it, named FOLDER-deep, the model of three layers of which the last became that one.
    """
    deep = make_tiny_model(folder.with_name(f"{folder.name}-deep"), family, num_hidden_layers=3)
    tensors = load_file(deep / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    config = json.loads((deep / "config.json").read_text())
    size, vocab = config["hidden_size"], config["vocab_size"]

    def random(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(shape, generator=generator) + (len(shape) == 1)

    output, embeddings = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    tensors |= {
        f"{MTP_LAYER}{name}.weight": x
        for name, x in {
            "enorm": random(size),
            "hnorm": random(size),
            "eh_proj": random(size, 2 * size),
            "shared_head.norm": random(size),
            "shared_head.head": output.clone() if is_shared else random(vocab, size),
            "embed_tokens": embeddings.clone() if is_shared else random(vocab, size),
        }.items()
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = {**config, "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    raw.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder
