"""Which models by transformers' code a graph can hold, found without data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.transformers import recordable
from engine.transformers.describe import describe
from engine.transformers.recordable import why_not
from tests.support.architectures import ARCHITECTURES, model_type


def reason(folder: Path, name: str) -> str:
    from transformers import AutoConfig

    settings = {key: value for key, value in ARCHITECTURES[name].items() if key != "model_type"}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    AutoConfig.for_model(model_type(name), **settings, **tokens).save_pretrained(folder)
    return why_not(folder, describe(folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("lfm2", "falcon_h1", "bamba", "qwen3_5_text", "olmo_hybrid", "gemma2", "bloom"),
        *("granitemoehybrid", "jamba", "lara_mini", "qwen3_next", "mixtral"),
    ],
)
def test_decode_steps_need_no_host(name: str, tmp_path: Path) -> None:
    assert not reason(tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt_oss", "grouped product computes its experts"),
        ("dbrx", "nonzero, which depends on data"),
        ("mpt", "with numbers of the host"),
        ("gemma3n_text", "torch.tensor with numbers of the host"),
    ],
)
def test_steps_that_need_the_host_are_not_recorded(name: str, text: str, tmp_path: Path) -> None:
    assert text in reason(tmp_path, name)


def _reads(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.sum())


def _selects(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


def _copies(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([2.0], device=x.device)


def _moves(x: torch.Tensor) -> torch.Tensor:
    return x * torch.ones(1).to(x.device)


def _lists(x: torch.Tensor) -> torch.Tensor:
    return x * len(x.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("needs", [_reads, _selects, _copies, _moves, _lists])
def test_what_needs_the_host_is_noticed(
    needs: Callable[[torch.Tensor], torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = recordable.make_model

    def make_other(config: Any) -> Any:
        model = make(config)

        class Needing(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return needs(x)

        model.model.norm = Needing()
        return model

    assert not reason(tmp_path, "llama")
    monkeypatch.setattr(recordable, "make_model", make_other)
    assert reason(tmp_path, "llama")
