"""A whole engine on the Triton kernels, interpreted, chooses the tokens that it chooses on their
twins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.engine.load_engine import load_engine
from baton.model import load, native_decoder, packed
from baton.model.quantize import quantize_checkpoint
from baton.quantization.scheme import Scheme
from baton.types import Sampling
from baton_kernels.dispatch import Op
from baton_kernels.quantized_linear import IntLinear, pack_int_weight
from tests.support.drive_engine import generate, token_ids
from tests.support.tiny_models import Family, make_tiny_model

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
