"""What cannot hold --batch-invariant is refused, and the reason named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.errors import ConfigError
from baton_kernels.attention_backends import REFERENCE
from baton_kernels.cpu.library import library
from engine import attention_choice
from engine.attention_choice import check_batch_invariant
from engine.families.read import read_config
from tests.support.engines import load_engine
from tests.support.tiny_models import make_tiny_model


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"attention_backend": "sdpa"}, "attention-backend=sdpa"),
        ({"model_impl": "transformers"}, "transformers' code"),
        ({"dtype": "float16"}, "float16"),
    ],
)
@pytest.mark.skipif(library() is None, reason="no native kernels")
def test_on_a_cpu(options: dict[str, str], says: str, tmp_path: Path) -> None:
    path = str(make_tiny_model(tmp_path / "model", "llama"))
    with pytest.raises(ConfigError, match=f"batch_invariant=.*{says}"):
        load_engine(path, num_blocks=8, batch_invariant=True, **options)  # type: ignore[arg-type]


def test_without_native_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = read_config(make_tiny_model(tmp_path / "model", "llama"))
    monkeypatch.setattr(attention_choice, "library", lambda: None)
    with pytest.raises(ConfigError, match="no native kernels"):
        check_batch_invariant(config, "float32", torch.device("cpu"))


def test_on_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    cuda = torch.device("cuda")
    check_batch_invariant(read_config(make_tiny_model(tmp_path / "a", "qwen3")), "bfloat16", cuda)
    mixture = read_config(make_tiny_model(tmp_path / "b", "qwen3_moe"))
    with pytest.raises(ConfigError, match="experts"):
        check_batch_invariant(mixture, "bfloat16", cuda)


@pytest.mark.skipif(library() is None, reason="no native kernels")
def test_a_cpu_holds_it_as_it_is(tmp_path: Path) -> None:
    path = str(make_tiny_model(tmp_path / "model", "llama"))
    specs = [
        load_engine(path, num_blocks=8, batch_invariant=value).spec.numerics
        for value in (False, True)
    ]
    assert specs[0] == specs[1]
    assert REFERENCE.version == ""
