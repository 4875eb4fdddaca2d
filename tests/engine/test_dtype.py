"""auto: the checkpoint's type where the device computes fast in it, and else one that holds its
values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.errors import ConfigError
from engine import dtype as module
from engine.dtype import choose_dtype
from tests.support.engines import load_engine
from tests.support.tiny_models import make_tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def chosen(
    monkeypatch: pytest.MonkeyPatch, stored: str, level: str, *, has_products: bool = False
) -> str:
    monkeypatch.setattr(module, "cpu_level", lambda: level)
    monkeypatch.setattr(module, "has_bfloat16_products", lambda: has_products)
    return choose_dtype("auto", stored, CPU).name


@pytest.mark.parametrize("level", ["avx2", "avx512", "avx512_bf16", "neon", "neon_bf16"])
def test_native_kernels_take_every_type_as_it_is(
    monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    for stored in ("float32", "bfloat16", "float16"):
        assert chosen(monkeypatch, stored, level) == stored


def test_torch_takes_bfloat16_where_the_cpu_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, "bfloat16", "none") == "float32"
    assert chosen(monkeypatch, "bfloat16", "none", has_products=True) == "bfloat16"
    assert chosen(monkeypatch, "float16", "none", has_products=True) == "float32"


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_a_gpu_takes_the_checkpoints(stored: str) -> None:
    assert choose_dtype("auto", stored, CUDA).name == stored


def test_what_is_asked_for_is_taken() -> None:
    assert choose_dtype("float16", "bfloat16", CPU).name == "float16"
    with pytest.raises(ConfigError, match="int3"):
        choose_dtype("int3", "bfloat16", CPU)


def test_an_engine_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cpu_level", lambda: "none")
    model = make_tiny_model(tmp_path, "llama", dtype=torch.float16)
    spec = load_engine(str(model), num_blocks=8, progress=lambda _: None).spec
    assert spec.layout.dtype == "float32"
    assert "float16" in spec.dtype_reason
