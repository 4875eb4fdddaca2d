"""A whole engine on the Triton kernels, interpreted, chooses the tokens that it chooses on their
twins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.types import Sampling
from baton_kernels import linear
from baton_kernels.dispatch import Op
from baton_kernels.quantized_linear import IntLinear, pack_int_weight
from bench.quantized_checkpoints import Scheme, quantize_checkpoint
from engine.torch import load, native_decoder, packed
from tests.support.adapters import MLP, make_adapter, merged
from tests.support.drive_engine import generate, token_ids
from tests.support.engines import load_engine
from tests.support.tiny_models import Family, make_tiny_model
from tests.support.transformers_greedy import greedy_outputs

PROMPTS = [[5, 77, 200, 3] * 3, [9], list(range(40, 51))]
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.5, seed=7, top_k=40),
    Sampling(temperature=2.0, seed=8, top_p=0.8),
]


@pytest.mark.parametrize(("family", "window"), [("mistral", 7), ("qwen3", None)])
def test_same_tokens(
    family: Family, window: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(tmp_path / family, family, sliding_window=window)

    def answers() -> list[list[int]]:
        engine = load_engine(str(path), num_blocks=40, block_size=4, num_threads=1)
        return token_ids(generate(engine, PROMPTS, SAMPLINGS, 2, chunk_tokens=5))

    wanted = answers()
    used = use_triton(monkeypatch)
    assert answers() == wanted
    names = ("paged_attention", "rms_norm", "rope_kv_write", "sampling", "gated_activation")
    assert used >= {f"baton_kernels.gpu.{name}" for name in names}


HEADS = {"num_attention_heads": 35, "num_key_value_heads": 35}
#: Stretched as DeepSeek does it.
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "mscale_all_dim": 1.0}
LATENT = {
    "deepseek_v2": {"q_lora_rank": None, "hidden_size": 140, **HEADS},
    "deepseek_v3": {"rope_parameters": {**YARN, "original_max_position_embeddings": 64}},
}


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_gives_the_tokens_of_transformers(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, by chunks, with heads in one block and in several."""
    path = make_tiny_model(tmp_path / family, family, **LATENT[family])
    wanted = greedy_outputs(path, PROMPTS, 3)
    used = use_triton(monkeypatch)
    engine = load_engine(str(path), num_blocks=40, block_size=4, num_threads=1, dtype="float32")
    sampling = Sampling(temperature=0.0)
    assert token_ids(generate(engine, PROMPTS, sampling, 3, chunk_tokens=5)) == wanted
    assert used >= {
        f"baton_kernels.gpu.{name}" for name in ("paged_attention", "latent_kv_write", "experts")
    }


def test_adapters_of_experts_and_latent_attention_give_the_tokens_of_merged_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, by chunks, in one batch with a sequence of no adapter."""
    model = make_tiny_model(tmp_path / "model", "deepseek_v3", num_hidden_layers=2)
    own = make_adapter(tmp_path / "own", model, targets=("kv_b_proj", *MLP))
    wanted = greedy_outputs(model, PROMPTS, 3)
    adapted = greedy_outputs(merged(tmp_path / "merged", model, own), PROMPTS, 3)
    assert adapted != wanted
    used = use_triton(monkeypatch)
    # Layers that are packed for a CPU run as twins.
    monkeypatch.setattr(linear, "can_pack", lambda _: False)
    sizes = {"num_blocks": 40, "block_size": 4, "num_threads": 1, "dtype": "float32"}
    engine = load_engine(str(model), **sizes, lora_modules={"own": str(own)})
    adapters = ("own", "", "own")
    greedy = Sampling(temperature=0.0)
    drawn = generate(engine, PROMPTS, greedy, 3, chunk_tokens=5, adapters=adapters)
    outputs = token_ids(drawn)
    assert outputs == [adapted[0], wanted[1], adapted[2]]
    assert "baton_kernels.gpu.experts" in used


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantised_weights_stay_as_they_are(
    scheme: Scheme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are those of the dequantised weights, which the kernel multiplies as levels."""
    source = make_tiny_model(tmp_path / "source", intermediate_size=96)
    quantize_checkpoint(source, tmp_path / scheme, scheme)

    def answers() -> list[list[int]]:
        engine = load_engine(str(tmp_path / scheme), num_blocks=40, block_size=4, num_threads=1)
        return token_ids(generate(engine, PROMPTS, SAMPLINGS, 2, chunk_tokens=5))

    wanted = answers()
    used = use_triton(monkeypatch)
    monkeypatch.setattr(load, "keeps_levels", lambda *_: True)
    monkeypatch.setattr(packed, "pack_quantized", int_linear)
    assert answers() == wanted
    assert "baton_kernels.gpu.quantized_linear" in used


def int_linear(
    levels: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
    bias: torch.Tensor | None,
    *_where: object,
) -> IntLinear:
    """What pack_quantized makes for a GPU."""
    return IntLinear(pack_int_weight(levels, scales, zeros, bits), bias)


def use_triton(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Layers are called operation by operation, as on a GPU; returns the modules of the kernels
    that were."""
    used = set()

    def triton_kernel(self: Op, _device_type: str) -> object:  # type: ignore[type-arg]
        found = self._find("cuda")
        used.add(found.__module__)
        return found

    monkeypatch.setattr(native_decoder, "can_run", lambda *_: False)
    monkeypatch.setattr(Op, "kernel", triton_kernel)
    return used
