"""The two architectures, and their Hugging Face folders."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from models.card import TrainingRecord
from models.tokenizer import END_OF_TEXT, IM_END, PAD, save_tokenizer

VOCAB_SIZE = 4096
MAX_TOKENS = 2048
ROPE_THETA = 10000.0


def _llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=MAX_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=3,
    )


def target_config() -> LlamaConfig:
    """5.8 M parameters, 11.6 MB in bf16."""
    return _llama(hidden=256, intermediate=672, layers=7, heads=8, kv_heads=2)


def draft_config() -> LlamaConfig:
    """0.8 M parameters, two thirds of them the embedding."""
    return _llama(hidden=128, intermediate=224, layers=2, heads=4, kv_heads=2)


def new_model(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """A model with random weights from `seed`."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def _generation_config(tokenizer: Tokenizer) -> dict[str, object]:
    end, im_end, pad = (tokenizer.token_to_id(t) for t in (END_OF_TEXT, IM_END, PAD))
    return {
        "bos_token_id": end,
        "eos_token_id": [end, im_end],
        "pad_token_id": pad,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
    }


def _model_config(model: LlamaForCausalLM) -> dict[str, object]:
    """Also writes `rope_theta` at its old place, for readers older than transformers 5."""
    config: dict[str, object] = model.config.to_dict()
    config |= {"dtype": "bfloat16", "torch_dtype": "bfloat16", "rope_theta": ROPE_THETA}
    return {key: value for key, value in config.items() if not key.startswith("_")}


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _write_weights(model: LlamaForCausalLM, path: Path) -> None:
    """Write bfloat16 weights without the tied output matrix."""
    state = {k: v.detach().bfloat16().contiguous() for k, v in model.state_dict().items()}
    del state["lm_head.weight"]
    save_file(state, path, metadata={"format": "pt"})


def publish_files(folder: Path, write: Callable[[Path], None]) -> None:
    """Call `write` with a temporary folder, then replace files of `folder` by renames."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        written = Path(name)
        write(written)
        for path in sorted(written.iterdir()):
            path.chmod(0o644)
            path.replace(folder / path.name)


def publish_model(
    folder: Path,
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    record: TrainingRecord,
    card: str,
) -> None:
    """Write the whole Hugging Face folder."""

    def write(where: Path) -> None:
        save_tokenizer(tokenizer, where, MAX_TOKENS)
        _write_weights(model, where / "model.safetensors")
        _write_json(where / "config.json", _model_config(model))
        _write_json(where / "generation_config.json", _generation_config(tokenizer))
        _write_json(where / "training.json", asdict(record))
        (where / "README.md").write_text(card)

    publish_files(folder, write)
