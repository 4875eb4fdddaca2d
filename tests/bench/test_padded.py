"""A padded model says what the model says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.padded import pad
from tests.support.tiny_models import make_tiny_model


def load(path: Path) -> Any:
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    return from_pretrained(path).eval()


def test_layers_are_added_and_change_nothing(tmp_path: Path) -> None:
    own = make_tiny_model(tmp_path / "own")
    num_own = load(own).config.num_hidden_layers
    pad(own, num_own + 3, tmp_path / "padded")
    padded = load(tmp_path / "padded")
    assert padded.config.num_hidden_layers == num_own + 3
    assert padded.model.layers[-1].mlp.gate_proj.weight.std() > 0
    ids = torch.arange(10)[None]
    with torch.inference_mode():
        wanted = load(own)(ids).logits
        assert torch.equal(padded(ids).logits, wanted)


def test_a_model_with_as_many_layers_is_refused(tmp_path: Path) -> None:
    own = make_tiny_model(tmp_path / "own")
    with pytest.raises(ValueError, match=r"--num-layers=1: the model has \d+; give more"):
        pad(own, 1, tmp_path / "padded")
    assert not (tmp_path / "padded").exists()
